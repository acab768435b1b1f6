"""Rectangles of equal size, read from packed rows as one batch and given back as packed rows.

Legend: T packed rows, B rectangles, S rows of each, R rows that are real.
"""

from collections.abc import Sequence

import torch


class RowBatch:
    """Rows `starts[b] : starts[b] + lens[b]`, each filled up to `size` rows by repeating its last one.

    Attributes:
        rows: the real rows, a slice where they are contiguous, else a long index `[R]`.
        padded: whether any rectangle is shorter than `size`.
    """

    def __init__(self, starts: Sequence[int], lens: Sequence[int], size: int, device: torch.device):
        self.count, self.size = len(starts), size
        self.padded = any(length != size for length in lens)
        back_to_back = all(b == a + size for a, b in zip(starts, starts[1:], strict=False))
        self._index_R = None  # into the flattened batch, of its real rows
        if back_to_back and not self.padded:
            self.rows: slice | torch.Tensor = slice(starts[0], starts[0] + size * len(starts))
            return
        start_B1 = torch.tensor(starts, device=device)[:, None]
        place_1S = torch.arange(size, device=device)[None]
        if self.padded:
            len_B1 = torch.tensor(lens, device=device)[:, None]
            self._read_BS = start_B1 + torch.minimum(place_1S, len_B1 - 1)
            self.real_BS = place_1S < len_B1
            self._index_R = self.real_BS.flatten().nonzero().flatten()
            self.rows = self._read_BS.flatten()[self._index_R]
        else:
            self._read_BS = start_B1 + place_1S
            self.rows = self._read_BS.flatten()

    def read(self, x_T: torch.Tensor) -> torch.Tensor:
        """`[B, S, ...]`; a view where the rows are contiguous."""
        if isinstance(self.rows, slice):
            return x_T[self.rows].unflatten(0, (self.count, self.size))
        return x_T.index_select(0, self._read_BS.flatten()).unflatten(0, (self.count, self.size))

    def real(self, x_BS: torch.Tensor) -> torch.Tensor:
        """`[R, ...]`: the batch's real rows, in the order of `rows`."""
        flat = x_BS.flatten(0, 1)
        return flat if self._index_R is None else flat.index_select(0, self._index_R)
