"""Fresh EAGLE-3 weights. Needs no Megatron, so that the process that only makes folders does not load it."""

import math

import torch

from nemo_ext.drafts.eagle3_config import Eagle3Config


def init_eagle3(cfg: Eagle3Config, seed: int, target_ids: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Fresh weights under their Hugging Face names, full size, so that they are the same for every parallel layout.

    Linear weights are normal with variance 1 / fan-in, norms are ones. `target_ids` lists the target ids of a reduced
    vocabulary, ascending.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(rows, columns):
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    size = cfg.hidden_size
    tensors = {"fc.weight": normal(size, len(cfg.tap_layers) * size)}
    if cfg.norm_before_fc:
        tensors["input_norm.weight"] = torch.ones(len(cfg.tap_layers) * size)
    if cfg.fc_norm:
        tensors |= {f"fc_norm.{i}.weight": torch.ones(size) for i in range(len(cfg.tap_layers))}
    for i in range(cfg.num_layers):
        in_size = 2 * size if i == 0 else size
        heads, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        at = f"layers.{i}."
        tensors |= {
            f"{at}self_attn.q_proj.weight": normal(heads, in_size),
            f"{at}self_attn.k_proj.weight": normal(kv, in_size),
            f"{at}self_attn.v_proj.weight": normal(kv, in_size),
            f"{at}self_attn.o_proj.weight": normal(size, heads),
            f"{at}mlp.gate_proj.weight": normal(cfg.intermediate_size, size),
            f"{at}mlp.up_proj.weight": normal(cfg.intermediate_size, size),
            f"{at}mlp.down_proj.weight": normal(size, cfg.intermediate_size),
            f"{at}input_layernorm.weight": torch.ones(size),
            f"{at}post_attention_layernorm.weight": torch.ones(size),
        }
        if i == 0:
            tensors[f"{at}hidden_norm.weight"] = torch.ones(size)
    tensors["norm.weight"] = torch.ones(size)
    tensors["lm_head.weight"] = normal(cfg.draft_vocab_size, size)
    if cfg.reduced_vocab:
        tensors["d2t"] = target_ids.long() - torch.arange(cfg.draft_vocab_size)
        tensors["t2d"] = torch.zeros(cfg.vocab_size, dtype=torch.bool).index_fill_(0, target_ids.long(), True)
    return tensors
