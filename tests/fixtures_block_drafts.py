"""Tiny DFlash and DSpark folders for tests, in the formats that vLLM serves (contract D.1).

`random_block_draft`, and two built by hand for a policy whose layers contribute little, so that its next token depends
on the last one only: `copying_dflash`, whose slots all predict the token after the anchor's, and `bigram_dspark`,
whose Markov head is that policy.

Shapes: H hidden, V vocabulary, D head dim, R Markov rank.
"""

import torch

from tests.fixtures_models import vocabulary_maps

MASK_TOKEN = 0


def block_draft_config(
    policy: dict,
    *,
    method: str = "dflash",
    gamma: int = 4,
    taps: tuple[int, ...] = (0, 1, 2),
    num_hidden_layers: int = 2,
    num_attention_heads: int = 2,
    num_key_value_heads: int = 2,
    draft_vocab_size: int | None = None,
    window: int | None = None,
    causal: bool | None = None,
    markov_rank: int = 16,
    confidence_head: bool = True,
    confidence_with_markov: bool = True,
    sample_from_anchor: bool = True,
    draft_topk: int | None = None,
) -> dict:
    """config.json of a DFlashDraftModel (method dflash) or a Qwen3DSparkModel (dspark).

    Args:
        gamma: drafted tokens. block_size is gamma + 1, gamma for a DSpark that samples from the anchor.
        taps: target layers whose *outputs* fc reads, from 0.
        window: of all layers; vLLM's V1 runner serves no draft that mixes windows and full attention.
        causal: inside the block; None as vLLM derives it, True with a window and False without.
        markov_rank, confidence_head, confidence_with_markov, sample_from_anchor: of DSpark.
        draft_topk: of DSpark: tokens that stay in the running after the backbone.
    """
    hidden = policy["hidden_size"]
    dspark = method == "dspark"
    block = {"mask_token_id": MASK_TOKEN, "target_layer_ids": list(taps)}
    config = {
        "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": policy["vocab_size"],
        "draft_vocab_size": draft_vocab_size or policy["vocab_size"],
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": 32,
        "max_position_embeddings": policy["max_position_embeddings"],
        "rms_norm_eps": policy["rms_norm_eps"],
        "rope_parameters": policy["rope_parameters"],
        "rope_theta": policy["rope_theta"],
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention" if window is None else "sliding_attention"] * num_hidden_layers,
        "block_size": gamma if dspark and sample_from_anchor else gamma + 1,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    if window is not None:
        # Without use_sliding_window, transformers' Qwen3Config drops the size.
        config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    if dspark:
        config |= block | {
            "markov_rank": markov_rank,
            "enable_confidence_head": confidence_head,
            "confidence_head_with_markov": confidence_with_markov,
            "sample_from_anchor": sample_from_anchor,
        }
    else:
        config["dflash_config"] = block
    if draft_topk is not None:
        config["dspark_draft_topk"] = draft_topk
    if causal is not None:
        config["dflash_config"] = {**config.get("dflash_config", {}), "causal": causal}
    return config


def random_block_draft(config: dict, seed: int = 200, *, sharpness: float = 2.0) -> dict:
    """Random weights by the names of contract D.1, fp32 (d2t int64, t2d bool).

    A head of its own is there only with a reduced vocabulary; sharpness is that head's.
    """
    gen = torch.Generator().manual_seed(seed)
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_out, kv_out = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    block = {**config, **config.get("dflash_config", {})}

    def linear(out: int, inp: int) -> torch.Tensor:
        return torch.randn(out, inp, generator=gen) * inp**-0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=gen)

    tensors = {
        "fc.weight": linear(hidden, len(block["target_layer_ids"]) * config["target_hidden_size"]),
        "hidden_norm.weight": norm(hidden),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        tensors |= {
            at + "self_attn.q_proj.weight": linear(q_out, hidden),
            at + "self_attn.k_proj.weight": linear(kv_out, hidden),
            at + "self_attn.v_proj.weight": linear(kv_out, hidden),
            at + "self_attn.o_proj.weight": linear(hidden, q_out),
            at + "self_attn.q_norm.weight": norm(dim),
            at + "self_attn.k_norm.weight": norm(dim),
            at + "mlp.gate_proj.weight": linear(inter, hidden),
            at + "mlp.up_proj.weight": linear(inter, hidden),
            at + "mlp.down_proj.weight": linear(hidden, inter),
            at + "input_layernorm.weight": norm(hidden),
            at + "post_attention_layernorm.weight": norm(hidden),
        }
    tensors["norm.weight"] = norm(hidden)
    if config["draft_vocab_size"] != config["vocab_size"]:
        kept = torch.arange(config["draft_vocab_size"]) * 2 % config["vocab_size"]
        tensors["lm_head.weight"] = linear(config["draft_vocab_size"], hidden) * sharpness
        tensors |= vocabulary_maps(config, kept)
    if "markov_rank" in config:
        rank = config["markov_rank"]
        tensors["markov_head.markov_w1.weight"] = torch.randn(config["vocab_size"], rank, generator=gen)
        tensors["markov_head.markov_w2.weight"] = linear(config["draft_vocab_size"], rank)
        if config["enable_confidence_head"]:
            width = hidden + rank * config["confidence_head_with_markov"]
            tensors["confidence_head.proj.weight"] = linear(1, width)
            tensors["confidence_head.proj.bias"] = torch.randn(1, generator=gen)
    return tensors


def with_silent_mask(policy: dict) -> dict:
    """The policy's tensors with a mask token that is embedded as zero, as `copying_dflash` needs it."""
    embedding = policy["model.embed_tokens.weight"].clone()
    embedding[MASK_TOKEN] = 0
    return {**policy, "model.embed_tokens.weight": embedding}


def copying_dflash(config: dict, policy: dict) -> dict:
    """A DFlash draft, all of whose slots predict what `policy` (of `with_silent_mask`) says after the anchor's token.

    Queries are zero, so a slot attends to all rows alike; trunk and mask rows have zero values, so what it finds is
    the anchor's embedding, scaled by a factor that the final norm takes out again. Nothing else adds to it.
    """
    hidden = config["hidden_size"]
    tensors = {name: torch.zeros_like(x) for name, x in random_block_draft(config).items()}
    for i in range(config["num_hidden_layers"]):
        tensors[f"layers.{i}.input_layernorm.weight"] = torch.ones(hidden)
    tensors["layers.0.self_attn.v_proj.weight"] = torch.eye(hidden)
    tensors["layers.0.self_attn.o_proj.weight"] = torch.eye(hidden)
    tensors["norm.weight"] = policy["model.norm.weight"].clone()
    return tensors


def bigram_dspark(config: dict, policy: dict) -> dict:
    """A DSpark draft (markov_rank = hidden size) that predicts what `policy` does: its Markov head is that policy's
    final norm and head, over hidden states that its own final norm makes zero. A reduced vocabulary is supported.
    """
    tensors = random_block_draft(config)
    embedding_VH = policy["model.embed_tokens.weight"]
    scale_V1 = (embedding_VH.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt()
    head = policy.get("lm_head.weight", embedding_VH)
    tensors["norm.weight"] = torch.zeros_like(tensors["norm.weight"])
    tensors["markov_head.markov_w1.weight"] = embedding_VH * scale_V1 * policy["model.norm.weight"]
    tensors["markov_head.markov_w2.weight"] = (head[tensors["t2d"]] if "t2d" in tensors else head).clone()
    return tensors
