"""GRPO's group-normalised advantages."""

import torch


def advantages(rewards: list[list[float]], *, normalize: bool, leave_one_out: bool) -> list[list[float]]:
    """Per prompt: reward minus the group's mean (of the others, with `leave_one_out`), over its standard deviation.

    A group of equal rewards has no direction to learn: its advantages are zero.
    """
    result = []
    for group in rewards:
        values = torch.tensor(group, dtype=torch.float64)
        n = len(group)
        baseline = (values.sum() - values) / max(n - 1, 1) if leave_one_out else values.mean()
        centred = values - baseline
        if normalize and n > 1:
            centred = centred / (values.std() + 1e-6)
        result.append(centred.tolist())
    return result
