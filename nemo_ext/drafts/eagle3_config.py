"""The shape of an EAGLE-3 draft, and its Hugging Face config both ways."""

from dataclasses import dataclass

from nemo_ext.config import ConfigError


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and flags of an EAGLE-3 draft, with vLLM's meaning (`LlamaForCausalLMEagle3`).

    `tap_layers` are policy decoder layers, numbered from 0, whose OUTPUT is tapped, ascending. vLLM numbers the same taps
    by the layer whose input they are, so the checkpoint's ids are one larger (contract D.2).
    `draft_vocab_size` equals `vocab_size` when the vocabulary is whole.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    tap_layers: tuple[int, ...]
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    @classmethod
    def for_policy(cls, policy: dict, tap_layers, *, num_layers=1, draft_vocab_size=None, **flags) -> "Eagle3Config":
        """A draft shaped like one layer of the policy, from the policy's Hugging Face config."""
        return cls(
            hidden_size=policy["hidden_size"],
            num_layers=num_layers,
            num_heads=policy["num_attention_heads"],
            num_kv_heads=policy["num_key_value_heads"],
            head_dim=policy["head_dim"],
            intermediate_size=policy["intermediate_size"],
            vocab_size=policy["vocab_size"],
            draft_vocab_size=draft_vocab_size or policy["vocab_size"],
            tap_layers=tuple(tap_layers),
            rope_theta=rope_theta(policy),
            rms_norm_eps=policy["rms_norm_eps"],
            max_position_embeddings=policy["max_position_embeddings"],
            **flags,
        )

    @classmethod
    def from_hf(cls, config: dict) -> "Eagle3Config":
        """Reads a draft folder's `config.json`. Raises ConfigError for tap ids that are missing or that vLLM would reorder."""
        eagle = config.get("eagle_config") or {}
        ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
        if not ids or list(ids) != sorted(set(ids)) or min(ids) < 1:
            raise ConfigError(
                f"policy.draft.model_name: eagle_aux_hidden_state_layer_ids is {ids} in the draft's config.json; "
                "it must list the tapped layers in ascending order, from 1"
            )
        heads = config["num_attention_heads"]
        return cls(
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            tap_layers=tuple(i - 1 for i in ids),
            rope_theta=rope_theta(config),
            rms_norm_eps=config["rms_norm_eps"],
            max_position_embeddings=config["max_position_embeddings"],
            norm_output=bool(config.get("norm_output", False)),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
            fc_norm=bool(config.get("fc_norm", False)),
        )

    def to_hf(self, dtype: str = "float32") -> dict:
        """A `config.json` that vLLM and the training stacks read. Tap ids stand in both places that are looked at."""
        ids = [layer + 1 for layer in self.tap_layers]
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.hidden_size,
            "num_aux_hidden_states": len(ids),
            "eagle_aux_hidden_state_layer_ids": ids,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "norm_output": self.norm_output,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "torch_dtype": dtype,
        }


def rope_theta(config: dict) -> float:
    """RoPE base from either place that Hugging Face configs keep it (contract B.8)."""
    parameters = config.get("rope_parameters") or {}
    found = config.get("rope_theta") or parameters.get("rope_theta") or 10000.0
    if not isinstance(found, (int, float)):
        raise ConfigError(
            f"policy.draft.model_name: rope_theta is {found} in the draft's config.json; it must be a number"
        )
    return float(found)
