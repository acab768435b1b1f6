"""Draft metrics of one step, from sums that were reduced over data- and context-parallel ranks. P passes."""

import torch


def draft_metrics(sums_5P: torch.Tensor, pass_weights: list[float]) -> dict[str, float | list[float]]:
    """`draft_loss` (weighted mean over all passes), the same per pass, the chance per pass that verification accepts a
    sampled (`draft_acceptance_per_pass`) or a greedy (`draft_greedy_acceptance_per_pass`) draft token, and the accepted length
    that the former would give. `sums_5P` is the sum of `DraftLoss.sums()`; zeros give zeros, never NaN."""
    cross_entropy_P, acceptance_P, greedy_P, chain_P, rows_P = sums_5P.double()
    alpha_P = rows_P.new_tensor(pass_weights)
    safe_P = rows_P.clamp(min=1)
    return {
        "draft_loss": float((alpha_P * cross_entropy_P).sum() / (alpha_P * rows_P).sum().clamp(min=1e-12)),
        "draft_loss_per_pass": (cross_entropy_P / safe_P).tolist(),
        "draft_acceptance_per_pass": (acceptance_P / safe_P).tolist(),
        "draft_greedy_acceptance_per_pass": (greedy_P / safe_P).tolist(),
        "draft_expected_accepted_length": 1.0 + float((chain_P / safe_P).sum()),
    }
