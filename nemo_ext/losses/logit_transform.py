"""What some targets do to their logits before the softmax (contract B.8).

Legend: n rows, U vocabulary.
"""

from typing import NamedTuple

import torch


class LogitTransform(NamedTuple):
    """`scale * softcap * tanh(x / softcap)`, the order of vLLM's `LogitsProcessor`; without a soft cap `scale * x`."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, x_nU: torch.Tensor) -> torch.Tensor:
        """In place; returns `x_nU`."""
        if self.softcap is not None:
            x_nU.div_(self.softcap).tanh_().mul_(self.softcap)
        return x_nU if self.scale == 1.0 else x_nU.mul_(self.scale)


UNCHANGED = LogitTransform()
