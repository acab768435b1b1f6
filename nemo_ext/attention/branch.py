"""Keys that only their own rank ever reads: the part of a draft's softmax that needs no ring.

Legend: T rows, P branch keys per row, N query heads, M key heads, G query heads per key head, D head dim, R rows of a
part.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from nemo_ext.attention.kernels import Kernel, Rows
from nemo_ext.attention.merge import wide_dtype
from nemo_ext.attention.spans import Spans

PART = 4096  # rows at a time: bounds the wide temporaries


class Branch(Protocol):
    """As `kernels.Kernel`, over the branch's own keys and values."""

    def forward(self, q_TND, k, v, scale) -> Iterator[tuple[Rows, torch.Tensor, torch.Tensor]]: ...

    def backward(
        self, dout_TND, q_TND, k, v, out_TND, lse_TN, scale
    ) -> Iterator[tuple[Rows, torch.Tensor, Rows, torch.Tensor, torch.Tensor]]: ...


class NoBranch:
    """The trunk alone."""

    def forward(self, q_TND, k, v, scale):
        return iter(())

    def backward(self, dout_TND, q_TND, k, v, out_TND, lse_TN, scale):
        return iter(())


class OwnKeys:
    """Each row sees its own P keys `[T, P, M, D]`, elementwise (contract A.4)."""

    def forward(self, q_TND, k_TPMD, v_TPMD, scale):
        if k_TPMD.shape[1] == 0:
            return
        wide = wide_dtype(q_TND.dtype)
        for rows in _parts(len(q_TND)):
            k_RPMD, v_RPMD = k_TPMD[rows].to(wide), v_TPMD[rows].to(wide)
            q_RMGD = q_TND[rows].to(wide).unflatten(1, (k_RPMD.shape[2], -1))
            scores_RMGP = torch.einsum("rmgd,rpmd->rmgp", q_RMGD, k_RPMD) * scale
            out_RMGD = torch.einsum("rmgp,rpmd->rmgd", scores_RMGP.softmax(-1), v_RPMD)
            yield rows, out_RMGD.flatten(1, 2), scores_RMGP.logsumexp(-1).flatten(1, 2)

    def backward(self, dout_TND, q_TND, k_TPMD, v_TPMD, out_TND, lse_TN, scale):
        if k_TPMD.shape[1] == 0:
            return
        wide = wide_dtype(q_TND.dtype)
        M = k_TPMD.shape[2]
        for rows in _parts(len(q_TND)):
            k_RPMD, v_RPMD = k_TPMD[rows].to(wide), v_TPMD[rows].to(wide)
            q_RMGD, dout_RMGD, out_RMGD = (x[rows].to(wide).unflatten(1, (M, -1)) for x in (q_TND, dout_TND, out_TND))
            delta_RMG1 = (dout_RMGD * out_RMGD).sum(-1, keepdim=True)
            scores_RMGP = torch.einsum("rmgd,rpmd->rmgp", q_RMGD, k_RPMD) * scale
            weights_RMGP = (scores_RMGP - lse_TN[rows].unflatten(1, (M, -1))[..., None]).exp()
            dweights_RMGP = torch.einsum("rmgd,rpmd->rmgp", dout_RMGD, v_RPMD)
            dscores_RMGP = weights_RMGP * (dweights_RMGP - delta_RMG1) * scale
            dq_RMGD = torch.einsum("rmgp,rpmd->rmgd", dscores_RMGP, k_RPMD)
            dk_RPMD = torch.einsum("rmgp,rmgd->rpmd", dscores_RMGP, q_RMGD)
            dv_RPMD = torch.einsum("rmgp,rmgd->rpmd", weights_RMGP, dout_RMGD)
            yield rows, dq_RMGD.flatten(1, 2), rows, dk_RPMD, dv_RPMD


class OwnBlock:
    """Each block's rows see their block's keys: `calls` says which, keys are `[N * W, M, D]`."""

    def __init__(self, calls: Sequence[Spans], kernel: Kernel):
        self._calls, self._kernel = calls, kernel

    def forward(self, q_TND, k_TMD, v_TMD, scale):
        for spans in self._calls:
            yield from self._kernel.forward(q_TND, k_TMD, v_TMD, spans, scale)

    def backward(self, dout_TND, q_TND, k_TMD, v_TMD, out_TND, lse_TN, scale):
        for spans in self._calls:
            yield from self._kernel.backward(dout_TND, q_TND, k_TMD, v_TMD, out_TND, lse_TN, spans, scale)


def _parts(total: int) -> list[slice]:
    return [slice(at, min(at + PART, total)) for at in range(0, total, PART)]
