"""DFlash: a block of tokens in one pass, over trunk keys made from the policy's taps (contract B.1 to B.3).

Legend: T trunk rows of this rank, K taps, B blocks, W rows of a block, S slots that predict (gamma), H hidden size,
U this rank's shard of a reduced draft vocabulary.
"""

import dataclasses

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_layer import BlockLayer
from nemo_ext.drafts.layers import Linear, RMSNorm, Rotary
from nemo_ext.layout import PackedLayout


class DFlashDraft(nn.Module):
    """The draft. Its input is the policy's, detached. Embedding and LM head are the policy's live ones, except that a draft
    of a reduced vocabulary has an LM head of its own.

    Args:
        cfg: shape and flags.
        config: the policy's Megatron `TransformerConfig` (dtype, parallel sizes).
        tp_group: tensor-parallel group.
    """

    def __init__(self, cfg: BlockConfig, config, tp_group):
        super().__init__()
        # Taps and block rows are whole on every rank, so the draft itself is not sequence parallel.
        config = dataclasses.replace(config, sequence_parallel=False, perform_initialization=False)
        self.cfg = cfg
        self.fc = nn.Linear(len(cfg.tap_layers) * cfg.hidden_size, cfg.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(cfg, i, config, tp_group) for i in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if cfg.reduced_vocab:
            self.lm_head = Linear(cfg.hidden_size, cfg.draft_vocab_size, "column", config, tp_group)
        self.rotary = Rotary(cfg.head_dim, cfg.rope_theta)
        self.to(config.params_dtype)
        # Which target ids the draft's vocabulary stands for; a constant, so not a parameter.
        self.register_buffer("target_ids_U", torch.arange(cfg.draft_vocab_size), persistent=False)

    def forward(
        self,
        taps_TK: torch.Tensor,
        anchors_BH: torch.Tensor,
        mask_H: torch.Tensor,
        layout: PackedLayout,
        *,
        anchor_sequences: torch.Tensor,
        anchor_positions: torch.Tensor,
        cp_group=None,
        recompute: bool = False,
    ) -> torch.Tensor:
        """Row 0 of a block at position `p` is the anchor token's embedding, the others are the mask token's; row `j` stands
        at `p + j`.

        Args:
            taps_TK: `[T, K * H]`, taps in ascending layer order.
            anchors_BH: embedding of the token at each anchor.
            mask_H: embedding of the mask token.
            layout: rows of this rank.
            anchor_sequences, anchor_positions: long `[B]`, by (sequence, position); rows that this rank holds.
            recompute: keep only each layer's input and run it again in the backward.

        Returns:
            `[B, S, H]`, after the final norm: slot `s` predicts the token at `p + 1 + s`.
        """
        cfg = self.cfg
        width, device = cfg.block_size, taps_TK.device
        context_TH = self.hidden_norm(self.fc(taps_TK))
        positions_BW = anchor_positions[:, None] + torch.arange(width, device=device)
        tables = (
            self.rotary.table(positions_BW.flatten(), taps_TK.dtype),
            self.rotary.table(layout.local_positions, taps_TK.dtype),
        )
        where = {
            "anchor_sequences": anchor_sequences,
            "anchor_positions": anchor_positions,
            "layout": layout,
            "group": cp_group,
        }
        x_BWH = torch.cat([anchors_BH[:, None], mask_H.expand(len(anchors_BH), width - 1, -1)], dim=1)
        for layer in self.layers:
            if recompute and torch.is_grad_enabled():
                x_BWH = checkpoint(layer, x_BWH, context_TH, tables, where, use_reentrant=False)
            else:
                x_BWH = layer(x_BWH, context_TH, tables, where)
        return self.norm(x_BWH[:, width - cfg.gamma :])
