"""Draft losses: vocab-parallel, chunked over rows, globally normalised."""

from nemo_ext.losses.block_loss import BlockLossRows, LossTerms, Teacher, block_loss
from nemo_ext.losses.logit_transform import UNCHANGED, LogitTransform
from nemo_ext.losses.slot_weights import slot_weights
from nemo_ext.losses.soft_cross_entropy import DraftLossRows, soft_cross_entropy
from nemo_ext.losses.target_head import draft_shard_of_target_head

__all__ = [
    "UNCHANGED",
    "BlockLossRows",
    "DraftLossRows",
    "LogitTransform",
    "LossTerms",
    "Teacher",
    "block_loss",
    "draft_shard_of_target_head",
    "slot_weights",
    "soft_cross_entropy",
]
