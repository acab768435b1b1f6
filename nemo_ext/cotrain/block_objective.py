"""The loss of a block draft on one microbatch, from the policy's own forward (contract B.4 to B.6, C.3).

Legend: T rows of this rank, R rows of the whole padded pack, E rows with halo, B blocks of this rank, S slots,
N = B * S, H hidden size, V target vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F

from nemo_ext.cotrain.block_metrics import BlockSums, block_metrics
from nemo_ext.cotrain.block_plan import BlockPlan, Draw
from nemo_ext.cotrain.eagle3_objective import TargetOutputs
from nemo_ext.drafts.anchors import Blocks
from nemo_ext.drafts.dflash import DFlashDraft
from nemo_ext.layout import PackedLayout
from nemo_ext.losses import (
    UNCHANGED,
    BlockLossRows,
    LogitTransform,
    LossTerms,
    Teacher,
    block_loss,
    draft_shard_of_target_head,
    slot_weights,
)
from nemo_ext.losses.vocab_parallel import vocab_parallel_logsumexp


@dataclass
class BlockLoss:
    """`loss` is this microbatch's share of the global mean."""

    loss: torch.Tensor
    rows: BlockSums

    def sums(self) -> torch.Tensor:
        """`[11, S]`, detached sums over this rank's slots."""
        return self.rows.stacked()


class BlockObjective:
    """Turns a policy forward into the loss of a block draft.

    Args:
        draft: the draft module of this rank, `DFlashDraft` or `DSparkDraft`.
        plan: which blocks it trains on.
        terms: weights of cross-entropy and total variation.
        loss_weighting: `uniform` or `exp` (`losses.slot_weights`).
        confidence_alpha: weight of the confidence head's loss.
        temperature: of the rollouts; teacher and student are both divided by it.
        target_transform: what the policy does to its logits.
        tp_group, cp_group: the policy's groups; None for size 1.
        recompute: keep only each layer's inputs for the backward.
        chunk_rows: rows whose logits exist at once.
    """

    def __init__(
        self,
        draft: DFlashDraft,
        *,
        plan: BlockPlan,
        terms: LossTerms,
        loss_weighting: str = "exp",
        confidence_alpha: float = 0.0,
        temperature: float = 1.0,
        target_transform: LogitTransform = UNCHANGED,
        tp_group: dist.ProcessGroup | None = None,
        cp_group: dist.ProcessGroup | None = None,
        recompute: bool = False,
        chunk_rows: int = 256,
    ):
        self.draft = draft
        self.cfg = draft.cfg
        self.plan = plan
        self.slot_weights = slot_weights(self.cfg.kind, self.cfg.gamma, loss_weighting)
        self.terms = terms
        self.confidence_alpha = confidence_alpha
        self.temperature = temperature
        self.target_transform = target_transform
        self.tp_group = tp_group
        self.cp_group = cp_group
        self.recompute = recompute
        self.chunk_rows = chunk_rows

    def halo(self, layout: PackedLayout):
        """Slot `s` is taught by the row `s` after its anchor; tokens and masks of the pack are known to every rank."""
        return layout.halo(self.cfg.gamma - 1)

    def denominator(self, count_S: torch.Tensor) -> torch.Tensor:
        """`sum_s w_s N_s` from the global counts; 1 when nothing counts, so that the loss is a plain zero."""
        total = torch.dot(count_S, count_S.new_tensor(self.slot_weights))
        return torch.where(total > 0, total, torch.ones_like(total))

    def metrics(self, sums_11S: torch.Tensor) -> dict[str, float | list[float]]:
        """The step's metrics from the sum of `BlockLoss.sums()` over microbatches, DP and CP."""
        return block_metrics(
            sums_11S,
            self.slot_weights,
            dspark=self.cfg.kind == "dspark",
            confidence=self.cfg.confidence_head,
        )

    def loss(
        self,
        layout: PackedLayout,
        label_mask_R: torch.Tensor,
        tokens_R: torch.Tensor,
        draw: Draw,
        target: TargetOutputs,
        denominator: torch.Tensor,
    ) -> BlockLoss:
        """Draft forward and loss of one microbatch.

        The loss is connected to every draft parameter also when this rank has no block, so that no rank skips a
        reduction.

        Args:
            label_mask_R: 1 on tokens of the padded pack that are trained on.
            tokens_R: its token ids.
            target: with `embeds_EH` of the plan's `embed_ids` in that order.
            denominator: of the whole step.
        """
        blocks = self.plan.blocks(layout, label_mask_R, draw)
        hidden_BSH = self.draft(
            target.taps_TK,
            target.embeds_EH[:-1],
            target.embeds_EH[-1],
            layout,
            anchor_sequences=blocks.sequences_B,
            anchor_positions=blocks.positions_B,
            cp_group=self.cp_group,
            recompute=self.recompute,
        )
        acc = torch.promote_types(target.hidden_TH.dtype, torch.float32)
        mask_BS = blocks.mask_BS.to(acc)
        weight_BS = mask_BS * mask_BS.new_tensor(self.slot_weights) / denominator.to(mask_BS)
        teacher, own_head_UH = self._teacher(layout, blocks, tokens_R, target)
        markov_BSR = None
        if self.cfg.markov_rank:
            markov_BSR = self.draft.markov_head.embed(tokens_R[blocks.previous_rows_BS])
        rows = block_loss(
            hidden_BSH.flatten(0, 1),
            own_head_UH,
            teacher,
            weight_BS.flatten(),
            self.terms,
            markov_NR=None if markov_BSR is None else markov_BSR.flatten(0, 1),
            markov_head_UR=None if markov_BSR is None else self.draft.markov_head.markov_w2.weight,
            logit_scale=self.cfg.logit_scale,
            temperature=self.temperature,
            tp_group=self.tp_group,
            chunk_rows=self.chunk_rows,
        )
        confidence_BS = None
        loss = rows.loss
        if self.cfg.confidence_head:
            confidence_BS = self.draft.confidence_head(hidden_BSH, markov_BSR)
            # Binary cross-entropy against the overlap, a soft target.
            bce_BS = F.softplus(confidence_BS) - rows.overlap_N.view_as(confidence_BS) * confidence_BS
            loss = loss + self.confidence_alpha * (weight_BS * bce_BS).sum()
        return BlockLoss(loss, _sums(rows, mask_BS, confidence_BS))

    def _teacher(self, layout: PackedLayout, blocks: Blocks, tokens_R: torch.Tensor, target: TargetOutputs):
        """The policy's side, and this rank's shard of the head that the draft is served with."""
        cfg, halo = self.cfg, self.halo(layout)
        teacher_BS = torch.stack([halo.index(s)[blocks.local_rows_B] for s in range(cfg.gamma)], dim=1).clamp(min=0)
        target_ids_U = self.draft.target_ids_U if cfg.reduced_vocab else None
        logz_E, labels_BS = None, None
        if cfg.reduced_vocab:
            logz_T = vocab_parallel_logsumexp(target.logits_TV, self.tp_group, temperature=self.temperature)
            logz_E = halo.exchange(logz_T, self.cp_group)
        if self.terms.hard_labels:
            labels_BS = tokens_R[blocks.label_rows_BS]
            if cfg.reduced_vocab:
                draft_ids_V = labels_BS.new_full((cfg.vocab_size,), -1)
                draft_ids_V[target_ids_U] = torch.arange(cfg.draft_vocab_size, device=labels_BS.device)
                labels_BS = draft_ids_V[labels_BS]
        head_UH = draft_shard_of_target_head(target.head_VH, target_ids_U, cfg.vocab_size, self.tp_group)
        teacher = Teacher(
            hidden_Eh=halo.exchange(target.hidden_TH, self.cp_group),
            head_Uh=head_UH,
            rows_N=teacher_BS.flatten(),
            labels_N=None if labels_BS is None else labels_BS.flatten(),
            transform=self.target_transform,
            logz_E=logz_E,
        )
        return teacher, self.draft.lm_head.weight if cfg.reduced_vocab else head_UH


@torch.no_grad()
def _sums(rows: BlockLossRows, mask_BS: torch.Tensor, confidence_BS: torch.Tensor | None) -> BlockSums:
    """Per slot, over this rank's counted slots."""
    ce_BS, tv_BS, overlap_BS, accept_BS, greedy_BS = (x.view_as(mask_BS) for x in rows[1:])
    none_BS = torch.zeros_like(mask_BS)
    bce_BS, error_BS, chain_error_BS = none_BS, none_BS, none_BS
    if confidence_BS is not None:
        confidence_BS = confidence_BS.detach().to(mask_BS)
        predicted_BS = torch.sigmoid(confidence_BS)
        bce_BS = (F.softplus(confidence_BS) - overlap_BS * confidence_BS) * mask_BS
        error_BS = (predicted_BS - overlap_BS) * mask_BS
        chain_error_BS = (predicted_BS * mask_BS).cumprod(1) - overlap_BS.cumprod(1)
    return BlockSums(
        cross_entropy_S=ce_BS.sum(0),
        total_variation_S=tv_BS.sum(0),
        acceptance_S=accept_BS.sum(0),
        greedy_acceptance_S=greedy_BS.sum(0),
        chain_S=accept_BS.cumprod(1).sum(0),
        greedy_chain_S=greedy_BS.cumprod(1).sum(0),
        confidence_loss_S=bce_BS.sum(0),
        confidence_error_S=error_BS.abs().sum(0),
        confidence_bias_S=error_BS.sum(0),
        confidence_chain_bias_S=chain_error_BS.sum(0),
        slots_S=mask_BS.sum(0),
    )
