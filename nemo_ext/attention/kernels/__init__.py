"""Partial attention kernels behind one interface.

`forward` and `backward` are generators, one item per kernel call, so that a caller merges each result while it is small
and no temporary is as large as a shard. Rows are a slice, or a long index without duplicates for queries.

Legend: T query rows, S key rows, N query heads, M key heads (N a multiple of M), D head dim, R rows of one result.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from nemo_ext.attention.kernels import cpu, cuda, plain
from nemo_ext.attention.spans import Spans

Rows = slice | torch.Tensor


class Kernel(Protocol):
    """What the ring asks of a kernel; `cpu`, `cuda` and `plain` are modules that have it."""

    def forward(
        self, q_TND: torch.Tensor, k_SMD: torch.Tensor, v_SMD: torch.Tensor, spans: Spans, scale: float
    ) -> Iterator[tuple[Rows, torch.Tensor, torch.Tensor]]:
        """Yields `(query rows, out_RND, lse_RN)`: the softmax over the keys of that call and the log of its sum."""
        ...

    def backward(
        self,
        dout_TND: torch.Tensor,
        q_TND: torch.Tensor,
        k_SMD: torch.Tensor,
        v_SMD: torch.Tensor,
        out_TND: torch.Tensor,
        lse_TN: torch.Tensor,
        spans: Spans,
        scale: float,
    ) -> Iterator[tuple[Rows, torch.Tensor, Rows, torch.Tensor, torch.Tensor]]:
        """Yields `(query rows, dq, key rows, dk, dv)`: these keys' exact part of the gradient.

        `out` and `lse` are those of the whole softmax, merged over all keys (contract A.4).
        """
        ...


def kernel_for(q_TND: torch.Tensor) -> Kernel:
    """The fastest kernel that takes this device and dtype; on CUDA flash attention has no float32 and no float64."""
    if q_TND.device.type == "cpu":
        return cpu
    if q_TND.device.type == "cuda" and q_TND.dtype in (torch.bfloat16, torch.float16):
        return cuda
    return plain
