"""The EAGLE-3 draft loss of one microbatch, from the policy's own forward (contract A.5 to A.8).

Legend: T rows of this rank, R rows of the whole padded pack, E rows with halo, K taps, P passes, H hidden size,
V this rank's shard of the policy's vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nemo_ext.drafts.eagle3 import Eagle3Draft
from nemo_ext.layout import PackedLayout
from nemo_ext.losses import draft_shard_of_target_head, soft_cross_entropy
from nemo_ext.losses.vocab_parallel import vocab_parallel_argmax, vocab_parallel_logsumexp


@dataclass
class TargetOutputs:
    """What the draft reads of the policy's forward over one microbatch. Everything is detached here, once.

    Attributes:
        taps_TK: outputs of the tapped layers side by side, ascending, `[T, K * H]`.
        embeds_EH: input embeddings of the rows of `layout.halo(P + 1).rows`.
        hidden_TH: final hidden rows, after the final norm: what the policy's head reads.
        logits_TV: the policy's logits before any division by the temperature; read only for a reduced vocabulary.
        head_VH: this rank's shard of the policy's head.
    """

    taps_TK: torch.Tensor
    embeds_EH: torch.Tensor
    hidden_TH: torch.Tensor
    logits_TV: torch.Tensor
    head_VH: torch.Tensor

    def __post_init__(self):
        for name, value in vars(self).items():
            setattr(self, name, value.detach())


@dataclass
class DraftLoss:
    """`loss` is this microbatch's share of the global mean; the rest are detached sums over this rank's rows, `[P]`."""

    loss: torch.Tensor
    cross_entropy_P: torch.Tensor
    acceptance_P: torch.Tensor  # of drafts sampled from the draft's distribution
    greedy_acceptance_P: torch.Tensor  # of likeliest-token drafts
    chain_P: torch.Tensor  # chance that slots 1..d are all accepted
    rows_P: torch.Tensor

    def sums(self) -> torch.Tensor:
        """`[5, P]`, so that one reduction carries all of them."""
        return torch.stack(
            [self.cross_entropy_P, self.acceptance_P, self.greedy_acceptance_P, self.chain_P, self.rows_P]
        )


class Eagle3Objective:
    """Turns a policy forward into a draft loss.

    Args:
        draft: the draft module of this rank.
        pass_weights: weight of each pass; their number is the number of passes.
        temperature: of the rollouts; teacher and student are both divided by it.
        mask_out_of_draft_vocab: leave out rows whose likeliest target token is outside a reduced draft vocabulary. They
            still count in the denominator, which is fixed before the step.
        tp_group, cp_group: the policy's groups; None for size 1.
        recompute: keep only each pass's inputs for the backward.
        trunk_budget: bytes per rank that a resident trunk may take under context parallelism; 0 always uses the ring.
        chunk_rows: rows whose logits exist at once.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
        *,
        pass_weights: list[float],
        temperature: float = 1.0,
        mask_out_of_draft_vocab: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        cp_group: dist.ProcessGroup | None = None,
        recompute: bool = False,
        trunk_budget: float = 0.0,
        chunk_rows: int = 1024,
    ):
        self.draft = draft
        self.pass_weights = pass_weights
        self.passes = len(pass_weights)
        self.temperature = temperature
        self.mask_out_of_draft_vocab = mask_out_of_draft_vocab
        self.tp_group = tp_group
        self.cp_group = cp_group
        self.recompute = recompute
        self.trunk_budget = trunk_budget
        self.chunk_rows = chunk_rows

    @staticmethod
    def halo_depth(passes: int) -> int:
        """Row `i` of pass `d` looks at token, mask and teacher up to row `i + d + 1`."""
        return passes + 1

    def halo(self, layout: PackedLayout):
        """The rows that this rank's own look at."""
        return layout.halo(self.halo_depth(self.passes))

    def supervised_rows(self, layout: PackedLayout, label_mask_R: torch.Tensor) -> torch.Tensor:
        """`[T, P]`, true where row `i` of pass `d` predicts a token that is trained on, `x_{i+d+1}`."""
        halo = self.halo(layout)
        mask_E = label_mask_R[halo.rows].bool()
        columns = []
        for d in range(1, self.passes + 1):
            index_T = halo.index(d + 1)
            columns.append((index_T >= 0) & mask_E[index_T.clamp(min=0)])
        return torch.stack(columns, dim=1)

    def count(self, layout: PackedLayout, label_mask_R: torch.Tensor) -> torch.Tensor:
        """`[P]` supervised rows of this rank. Their sum over microbatches, DP and CP is `N_d` of contract A.6."""
        return self.supervised_rows(layout, label_mask_R).sum(0, dtype=torch.float64)

    def denominator(self, count_P: torch.Tensor) -> torch.Tensor:
        """`sum_d alpha_d N_d` from the global counts; 1 when nothing is supervised, so that the loss is a plain zero."""
        total = torch.dot(count_P, count_P.new_tensor(self.pass_weights))
        return torch.where(total > 0, total, torch.ones_like(total))

    def loss(
        self, layout: PackedLayout, label_mask_R: torch.Tensor, target: TargetOutputs, denominator: torch.Tensor
    ) -> DraftLoss:
        """Draft forward and loss of one microbatch.

        `label_mask_R` is 1 on tokens of the padded pack that are trained on. The returned loss is connected to every
        draft parameter also when no row is supervised, so that no rank skips a reduction.
        """
        halo = self.halo(layout)
        ahead = [halo.index(d).clamp(min=0) for d in range(1, self.passes + 1)]
        hidden_TPH = self.draft(
            target.taps_TK,
            torch.stack([target.embeds_EH[index_T] for index_T in ahead]),
            layout,
            cp_group=self.cp_group,
            recompute=self.recompute,
            trunk_budget=self.trunk_budget,
        )
        acc = torch.promote_types(target.hidden_TH.dtype, torch.float32)
        supervised_TP = self.supervised_rows(layout, label_mask_R).to(acc)
        teacher_EH = halo.exchange(target.hidden_TH, self.cp_group)
        counted_TP, logz_E = supervised_TP, None
        reduced = self.draft.cfg.reduced_vocab
        if reduced:
            logz_E = halo.exchange(
                vocab_parallel_logsumexp(target.logits_TV, self.tp_group, temperature=self.temperature), self.cp_group
            )
        if reduced and self.mask_out_of_draft_vocab:
            top_T = vocab_parallel_argmax(target.logits_TV, self.tp_group)
            inside_E = halo.exchange(torch.isin(top_T, self.draft.target_ids_U).to(acc), self.cp_group)
            counted_TP = supervised_TP * torch.stack([inside_E[index_T] for index_T in ahead], dim=1)

        alpha_P = supervised_TP.new_tensor(self.pass_weights)
        rows = soft_cross_entropy(
            hidden_TPH.flatten(0, 1),
            self.draft.lm_head.weight,
            teacher_EH,
            draft_shard_of_target_head(
                target.head_VH,
                self.draft.target_ids_U if reduced else None,
                self.draft.cfg.vocab_size,
                self.tp_group,
            ),
            torch.stack(ahead, dim=1).flatten(),
            (counted_TP * alpha_P / denominator.to(alpha_P)).flatten(),
            temperature=self.temperature,
            teacher_logz_E=logz_E,
            tp_group=self.tp_group,
            chunk_rows=self.chunk_rows,
        )
        acceptance_TP = rows.acceptance_N.view_as(supervised_TP)
        return DraftLoss(
            loss=rows.loss,
            cross_entropy_P=rows.cross_entropy_N.view_as(supervised_TP).sum(0),
            acceptance_P=acceptance_TP.sum(0),
            greedy_acceptance_P=rows.greedy_acceptance_N.view_as(supervised_TP).sum(0),
            chain_P=acceptance_TP.cumprod(1).sum(0),
            rows_P=supervised_TP.sum(0),
        )
