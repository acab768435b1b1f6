"""The draft's side of a training step, one class for each family: the same calls, whatever the draft needs for them.

A side is made on every rank. Which embedding rows a microbatch needs follows from the microbatch alone, so that the first
pipeline stage can tell; `build` and what needs a draft are for the ranks of the last stage.

Legend: R rows of the whole padded pack, E embedding rows.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from nemo_ext.config import DraftConfig
from nemo_ext.cotrain.block_objective import BlockObjective
from nemo_ext.cotrain.block_plan import BlockPlan, Draw
from nemo_ext.cotrain.eagle3_objective import Eagle3Objective, TargetOutputs
from nemo_ext.cotrain.metrics import draft_metrics
from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_hf import export_block, load_block
from nemo_ext.drafts.dflash import DFlashDraft
from nemo_ext.drafts.dspark import DSparkDraft
from nemo_ext.drafts.eagle3 import Eagle3Draft
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_hf import export_eagle3, load_eagle3
from nemo_ext.drafts.kinds import Shape
from nemo_ext.layout import PackedLayout
from nemo_ext.losses import LossTerms


class Pack(Protocol):
    """A microbatch, as far as a draft reads it."""

    layout: PackedLayout
    tokens_R: torch.Tensor
    label_mask_R: torch.Tensor  # 1 on tokens that are trained on
    sample_ids: Sequence[int]  # one number a sequence


class DraftSide(Protocol):
    """What a training step asks of a draft. `step` is the number of the optimizer step."""

    shape: Shape

    def max_embed_rows(self, rows: int, pack_rows: int, sequences: int) -> int:
        """Bound of the rows that `embed_ids` asks for, of microbatches up to these rows of this rank and of the pack, and
        of so many sequences."""

    def embed_ids(self, pack: Pack, step: int) -> torch.Tensor:
        """Long `[E]`: tokens whose input embeddings the loss reads."""

    def build(self, config, groups, tensors: dict[str, torch.Tensor], device: torch.device | str) -> torch.nn.Module:
        """The draft of this rank, with weights by Hugging Face name."""

    def prepare(self, groups, *, temperature: float, recompute: bool) -> None:
        """Makes the objective of the draft that `build` made. `temperature`: of the rollouts."""

    def count(self, pack: Pack, step: int) -> torch.Tensor:
        """What this rank's rows add to the step's normaliser."""

    def denominator(self, counts: torch.Tensor) -> torch.Tensor:
        """The normaliser, from the global counts."""

    def loss(self, pack: Pack, step: int, target: TargetOutputs, denominator: torch.Tensor):
        """With `.loss`, this microbatch's share of the mean, and `.sums()` for `metrics`."""

    def metrics(self, sums: torch.Tensor) -> dict[str, float | list[float]]:
        """The step's, from the sum of all `.sums()`."""

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by Hugging Face name; collective over the tensor-parallel group."""


class Eagle3Side:
    """EAGLE-3: embeddings of the microbatch's own rows and of the halo after them."""

    def __init__(self, settings: DraftConfig, shape: Eagle3Config):
        self._settings, self.shape = settings, shape
        self._depth = Eagle3Objective.halo_depth(settings.ttt_steps)

    def max_embed_rows(self, rows, pack_rows, sequences):
        # A rank has two chunks of each sequence, and a halo after each.
        return min(pack_rows, rows + 2 * self._depth * sequences)

    def embed_ids(self, pack, step):
        return pack.tokens_R[pack.layout.halo(self._depth).rows]

    def build(self, config, groups, tensors, device):
        self._tp = groups.tp
        self._draft = Eagle3Draft(self.shape, config, groups.tp).to(device)
        load_eagle3(self._draft, tensors, groups.tp)
        return self._draft

    def prepare(self, groups, *, temperature, recompute):
        self._objective = Eagle3Objective(
            self._draft,
            pass_weights=self._settings.pass_weights,
            temperature=temperature,
            mask_out_of_draft_vocab=self._settings.mask_out_of_draft_vocab,
            tp_group=groups.tp,
            cp_group=groups.cp,
            recompute=recompute,
            trunk_budget=self._settings.trunk_budget_bytes,
        )
        self.denominator = self._objective.denominator

    def count(self, pack, step):
        return self._objective.count(pack.layout, pack.label_mask_R)

    def loss(self, pack, step, target, denominator):
        return self._objective.loss(pack.layout, pack.label_mask_R, target, denominator)

    def metrics(self, sums):
        return draft_metrics(sums, self._objective.pass_weights)

    def export(self):
        return export_eagle3(self._draft, self._tp)


class BlockSide:
    """DFlash and DSpark: embeddings of this rank's anchors and of the mask token."""

    def __init__(self, settings: DraftConfig, shape: BlockConfig, seed: int):
        self._settings, self.shape = settings, shape
        self._plan = BlockPlan(shape, settings.anchors_per_seq, seed=seed)

    def max_embed_rows(self, rows, pack_rows, sequences):
        return rows + 1

    def _of(self, pack: Pack, step: int):
        return pack.layout, pack.label_mask_R, pack.tokens_R, Draw(pack.sample_ids, step)

    def embed_ids(self, pack, step):
        return self._plan.embed_ids(*self._of(pack, step))

    def build(self, config, groups, tensors, device):
        self._tp = groups.tp
        draft = DSparkDraft if self.shape.kind == "dspark" else DFlashDraft
        self._draft = draft(self.shape, config, groups.tp).to(device)
        load_block(self._draft, tensors, groups.tp)
        return self._draft

    def prepare(self, groups, *, temperature, recompute):
        settings = self._settings
        if self.shape.kind == "dspark":
            terms = LossTerms(settings.ce_loss_alpha, settings.tv_loss_alpha, hard_labels=True)
            confidence_alpha = settings.confidence_head_alpha
        else:
            terms, confidence_alpha = LossTerms(hard_labels=settings.hard_labels), 0.0
        self._objective = BlockObjective(
            self._draft,
            plan=self._plan,
            terms=terms,
            loss_weighting=settings.loss_weighting,
            confidence_alpha=confidence_alpha,
            temperature=temperature,
            tp_group=groups.tp,
            cp_group=groups.cp,
            recompute=recompute,
        )
        self.denominator, self.metrics = self._objective.denominator, self._objective.metrics

    def count(self, pack, step):
        layout, mask_R, _, draw = self._of(pack, step)
        return self._plan.count(layout, mask_R, draw)

    def loss(self, pack, step, target, denominator):
        return self._objective.loss(*self._of(pack, step), target, denominator)

    def export(self):
        return export_block(self._draft, self._tp)


def draft_side(settings: DraftConfig, shape: Shape, *, seed: int) -> DraftSide:
    """The side of a draft of this shape. `seed`: of the anchors."""
    return Eagle3Side(settings, shape) if isinstance(shape, Eagle3Config) else BlockSide(settings, shape, seed)
