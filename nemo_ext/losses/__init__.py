"""Draft losses: vocab-parallel, chunked over rows, globally normalised."""

from nemo_ext.losses.soft_cross_entropy import DraftLossRows, soft_cross_entropy
from nemo_ext.losses.target_head import draft_shard_of_target_head

__all__ = ["DraftLossRows", "draft_shard_of_target_head", "soft_cross_entropy"]
