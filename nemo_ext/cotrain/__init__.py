"""The joint step: taps in, draft forward, draft loss beside the policy's, metrics."""

from nemo_ext.cotrain.block_objective import BlockLoss, BlockObjective
from nemo_ext.cotrain.block_plan import BlockPlan, Draw
from nemo_ext.cotrain.eagle3_objective import DraftLoss, Eagle3Objective, TargetOutputs
from nemo_ext.cotrain.metrics import draft_metrics
from nemo_ext.cotrain.target import embed_rows, read_target

__all__ = [
    "BlockLoss",
    "BlockObjective",
    "BlockPlan",
    "DraftLoss",
    "Draw",
    "Eagle3Objective",
    "TargetOutputs",
    "draft_metrics",
    "embed_rows",
    "read_target",
]
