"""The shape of a block draft (DFlash, DSpark), and the Hugging Face config that vLLM serves it by, both ways."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nemo_ext.config import ConfigError, show
from nemo_ext.drafts.eagle3_config import rope_theta

FULL, SLIDING = "full_attention", "sliding_attention"
# The names under which vLLM serves these models; it reads DSparkDraftModel with model_type qwen3 as Qwen3DSparkModel.
ARCHITECTURES = {"dflash": ("DFlashDraftModel",), "dspark": ("Qwen3DSparkModel", "DSparkDraftModel")}


@dataclass(frozen=True)
class BlockConfig:
    """Sizes and flags of a block draft, with vLLM's meaning (`DFlashQwen3ForCausalLM`, `Qwen3DSparkForCausalLM`).

    Attributes:
        kind: `dflash` or `dspark`.
        tap_layers: policy layers, from 0, whose OUTPUT is tapped, ascending: the checkpoint's own ids (contract D.2).
        mask_token_id: policy token whose embedding stands in every slot but the first.
        gamma: tokens that a block drafts.
        layer_types: `full_attention` or `sliding_attention` per layer.
        sliding_window: keys at this distance from the slot or further are not seen by sliding layers.
        causal: whether a slot sees earlier slots only, in all layers. None stands for vLLM 0.32's default: in sliding layers
            it does, in full ones not; only a mixture of layers keeps it, for others it becomes what it says.
        logit_scale: what the draft's logits are multiplied by. A target's soft cap is not among what these drafts are
            served with.
        sample_from_anchor: the anchor's own slot predicts too (DSpark), so that a block has gamma rows and not gamma + 1.
        markov_rank, confidence_head, confidence_with_markov: DSpark's heads; 0 and False for DFlash.
    """

    kind: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    tap_layers: tuple[int, ...]
    mask_token_id: int
    gamma: int
    layer_types: tuple[str, ...]
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    sliding_window: int | None = None
    causal: bool | None = None
    logit_scale: float = 1.0
    sample_from_anchor: bool = False
    markov_rank: int = 0
    confidence_head: bool = False
    confidence_with_markov: bool = False

    def __post_init__(self):
        if self.causal is None and len(set(self.layer_types)) == 1:
            object.__setattr__(self, "causal", self.layer_types[0] == SLIDING)

    @property
    def reduced_vocab(self) -> bool:
        """Whether the draft has a vocabulary, and with it an LM head, of its own."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def block_size(self) -> int:
        """Rows of a block: what a checkpoint calls `block_size`."""
        return self.gamma if self.sample_from_anchor else self.gamma + 1

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def causal_in_block(self, layer: int) -> bool:
        return self.layer_types[layer] == SLIDING if self.causal is None else self.causal

    @classmethod
    def for_policy(
        cls,
        kind: str,
        policy: dict,
        tap_layers: Sequence[int],
        *,
        gamma: int,
        mask_token_id: int,
        num_layers: int = 1,
        draft_vocab_size: int | None = None,
        sliding_window: int | None = None,
        markov_rank: int = 64,
        **flags,
    ) -> "BlockConfig":
        """A fresh draft of layers shaped like the policy's, from its Hugging Face config.

        With a `sliding_window` every layer slides, since a mixture is served by vLLM's V2 runner only, and a DFlash draft
        is causal; a DSpark draft is two-sided, which is how vLLM 0.25.1 serves all of them. `markov_rank` is for DSpark,
        which also gets a confidence head over both features.
        """
        if kind == "dspark":
            flags = {"sample_from_anchor": True, "confidence_head": True, "confidence_with_markov": True} | flags
        return cls(
            kind=kind,
            hidden_size=policy["hidden_size"],
            num_layers=num_layers,
            num_heads=policy["num_attention_heads"],
            num_kv_heads=policy["num_key_value_heads"],
            head_dim=policy["head_dim"],
            intermediate_size=policy["intermediate_size"],
            vocab_size=policy["vocab_size"],
            draft_vocab_size=draft_vocab_size or policy["vocab_size"],
            tap_layers=tuple(tap_layers),
            mask_token_id=mask_token_id,
            gamma=gamma,
            layer_types=(FULL if sliding_window is None else SLIDING,) * num_layers,
            sliding_window=sliding_window,
            causal=False if kind == "dspark" else None,
            rope_theta=rope_theta(policy),
            rms_norm_eps=policy["rms_norm_eps"],
            max_position_embeddings=policy["max_position_embeddings"],
            logit_scale=policy.get("logit_scale", 1.0),
            markov_rank=markov_rank if kind == "dspark" else 0,
            **flags,
        )

    @classmethod
    def from_hf(cls, config: dict) -> "BlockConfig":
        """Reads a `config.json` in vLLM's form (`block_formats.vllm_form` makes it of the other ones).

        Raises ConfigError for what vLLM would refuse, reorder or not find.
        """
        dflash = config.get("dflash_config") or {}
        kind = kind_of(config)
        heads = config["num_attention_heads"]
        layer_types, window, causal = _attention(config)
        from_anchor = kind == "dspark" and bool(config.get("sample_from_anchor", True))
        block_size = config.get("block_size") or dflash.get("block_size")
        if not isinstance(block_size, int) or block_size < (1 if from_anchor else 2):
            raise _wrong(f"block_size is {show(block_size)}; it must be the rows of a block, drafted tokens and anchor")
        mask = dflash.get("mask_token_id", config.get("mask_token_id"))
        if not isinstance(mask, int) or not 0 <= mask < config["vocab_size"]:
            raise _wrong(
                f"mask_token_id is {show(mask)}; it must be a token of the policy, 0 to {config['vocab_size'] - 1}"
            )
        shape = cls(
            kind=kind,
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            tap_layers=_taps(config),
            mask_token_id=mask,
            gamma=block_size if from_anchor else block_size - 1,
            layer_types=layer_types,
            rope_theta=rope_theta(config),
            rms_norm_eps=config["rms_norm_eps"],
            max_position_embeddings=config["max_position_embeddings"],
            sliding_window=window,
            causal=causal,
            logit_scale=config.get("logit_scale", 1.0),
            sample_from_anchor=from_anchor,
        )
        return shape if kind == "dflash" else _with_heads(shape, config)

    def to_hf(self, dtype: str = "float32") -> dict:
        """A `config.json` that vLLM serves: 0.20.0, 0.25.1 and 0.32 read the same draft from it.

        `causal` is written out wherever one word can say it, because the versions have other defaults for windows, and
        the tapped layers stand in EAGLE's key too, which all of them read first and alike.
        """
        ids = list(self.tap_layers)
        sliding = SLIDING in self.layer_types
        dflash: dict = {"mask_token_id": self.mask_token_id, "target_layer_ids": ids}
        if self.causal is not None:
            dflash["causal"] = self.causal
        if sliding:
            dflash["swa_window_size"] = self.sliding_window
        config = {
            "architectures": [ARCHITECTURES[self.kind][0]],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": ids,
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in ids],
            "dflash_config": dflash,
            "layer_types": list(self.layer_types),
            # transformers drops the window without the flag, and would make its own layer types without ours.
            "use_sliding_window": sliding,
            "sliding_window": self.sliding_window if sliding else None,
            "max_window_layers": self.num_layers,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "logit_scale": self.logit_scale,
            "torch_dtype": dtype,
        }
        if self.kind == "dspark":
            config |= {
                "sample_from_anchor": self.sample_from_anchor,
                "dspark_bonus_anchor": not self.sample_from_anchor,
                "markov_rank": self.markov_rank,
                "markov_head_type": "vanilla",
                "enable_confidence_head": self.confidence_head,
                "confidence_head_with_markov": self.confidence_with_markov,
            }
        return config


def kind_of(config: dict) -> str:
    """`dflash` or `dspark`, by the architecture. Raises ConfigError for another."""
    architectures = config.get("architectures") or []
    for kind, names in ARCHITECTURES.items():
        if set(names) & set(architectures):
            return kind
    known = " or ".join(name for names in ARCHITECTURES.values() for name in names)
    raise _wrong(f"architectures is {architectures}; a block draft here is {known}")


def _taps(config: dict) -> tuple[int, ...]:
    """The tapped layers from each place that vLLM reads; EAGLE's key counts one more than the others."""
    eagle = config.get("eagle_aux_hidden_state_layer_ids")
    places = {
        "eagle_aux_hidden_state_layer_ids": eagle and [i - 1 for i in eagle],
        "dflash_config.target_layer_ids": (config.get("dflash_config") or {}).get("target_layer_ids"),
        "target_layer_ids": config.get("target_layer_ids"),
    }
    found = {name: list(ids) for name, ids in places.items() if ids}
    if not found:
        raise _wrong("target_layer_ids is missing; it must list the tapped layers of the policy")
    name, ids = next(iter(found.items()))
    for other, others in found.items():
        if others != ids:
            raise _wrong(f"{name} says layers {ids} and {other} says {others}; make them one")
    if ids != sorted(set(ids)) or ids[0] < 0:
        raise _wrong(
            f"target_layer_ids is {ids}; vLLM sorts the layers and drops repeats, so list them ascending, from 0"
        )
    return tuple(ids)


def _attention(config: dict) -> tuple[tuple[str, ...], int | None, bool | None]:
    """Layer types, window and causality, as vLLM resolves them (`_resolve_layer_attention`, `_dflash_layer_causal`)."""
    dflash, layers = config.get("dflash_config") or {}, config["num_hidden_layers"]
    # transformers' Qwen3Config: no flag, no window; without layer types the layers from max_window_layers on slide.
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    types = config.get("layer_types")
    if not types:
        first = config.get("max_window_layers", 28)
        types = [SLIDING if window is not None and i >= first else FULL for i in range(layers)]
    if len(types) != layers or set(types) - {FULL, SLIDING}:
        raise _wrong(f"layer_types is {types}; it must have {FULL} or {SLIDING} for each of {layers} layers")
    causal = config["is_causal"] if config.get("is_causal") is not None else dflash.get("causal")
    if dflash.get("use_swa") and SLIDING not in types:
        # Layers that slide by this flag alone are full ones to the default of `causal`.
        types, causal = [SLIDING] * layers, bool(causal)
    if SLIDING in types:
        window = dflash.get("swa_window_size", window)
        if not isinstance(window, int) or window < 1:
            raise _wrong(
                f"layer_types has {SLIDING} but the window is {show(window)}; give dflash_config.swa_window_size, or "
                "use_sliding_window: true with sliding_window"
            )
    else:
        window = None
    return tuple(types), window, None if causal is None else bool(causal)


def _with_heads(shape: BlockConfig, config: dict) -> BlockConfig:
    """DSpark's heads."""
    rank, variant = config.get("markov_rank"), config.get("markov_head_type", "vanilla")
    if not isinstance(rank, int) or rank < 1:
        raise _wrong(f"markov_rank is {show(rank)}; a DSpark draft has a Markov head of rank 1 or more")
    if variant != "vanilla":
        raise _wrong(f"markov_head_type is {show(variant)}; vLLM serves vanilla only")
    confidence = bool(config.get("enable_confidence_head", False))
    return replace(
        shape,
        markov_rank=rank,
        confidence_head=confidence,
        confidence_with_markov=confidence and bool(config.get("confidence_head_with_markov", False)),
    )


def _wrong(line: str) -> ConfigError:
    return ConfigError(f"policy.draft.model_name: in the draft's config.json, {line}")
