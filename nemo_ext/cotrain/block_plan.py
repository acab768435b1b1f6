"""Which blocks a block draft trains on in one microbatch. Follows from tokens and masks alone, so every rank can tell.

Legend: R rows of the whole padded pack, B blocks of this rank, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_ext.drafts.anchors import Blocks, blocks_of, draw_anchors
from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.layout import PackedLayout


@dataclass(frozen=True)
class Draw:
    """What the anchors of one microbatch hang on: a number per sequence, and the number of the optimizer step."""

    sample_ids: Sequence[int]
    step: int


@dataclass(frozen=True)
class BlockPlan:
    """How blocks are drawn in a run.

    Attributes:
        cfg: of the draft.
        anchors_per_seq: blocks per sequence, where it has as many rows to start from.
        seed: of the anchors.
    """

    cfg: BlockConfig
    anchors_per_seq: int
    seed: int

    def blocks(self, layout: PackedLayout, label_mask_R: torch.Tensor, draw: Draw) -> Blocks:
        """This rank's blocks. `label_mask_R` is 1 on tokens of the padded pack that are trained on."""
        anchors_A = draw_anchors(
            layout,
            label_mask_R,
            draw.sample_ids,
            anchors_per_seq=self.anchors_per_seq,
            seed=self.seed,
            step=draw.step,
        )
        return blocks_of(layout, label_mask_R, anchors_A, self.cfg.gamma)

    def embed_ids(
        self, layout: PackedLayout, label_mask_R: torch.Tensor, tokens_R: torch.Tensor, draw: Draw
    ) -> torch.Tensor:
        """Long `[B + 1]`: ids whose input embeddings `TargetOutputs.embeds_EH` must hold, the anchors' and the mask's."""
        blocks = self.blocks(layout, label_mask_R, draw)
        ids_B = tokens_R[layout.local_rows[blocks.local_rows_B]]
        return torch.cat([ids_B, ids_B.new_tensor([self.cfg.mask_token_id])])

    def count(self, layout: PackedLayout, label_mask_R: torch.Tensor, draw: Draw) -> torch.Tensor:
        """`[S]` counted slots of this rank. Their sum over microbatches, DP and CP is `N_j` of contract B.6."""
        return self.blocks(layout, label_mask_R, draw).mask_BS.sum(0, dtype=torch.float64)
