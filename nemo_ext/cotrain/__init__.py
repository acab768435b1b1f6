"""The joint step: taps in, draft forward, draft loss beside the policy's, metrics."""

from nemo_ext.cotrain.eagle3_objective import DraftLoss, Eagle3Objective, TargetOutputs

__all__ = ["DraftLoss", "Eagle3Objective", "TargetOutputs"]
