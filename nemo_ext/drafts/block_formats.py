"""Block drafts from other trainers' folders, in the form that vLLM serves (`block_config`).

Three forms are known. vLLM's own has everything at the root or in `dflash_config`. SpecForge's DSpark keeps the heads'
settings in `dflash_config`, where vLLM does not look for them. Speculators' has the layers' settings in
`transformer_layer_config`, counts taps from one, and brings copies of its policy's embedding and head.
"""

from collections.abc import Mapping

import torch

from nemo_ext.config import ConfigError
from nemo_ext.drafts.block_config import ARCHITECTURES, SLIDING, BlockConfig

_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
# What training and serving read live from the policy, or rebuild.
_NOT_KEPT = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d")
_OF_REDUCED_VOCAB = ("lm_head.weight", "d2t")


def vllm_form(config: dict) -> dict:
    """The same draft's `config.json` in vLLM's form; unchanged if it is in it. Raises ConfigError for another draft."""
    if "speculators_model_type" in config:
        return _from_speculators(config)
    dflash = config.get("dflash_config") or {}
    if dflash.get("projector_type", "dflash") not in ("dflash", "dspark"):
        raise ConfigError(
            f"policy.draft.model_name: in the draft's config.json, dflash_config.projector_type is "
            f"{dflash['projector_type']}; a block draft here is dflash or dspark"
        )
    nested = {key: dflash[key] for key in _HEADS if dflash.get(key) is not None}
    if "markov_rank" in nested and dflash.get("enable_confidence_head") is None:
        # SpecForge's own default.
        nested["enable_confidence_head"] = (dflash.get("confidence_head_alpha") or 0.0) > 0.0
    return nested | {key: value for key, value in config.items() if value is not None or key not in nested}


def _from_speculators(config: dict) -> dict:
    """Speculators' form. Full layers are bidirectional there and sliding ones causal unless the flag says otherwise; vLLM
    0.32 reads the flag as the direction of all layers, which is not what such a draft was trained with."""
    kind = config["speculators_model_type"]
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"policy.draft.model_name: in the draft's config.json, speculators_model_type is {kind}; "
            f"a block draft here is {' or '.join(ARCHITECTURES)}"
        )
    if kind == "dflash" and config.get("sample_from_anchor"):
        raise ConfigError(
            "policy.draft.model_name: in the draft's config.json, sample_from_anchor is true; vLLM serves DFlash with the "
            "anchor as the bonus token only, so use a draft trained with false"
        )
    layers = dict(config.get("transformer_layer_config") or {})
    taps = [i - 1 for i in config.get("aux_hidden_state_layer_ids") or []]
    dflash = {"mask_token_id": config.get("mask_token_id"), "target_layer_ids": taps}
    if config.get("sliding_window_non_causal"):
        dflash["causal"] = False
    if SLIDING in (layers.get("layer_types") or []):
        dflash["swa_window_size"] = layers.get("sliding_window")
    form = layers | {
        "architectures": [ARCHITECTURES[kind][0]],
        "block_size": config.get("block_size"),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "target_hidden_size": config.get("target_hidden_size") or layers.get("hidden_size"),
        "dflash_config": dflash,
    }
    if kind == "dspark":
        form |= {"sample_from_anchor": config.get("sample_from_anchor", False)}
        form |= {key: config[key] for key in _HEADS if config.get(key) is not None}
    return form


def vllm_names(shape: BlockConfig, names: Mapping[str, object]) -> dict[str, str]:
    """Name in vLLM's form of each tensor that belongs to the draft, by its name in the folder."""
    kept = {}
    for name in names:
        known = name.replace("midlayer.", "layers.0.", 1).removeprefix("logit_head.")
        if known not in _NOT_KEPT and (shape.reduced_vocab or known not in _OF_REDUCED_VOCAB):
            kept[name] = known
    return kept


def import_block_draft(
    config: dict,
    tensors: Mapping[str, torch.Tensor],
    policy_embedding_VH: torch.Tensor | None = None,
    policy_head_VH: torch.Tensor | None = None,
) -> tuple[dict, dict[str, torch.Tensor]]:
    """A folder of any of the forms as vLLM's config and tensors, in float32.

    Args:
        config, tensors: of the folder.
        policy_embedding_VH, policy_head_VH: of the policy that it will draft for.

    Raises:
        ConfigError: if the folder's own embedding, or whole-vocabulary head, is not the policy's: with the policy's, which
            is the one that is served, it would be another draft.
    """
    shape = BlockConfig.from_hf(vllm_form(config))
    names = vllm_names(shape, tensors)
    for name, (what, live) in {
        "embed_tokens.weight": ("embedding", policy_embedding_VH),
        "lm_head.weight": ("head", policy_head_VH),
    }.items():
        if name in tensors and name not in names and live is not None:
            own = tensors[name]
            if own.shape != live.shape or not torch.allclose(own.float(), live.float(), rtol=2**-7, atol=1e-6):
                raise ConfigError(
                    f"policy.draft.model_name: tensor {name} is not the policy's {what}, which is the one that is trained "
                    "on and served; remove it, or use a draft made for this policy"
                )
    named = {known: tensors[name] for name, known in names.items()}
    if shape.reduced_vocab and "d2t" in named:
        ids = named["d2t"].long() + torch.arange(shape.draft_vocab_size)
        named["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return shape.to_hf(), {name: t.float() if t.is_floating_point() else t for name, t in named.items()}
