"""Block drafts from other trainers' folders, in the form that vLLM serves (`block_config`).

Three forms are known. vLLM's own has everything at the root or in `dflash_config`. SpecForge's DSpark keeps the heads'
settings in `dflash_config`, where vLLM does not look for them. Speculators' has the layers' settings in
`transformer_layer_config`, counts taps from one, and brings copies of its policy's embedding and head.
"""

from collections.abc import Mapping

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


def read_alike(config: dict) -> bool:
    """Whether vLLM 0.20.0, 0.25.1 and 0.32 all read the same draft from a `config.json`: it is in vLLM's form, names the
    tapped layers under EAGLE's key, and says whether it is causal (which a mixture of layers cannot, in one word)."""
    mixed = len(set(config.get("layer_types") or [])) > 1
    causal = (config.get("dflash_config") or {}).get("causal")
    taps = config.get("eagle_aux_hidden_state_layer_ids")
    return vllm_form(config) == config and bool(taps) and (mixed or causal is not None)


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
