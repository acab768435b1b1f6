"""One decoder layer of a block draft (contract B.1), shaped as Qwen3's; submodules are named as checkpoints name them.

Legend: T trunk rows of this rank, B blocks, W rows of a block, N query heads, M key heads, D head dim, H hidden size.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from nemo_ext.attention import block_attention
from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.layers import HeadNorm, Linear, RMSNorm, Rotary, key_linear


class BlockAttention(nn.Module):
    """Attention of a block's rows over the trunk before their anchor and over their own block."""

    def __init__(self, cfg: BlockConfig, index: int, config, tp_group):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.attend = partial(block_attention, window=cfg.window(index), causal_in_block=cfg.causal_in_block(index))
        heads = cfg.num_heads * cfg.head_dim
        self.q_proj = Linear(cfg.hidden_size, heads, "column", config, tp_group)
        self.k_proj = key_linear(cfg.hidden_size, cfg.num_kv_heads, cfg.head_dim, config, tp_group)
        self.v_proj = key_linear(cfg.hidden_size, cfg.num_kv_heads, cfg.head_dim, config, tp_group)
        self.o_proj = Linear(heads, cfg.hidden_size, "row", config, tp_group)
        self.q_norm = HeadNorm(cfg.head_dim, cfg.rms_norm_eps, tp_group)
        self.k_norm = HeadNorm(cfg.head_dim, cfg.rms_norm_eps, tp_group)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, x_BWH: torch.Tensor, context_TH: torch.Tensor, tables: tuple, where: dict) -> torch.Tensor:
        """`tables`: rotary tables of the block rows and of the trunk rows; `where`: anchors, layout and group."""
        block_table, trunk_table = tables
        rows = x_BWH.shape[:2]
        x_RH = x_BWH.flatten(0, 1)
        q_RND = Rotary.rotate(self.q_norm(self._heads(self.q_proj(x_RH))), block_table)
        k_RMD = Rotary.rotate(self.k_norm(self._heads(self.k_proj(x_RH))), block_table)
        v_RMD = self._heads(self.v_proj(x_RH))
        trunk_k_TMD = Rotary.rotate(self.k_norm(self._heads(self.k_proj(context_TH))), trunk_table)
        trunk_v_TMD = self._heads(self.v_proj(context_TH))
        out_BWND = self.attend(
            q_RND.unflatten(0, rows),
            trunk_k_TMD,
            trunk_v_TMD,
            k_RMD.unflatten(0, rows),
            v_RMD.unflatten(0, rows),
            **where,
        )
        return self.o_proj(out_BWND.flatten(-2))


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, cfg: BlockConfig, config, tp_group):
        super().__init__()
        self.gate_proj = Linear(cfg.hidden_size, cfg.intermediate_size, "column", config, tp_group)
        self.up_proj = Linear(cfg.hidden_size, cfg.intermediate_size, "column", config, tp_group)
        self.down_proj = Linear(cfg.intermediate_size, cfg.hidden_size, "row", config, tp_group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class BlockLayer(nn.Module):
    """Pre-norm attention and MLP, each with its residual. The trunk's features go in as they are, without a norm."""

    def __init__(self, cfg: BlockConfig, index: int, config, tp_group):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = BlockAttention(cfg, index, config, tp_group)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = GatedMLP(cfg, config, tp_group)

    def forward(self, x_BWH: torch.Tensor, context_TH: torch.Tensor, tables: tuple, where: dict) -> torch.Tensor:
        x_BWH = x_BWH + self.self_attn(self.input_layernorm(x_BWH), context_TH, tables, where)
        return x_BWH + self.mlp(self.post_attention_layernorm(x_BWH))
