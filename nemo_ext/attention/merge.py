"""Summing what kernels give, row by row: partial softmaxes by their log-sum-exp, and gradients.

Legend: T rows, R rows of one partial result, N heads, D head dim.
"""

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Merged:
    """A softmax over several key sets, from each set's own (contract A.4): with `lse = log(sum_s exp(lse_s))`, its
    output is `sum_s exp(lse_s - lse) out_s`. Rows that have seen nothing hold 0 and an lse of -inf."""

    def __init__(self, q_TND: torch.Tensor):
        self._like = q_TND
        self._out_TND = self._lse_TN = None

    def add_partials(self, partials) -> None:
        """Merges what a kernel's or a branch's `forward` yields."""
        for rows, out_RND, lse_RN in partials:
            self.add(rows, out_RND, lse_RN)

    def add(self, rows: slice | torch.Tensor, out_RND: torch.Tensor, lse_RN: torch.Tensor) -> None:
        wide = wide_dtype(self._like.dtype)
        if self._out_TND is None:
            if _all_rows(rows, len(self._like)):
                self._out_TND, self._lse_TN = out_RND.to(wide), lse_RN.to(wide)
                return
            self._allocate()
        had_RN = self._lse_TN[rows]
        total_RN = torch.logaddexp(had_RN, lse_RN)
        kept_RN, new_RN = (had_RN - total_RN).exp_(), (lse_RN - total_RN).exp_()
        merged_RND = self._out_TND[rows]  # a view of the rows if they are a slice
        merged_RND.mul_(kept_RN[..., None]).addcmul_(out_RND.to(wide), new_RN[..., None])
        if not isinstance(rows, slice):
            self._out_TND.index_copy_(0, rows, merged_RND)
        self._lse_TN[rows] = total_RN

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(out_TND` in the dtype of the queries, `lse_TN)`."""
        if self._out_TND is None:
            self._allocate()
        return self._out_TND.to(self._like.dtype), self._lse_TN

    def _allocate(self) -> None:
        like, wide = self._like, wide_dtype(self._like.dtype)
        self._out_TND = like.new_zeros(like.shape, dtype=wide)
        self._lse_TN = like.new_full(like.shape[:2], float("-inf"), dtype=wide)


class Summed:
    """A gradient `[T, ...]` summed over kernel calls, in the wide dtype."""

    def __init__(self, like: torch.Tensor):
        self._like, self._sum_T = like, None

    def add(self, rows: slice | torch.Tensor, x_R: torch.Tensor) -> None:
        """Adds to these rows; an index may name a row twice."""
        wide = wide_dtype(self._like.dtype)
        if self._sum_T is None:
            if _all_rows(rows, len(self._like)):
                self._sum_T = x_R.to(wide)
                return
            self.start(self._like.new_zeros(self._like.shape, dtype=wide))
        if isinstance(rows, slice):
            self._sum_T[rows] += x_R
        else:
            self._sum_T.index_add_(0, rows, x_R.to(wide))

    def start(self, sum_T: torch.Tensor) -> None:
        """Goes on from a sum that came from elsewhere."""
        self._sum_T = sum_T

    def result(self) -> torch.Tensor:
        """The sum, in the wide dtype."""
        if self._sum_T is None:
            self._sum_T = self._like.new_zeros(self._like.shape, dtype=wide_dtype(self._like.dtype))
        return self._sum_T


class KeyGradient:
    """The gradient of one set of keys and values, summed over kernel calls."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor):
        self._dk, self._dv = Summed(k), Summed(v)

    def start(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Goes on, in place, from sums that came from elsewhere."""
        self._dk.start(dk)
        self._dv.start(dv)

    def add(self, rows: slice | torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
        self._dk.add(rows, dk)
        self._dv.add(rows, dv)

    def result(self) -> list[torch.Tensor]:
        """`[dk, dv]`, in the wide dtype."""
        return [self._dk.result(), self._dv.result()]


def add_partials(partials, dq: Summed, keys: KeyGradient) -> None:
    """Adds up what a kernel's or a branch's `backward` yields."""
    for q_rows, dq_part, k_rows, dk_part, dv_part in partials:
        dq.add(q_rows, dq_part)
        keys.add(k_rows, dk_part, dv_part)


def _all_rows(rows: slice | torch.Tensor, count: int) -> bool:
    return isinstance(rows, slice) and rows.start == 0 and rows.stop == count
