"""Sizes of a fresh draft beside any policy, from the policy's Hugging Face config alone.

A draft has ordinary grouped-query attention and a gated feed-forward layer of its own, whatever the policy has: the
policy's kind of layer is no reason against a draft, but its config may lack a draft's sizes, or mean others by them.
"""

from collections.abc import Mapping
from typing import Any

from nemo_ext.config import ConfigError, show
from nemo_ext.drafts.eagle3_config import rope_theta

HEAD_DIM = 128  # of drafts whose policy has no ordinary attention
KV_HEADS = 8
FFN_PER_HIDDEN = 3
FFN_MULTIPLE = 256
_NEEDED = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings")
_EPS = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "layer_norm_eps")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def fresh_sizes(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The policy's config with the sizes that a fresh draft takes, under the names of a plain dense model.

    Rules:
        hidden size, vocabulary, positions: the policy's.
        attention: the policy's heads, key-value heads and head size, so that draft and policy fill KV-cache pages of one
            size. A policy with latent attention (`kv_lora_rank`), or with no attention heads, has no such numbers: heads
            of 128, as many as fill the hidden size, rounded up to a power of two because tensor-parallel sizes are such,
            and 8 key-value heads.
        feed-forward: `intermediate_size` of a dense policy, and of one with experts whose config tells its dense layers
            apart from its experts; else three times the hidden size (Qwen3's dense models, and the public drafts for
            Qwen3-30B-A3B and Qwen3.5-35B-A3B), rounded up to a multiple of 256.
        rotary positions: the policy's base, over the whole head and without scaling, because the trainer has no other.
            10000 where the policy has no positions.
        norm epsilon: the policy's, under any of its names; else 1e-6.

    Raises:
        ConfigError: a line for what the config lacks.
    """
    missing = [key for key in _NEEDED if not isinstance(policy.get(key), int)]
    if missing:
        raise ConfigError(
            *(
                f"policy.model_name: {key} is {show(policy.get(key))} in the policy's config, so a fresh draft's size is not "
                "known; name a draft folder as policy.draft.model_name"
                for key in missing
            )
        )
    return {
        **policy,
        **_attention(policy),
        "intermediate_size": _feed_forward(policy),
        "rms_norm_eps": next((policy[key] for key in _EPS if policy.get(key) is not None), 1e-6),
        "rope_theta": rope_theta({**policy, "rope_parameters": _rope(policy)}),
    }


def _attention(policy: Mapping[str, Any]) -> dict[str, int]:
    hidden, heads = policy["hidden_size"], policy.get("num_attention_heads")
    if policy.get("kv_lora_rank") or not heads:
        heads = 1 << max(0, -(-hidden // HEAD_DIM) - 1).bit_length()
        return {"num_attention_heads": heads, "num_key_value_heads": min(KV_HEADS, heads), "head_dim": HEAD_DIM}
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": policy.get("num_key_value_heads") or heads,
        "head_dim": policy.get("head_dim") or policy.get("attention_head_dim") or hidden // heads,
    }


def _feed_forward(policy: Mapping[str, Any]) -> int:
    told = policy.get("intermediate_size")
    experts = any(policy.get(key) for key in _EXPERTS)
    of_an_expert = experts and policy.get("moe_intermediate_size") in (None, told)
    if told and not of_an_expert:
        return told
    return -(-FFN_PER_HIDDEN * policy["hidden_size"] // FFN_MULTIPLE) * FFN_MULTIPLE


def _rope(policy: Mapping[str, Any]) -> dict:
    """The parameters of the policy's layers, of its full-attention ones where they differ by kind."""
    rope = policy.get("rope_parameters") or policy.get("rope_scaling") or {}
    return rope.get("full_attention") or rope
