"""Metrics of a block draft over one step (contract C.4), from sums that were reduced over DP and CP ranks. S slots."""

from dataclasses import dataclass, fields

import torch


@dataclass
class BlockSums:
    """Detached sums over this rank's counted slots, each `[S]`."""

    cross_entropy_S: torch.Tensor
    total_variation_S: torch.Tensor
    acceptance_S: torch.Tensor  # of drafts sampled from the draft's distribution
    greedy_acceptance_S: torch.Tensor  # of likeliest-token drafts
    chain_S: torch.Tensor  # chance that slots 0..s are all accepted, sampled drafts
    greedy_chain_S: torch.Tensor
    confidence_loss_S: torch.Tensor
    confidence_error_S: torch.Tensor  # |predicted - actual acceptance|
    confidence_bias_S: torch.Tensor  # predicted - actual acceptance
    confidence_chain_bias_S: torch.Tensor  # the same of the chance that slots 0..s are all accepted
    slots_S: torch.Tensor

    def stacked(self) -> torch.Tensor:
        """`[11, S]`, so that one reduction carries all of them."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])


def block_metrics(
    sums_11S: torch.Tensor, slot_weights: list[float], *, confidence: bool, dspark: bool
) -> dict[str, float | list[float]]:
    """`draft_loss` (weighted mean of the cross-entropy), the same per slot, the chance per slot that verification accepts a
    sampled or a greedy draft token, and the accepted lengths that these give. For DSpark also its three terms and how far
    the confidence is from the acceptance. `sums_11S` is the sum of `BlockSums.stacked()`; zeros give zeros, never NaN.
    """
    sums = BlockSums(*sums_11S.double())
    w_S = sums.slots_S.new_tensor(slot_weights)
    safe_S = sums.slots_S.clamp(min=1)
    weight = (w_S * sums.slots_S).sum().clamp(min=1e-12)
    blocks = sums.slots_S[0].clamp(min=1)  # slots are counted in order, so every block has its first one

    def mean(x_S: torch.Tensor) -> float:
        return float((w_S * x_S).sum() / weight)

    metrics: dict[str, float | list[float]] = {
        "draft_loss": mean(sums.cross_entropy_S),
        "draft_loss_per_slot": (sums.cross_entropy_S / safe_S).tolist(),
        "draft_acceptance_per_slot": (sums.acceptance_S / safe_S).tolist(),
        "draft_greedy_acceptance_per_slot": (sums.greedy_acceptance_S / safe_S).tolist(),
        "draft_expected_accepted_length": 1.0 + float(sums.chain_S.sum() / blocks),
        "draft_greedy_expected_accepted_length": 1.0 + float(sums.greedy_chain_S.sum() / blocks),
        "draft_rows_per_slot": sums.slots_S.tolist(),
    }
    if dspark:
        metrics |= {
            "dspark_ce_loss": mean(sums.cross_entropy_S),
            "dspark_tv_loss": mean(sums.total_variation_S),
        }
    if confidence:
        metrics |= {
            "dspark_confidence_loss": mean(sums.confidence_loss_S),
            "dspark_confidence_abs_error": mean(sums.confidence_error_S),
            "dspark_confidence_bias": mean(sums.confidence_bias_S),
            "dspark_confidence_cumprod_bias": mean(sums.confidence_chain_bias_S),
        }
    return metrics
