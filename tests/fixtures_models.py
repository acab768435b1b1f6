"""Tiny Hugging Face folders for tests: a Qwen3 policy and an EAGLE-3 draft that fits it.

Two kinds of draft: `random_draft`, and `bigram_draft`, built by hand so that it almost equals a policy whose layers
contribute little (`mixing` near 0): such a policy's next token depends on the last token only, and the draft's
attention, made to look at its own row, carries exactly that token's embedding to the head.

Shapes: H hidden, V vocabulary, D head dim.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def policy_config(
    *,
    vocab_size: int = 64,
    hidden_size: int = 64,
    num_hidden_layers: int = 4,
    num_attention_heads: int = 2,
    num_key_value_heads: int = 1,
    tie_word_embeddings: bool = False,
) -> dict:
    """config.json of a Qwen3ForCausalLM with head_dim 32 (the smallest that vLLM's CPU attention takes)."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def policy_tensors(config: dict, seed: int = 0, *, mixing: float = 1.0, sharpness: float = 2.0) -> dict:
    """Random weights by Hugging Face name, fp32.

    mixing scales what attention and MLP add to the residual stream; sharpness is about the standard deviation of
    the logits.
    """
    gen = torch.Generator().manual_seed(seed)
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_out, kv_out = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=gen) * std

    tensors = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, std=1.0)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        tensors |= {
            at + "input_layernorm.weight": 1 + normal(hidden, std=0.1),
            at + "self_attn.q_proj.weight": normal(q_out, hidden, std=hidden**-0.5),
            at + "self_attn.k_proj.weight": normal(kv_out, hidden, std=hidden**-0.5),
            at + "self_attn.v_proj.weight": normal(kv_out, hidden, std=hidden**-0.5),
            at + "self_attn.o_proj.weight": normal(hidden, q_out, std=mixing * q_out**-0.5),
            at + "self_attn.q_norm.weight": 1 + normal(dim, std=0.1),
            at + "self_attn.k_norm.weight": 1 + normal(dim, std=0.1),
            at + "post_attention_layernorm.weight": 1 + normal(hidden, std=0.1),
            at + "mlp.gate_proj.weight": normal(inter, hidden, std=hidden**-0.5),
            at + "mlp.up_proj.weight": normal(inter, hidden, std=hidden**-0.5),
            at + "mlp.down_proj.weight": normal(hidden, inter, std=mixing * inter**-0.5),
        }
    tensors["model.norm.weight"] = 1 + normal(hidden, std=0.1)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden, std=sharpness * hidden**-0.5)
    return tensors


def draft_config(
    policy: dict,
    *,
    draft_vocab_size: int | None = None,
    taps: tuple[int, ...] = (1, 2, 3),
    num_hidden_layers: int = 1,
    norm_output: bool = False,
    norm_before_residual: bool = False,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
) -> dict:
    """config.json of a LlamaForCausalLMEagle3 draft. taps are vLLM's ids: id n is the output after n layers."""
    hidden = policy["hidden_size"]
    ids = list(taps)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": policy["vocab_size"],
        "draft_vocab_size": draft_vocab_size or policy["vocab_size"],
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "head_dim": 32,
        "max_position_embeddings": policy["max_position_embeddings"],
        "rms_norm_eps": policy["rms_norm_eps"],
        "rope_parameters": policy["rope_parameters"],
        "rope_theta": policy["rope_theta"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": ids,
            "use_aux_hidden_state": True,
            "norm_before_fc": norm_before_fc,
        },
        "norm_before_fc": norm_before_fc,
        "norm_output": norm_output,
        "norm_before_residual": norm_before_residual,
        "fc_norm": fc_norm,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def random_draft(config: dict, seed: int = 100, *, sharpness: float = 2.0) -> dict:
    """Random weights of an EAGLE-3 draft by the names of contract D.1, fp32 (d2t int64, t2d bool)."""
    gen = torch.Generator().manual_seed(seed)
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_out, kv_out = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    taps = len(config["eagle_aux_hidden_state_layer_ids"])
    target_hidden = config["target_hidden_size"]

    def linear(out: int, inp: int) -> torch.Tensor:
        return torch.randn(out, inp, generator=gen) * inp**-0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=gen)

    tensors = {"fc.weight": linear(hidden, taps * target_hidden)}
    if config["fc_norm"]:
        tensors |= {f"fc_norm.{i}.weight": norm(target_hidden) for i in range(taps)}
    if config["norm_before_fc"]:
        tensors["input_norm.weight"] = norm(taps * target_hidden)
    for i in range(config["num_hidden_layers"]):
        at = "midlayer." if i == 0 else f"layers.{i}."
        qkv_in = 2 * hidden if i == 0 else hidden
        tensors |= {
            at + "self_attn.q_proj.weight": linear(q_out, qkv_in),
            at + "self_attn.k_proj.weight": linear(kv_out, qkv_in),
            at + "self_attn.v_proj.weight": linear(kv_out, qkv_in),
            at + "self_attn.o_proj.weight": linear(hidden, q_out),
            at + "mlp.gate_proj.weight": linear(inter, hidden),
            at + "mlp.up_proj.weight": linear(inter, hidden),
            at + "mlp.down_proj.weight": linear(hidden, inter),
            at + "input_layernorm.weight": norm(hidden),
            at + "post_attention_layernorm.weight": norm(hidden),
        }
        if i == 0:
            tensors[at + "hidden_norm.weight"] = norm(hidden)
    tensors["norm.weight"] = norm(hidden)
    tensors["lm_head.weight"] = linear(config["draft_vocab_size"], hidden) * sharpness
    if config["draft_vocab_size"] != config["vocab_size"]:
        tensors |= vocabulary_maps(config, torch.arange(config["draft_vocab_size"]) * 2 % config["vocab_size"])
    return tensors


def vocabulary_maps(config: dict, kept: torch.Tensor) -> dict:
    """d2t (offsets) and t2d of a reduced vocabulary that keeps the target ids `kept`."""
    kept = kept.sort().values
    t2d = torch.zeros(config["vocab_size"], dtype=torch.bool)
    t2d[kept] = True
    return {"d2t": kept - torch.arange(len(kept)), "t2d": t2d}


def bigram_draft(config: dict, policy: dict) -> dict:
    """Weights of a one-layer draft that predicts what a policy with `mixing` near 0 does.

    Queries and keys are the same strong projection of the row's own token embedding, so a row attends to itself.
    fc and the MLP add nothing. The value is the normed embedding minus the normed feature, which replaces the feature
    that the residual carries from the depth before (0 at the first) by the embedding of the newest token. norm and
    lm_head are the policy's (the kept rows of a reduced vocabulary).
    """
    hidden = config["hidden_size"]
    tensors = {name: torch.zeros_like(x) for name, x in random_draft(config).items()}
    embedding_side = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    replace_feature = torch.cat([torch.eye(hidden), -torch.eye(hidden)], dim=1)
    tensors |= {
        "midlayer.self_attn.q_proj.weight": 3.0 * embedding_side,
        "midlayer.self_attn.k_proj.weight": 3.0 * embedding_side,
        "midlayer.self_attn.v_proj.weight": replace_feature,
        "midlayer.self_attn.o_proj.weight": torch.eye(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "norm.weight": policy["model.norm.weight"].clone(),
    }
    head = policy.get("lm_head.weight", policy["model.embed_tokens.weight"])
    if config["draft_vocab_size"] != config["vocab_size"]:
        maps = random_draft(config)
        tensors |= {"d2t": maps["d2t"], "t2d": maps["t2d"]}
        head = head[maps["t2d"]]
    tensors["lm_head.weight"] = head.clone()
    return tensors


def write_model(folder: Path, config: dict, tensors: dict) -> Path:
    """Writes config.json and model.safetensors; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file({name: x.contiguous() for name, x in tensors.items()}, str(folder / "model.safetensors"))
    return folder
