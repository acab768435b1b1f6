"""The draft's side of a training step, one class for each family: the same calls, whatever the draft needs for them.

A side is made on every rank. Which embedding rows a microbatch needs follows from the microbatch alone, so that the first
pipeline stage can tell; everything after `build` is for the ranks of the last stage, which hold the draft.

Legend: E embedding rows, V this rank's shard of the vocabulary.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from nemo_ext.cotrain import BlockObjective, BlockPlan, Draw, Eagle3Objective, TargetOutputs, draft_metrics
from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_hf import export_block, load_block
from nemo_ext.drafts.dflash import DFlashDraft
from nemo_ext.drafts.dspark import DSparkDraft
from nemo_ext.drafts.eagle3 import Eagle3Draft
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_hf import export_eagle3, load_eagle3
from nemo_ext.local.batch import Microbatch
from nemo_ext.local.settings import RunConfig
from nemo_ext.losses import LossTerms


class DraftSide(Protocol):
    """What the worker asks of a draft."""

    shape: Eagle3Config | BlockConfig

    def max_embed_rows(self, rows: int, pack_rows: int, sequences: int) -> int:
        """Bound of the rows that `embed_ids` asks for, of microbatches up to these sizes: rows of this rank and of the
        whole pack, and sequences."""

    def embed_ids(self, batch: Microbatch, step: int) -> torch.Tensor:
        """Long `[E]`: tokens whose input embeddings the loss reads."""

    def build(self, config, groups, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
        """The draft of this rank, with weights by Hugging Face name."""

    def count(self, batch: Microbatch, step: int) -> torch.Tensor:
        """What this rank's rows add to the step's normaliser."""

    def denominator(self, counts: torch.Tensor) -> torch.Tensor:
        """The normaliser, from the global counts."""

    def loss(self, batch: Microbatch, step: int, target: TargetOutputs, denominator: torch.Tensor):
        """With `.loss`, this microbatch's share of the mean, and `.sums()` for `metrics`."""

    def metrics(self, sums: torch.Tensor) -> dict[str, float | list[float]]:
        """The step's, from the sum of all `.sums()`."""

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by Hugging Face name; collective over the tensor-parallel group."""


class Eagle3Side:
    """EAGLE-3: embeddings of the microbatch's own rows and of the halo after them."""

    def __init__(self, config: RunConfig, hf_config: dict):
        self._config = config
        self.shape = Eagle3Config.from_hf(hf_config)
        self._depth = Eagle3Objective.halo_depth(config.policy.draft.ttt_steps)

    def max_embed_rows(self, rows, pack_rows, sequences):
        return min(pack_rows, rows + 2 * self._depth * sequences)  # two chunk ends of every sequence

    def embed_ids(self, batch, step):
        return batch.tokens_R[batch.layout.halo(self._depth).rows]

    def build(self, config, groups, tensors):
        policy, self._tp = self._config.policy, groups.tp
        self._draft = Eagle3Draft(self.shape, config, groups.tp)
        load_eagle3(self._draft, tensors, groups.tp)
        self._objective = Eagle3Objective(
            self._draft,
            pass_weights=policy.draft.pass_weights,
            temperature=policy.generation.temperature,
            mask_out_of_draft_vocab=policy.draft.mask_out_of_draft_vocab,
            tp_group=groups.tp,
            cp_group=groups.cp,
            recompute=policy.megatron_cfg.activation_checkpointing,
            trunk_budget=policy.draft.trunk_budget_bytes,
        )
        self.denominator = self._objective.denominator
        return self._draft

    def count(self, batch, step):
        return self._objective.count(batch.layout, batch.label_mask_R)

    def loss(self, batch, step, target, denominator):
        return self._objective.loss(batch.layout, batch.label_mask_R, target, denominator)

    def metrics(self, sums):
        return draft_metrics(sums, self._objective.pass_weights)

    def export(self):
        return export_eagle3(self._draft, self._tp)


class BlockSide:
    """DFlash and DSpark: embeddings of this rank's anchors and of the mask token."""

    def __init__(self, config: RunConfig, hf_config: dict):
        self._config = config
        self.shape = BlockConfig.from_hf(hf_config)
        self._plan = BlockPlan(self.shape, config.policy.draft.anchors_per_seq, seed=config.grpo.seed)

    def max_embed_rows(self, rows, pack_rows, sequences):
        return min(rows, self._plan.anchors_per_seq * sequences) + 1

    def _of(self, batch: Microbatch, step: int):
        return batch.layout, batch.label_mask_R, batch.tokens_R, Draw(batch.sample_ids, step)

    def embed_ids(self, batch, step):
        return self._plan.embed_ids(*self._of(batch, step))

    def build(self, config, groups, tensors):
        policy, self._tp = self._config.policy, groups.tp
        draft, dspark = policy.draft, self.shape.kind == "dspark"
        self._draft = (DSparkDraft if dspark else DFlashDraft)(self.shape, config, groups.tp)
        load_block(self._draft, tensors, groups.tp)
        if dspark:
            terms = LossTerms(draft.ce_loss_alpha, draft.tv_loss_alpha, hard_labels=True)
        else:
            terms = LossTerms(hard_labels=draft.hard_labels)
        self._objective = BlockObjective(
            self._draft,
            plan=self._plan,
            terms=terms,
            loss_weighting=draft.loss_weighting,
            confidence_alpha=draft.confidence_head_alpha if dspark else 0.0,
            temperature=policy.generation.temperature,
            tp_group=groups.tp,
            cp_group=groups.cp,
            recompute=policy.megatron_cfg.activation_checkpointing,
        )
        self.denominator, self.metrics = self._objective.denominator, self._objective.metrics
        return self._draft

    def count(self, batch, step):
        layout, mask_R, _, draw = self._of(batch, step)
        return self._plan.count(layout, mask_R, draw)

    def loss(self, batch, step, target, denominator):
        return self._objective.loss(*self._of(batch, step), target, denominator)

    def export(self):
        return export_block(self._draft, self._tp)


def side_of(config: RunConfig, hf_config: dict) -> DraftSide:
    """The side of `policy.draft.speculator_type`; `hf_config` is the draft folder's."""
    kinds = {"eagle3": Eagle3Side, "dflash": BlockSide, "dspark": BlockSide}
    return kinds[config.policy.draft.speculator_type](config, hf_config)
