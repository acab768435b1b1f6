"""What a rank computes at each step of the ring (contract E.2), as rectangles of row numbers.

At step `s` a rank holds the shard of rank `(rank - s) mod C`. Rows of a shard are, sequence after sequence, its first
chunk and then its second. The unpadded rows of a shard are a prefix of each sequence's rows, so padding never enters a
kernel. A shard from a lower rank shows its first chunk to every query; one from a higher rank shows both chunks to the
queries of the second: all of them wholly, and equally many on every rank.

Positions, starts and lengths are in rows.
"""

from typing import Protocol

import torch

from nemo_ext.attention.spans import Spans, collect, collect_bands
from nemo_ext.layout import PackedLayout

# Below this many keys the end of a block's trunk prefix is one rectangle per block.
SMALLEST_PIECE = 16


class Plan(Protocol):
    """Kernel calls of one rank. Query rows are its own, key rows those of the shard at that step."""

    def calls(self, step: int) -> list[Spans]: ...


class _Sequence:
    """One sequence's chunks: `size` rows each, the first `real(c)` of chunk `c` unpadded."""

    def __init__(self, start: int, length: int, padded: int, cp_size: int):
        self.size = padded // (2 * cp_size)
        self.start = start  # first row of the sequence in any shard
        self.length = length

    def real(self, chunk: int) -> int:
        return min(max(self.length - chunk * self.size, 0), self.size)


def _sequences(layout: PackedLayout) -> list[_Sequence]:
    found, start = [], 0
    for length, padded in zip(layout.seq_lens, layout.padded_lens, strict=True):
        found.append(_Sequence(start, length, padded, layout.cp_size))
        start += padded // layout.cp_size
    return found


class CausalPlan:
    """Row `i` sees rows `j <= i` of its sequence."""

    def __init__(self, layout: PackedLayout):
        self.layout = layout

    def calls(self, step: int) -> list[Spans]:
        rank, size = self.layout.cp_rank, self.layout.cp_size
        source = (rank - step) % size
        rectangles = []
        for s in _sequences(self.layout):
            first, second = s.real(rank), s.real(2 * size - 1 - rank)
            if source == rank:
                rectangles.append((s.start, first + second, s.start, first + second))
            elif source < rank:
                rectangles.append((s.start, first + second, s.start, s.size))
            else:
                rectangles.append((s.start + s.size, second, s.start, 2 * s.size))
        return collect(rectangles, high=0 if source == rank else None)


class WindowedCausalPlan:
    """Row `i` sees rows `j` of its sequence with `0 <= i - j < window`."""

    def __init__(self, layout: PackedLayout, window: int):
        if window < 1:
            raise ValueError(f"window is {window}; use 1 or more, or None for no window")
        self.layout, self.window = layout, window

    def calls(self, step: int) -> list[Spans]:
        layout = self.layout
        rank, size = layout.cp_rank, layout.cp_size
        source = (rank - step) % size
        found = []
        # One set of calls per key chunk: a query row may see both chunks, and rows of one call must not overlap.
        for k_number, k_chunk in enumerate((source, 2 * size - 1 - source)):
            rectangles = []
            for s in _sequences(layout):
                for q_number, q_chunk in enumerate((rank, 2 * size - 1 - rank)):
                    ahead = (q_chunk - k_chunk) * s.size
                    rectangles.append(
                        (s.start + q_number * s.size, s.real(q_chunk), s.start + k_number * s.size, s.real(k_chunk))
                        + (ahead - self.window + 1, ahead)
                    )
            found += collect_bands(rectangles)
        return found


class BlockPlan:
    """Blocks against the trunk: a block sees its sequence's rows strictly before its anchor, of those with a window `w`
    slot `j` the ones at `anchor + j - w + 1` or later.

    Args:
        sequences, positions: of each block's anchor, sorted by (sequence, position); the rank owns these rows.
        width: slots of a block. Query row `n * width + j` is slot `j` of block `n`.

    Raises:
        ValueError: for an anchor that is no row of this rank.
    """

    def __init__(
        self, layout: PackedLayout, sequences: list[int], positions: list[int], width: int, window: int | None
    ):
        self.layout, self.width, self.window = layout, width, window
        self.of_sequence: dict[int, list[tuple[int, int, int]]] = {}  # (block, position, chunk of this rank: 0 or 1)
        known = _sequences(layout)
        for block, (number, position) in enumerate(zip(sequences, positions, strict=True)):
            if not 0 <= number < len(known) or not 0 <= position < known[number].length:
                raise ValueError(
                    f"block {block} has its anchor at sequence {number}, position {position}; the pack's lengths are "
                    f"{layout.seq_lens}"
                )
            chunk = position // known[number].size
            if chunk not in (layout.cp_rank, 2 * layout.cp_size - 1 - layout.cp_rank):
                raise ValueError(
                    f"block {block} has its anchor at sequence {number}, position {position}, a row that rank "
                    f"{layout.cp_rank} of {layout.cp_size} does not hold; give each rank the blocks of its own rows"
                )
            self.of_sequence.setdefault(number, []).append((block, position, int(chunk != layout.cp_rank)))
        self.known = known

    def calls(self, step: int) -> list[Spans]:
        source = (self.layout.cp_rank - step) % self.layout.cp_size
        if self.window is not None:
            return self._windowed(source)
        return self._own() if source == self.layout.cp_rank else self._others(source)

    def _others(self, source: int) -> list[Spans]:
        rectangles = []
        for number, blocks in self.of_sequence.items():
            s = self.known[number]
            lower = source < self.layout.cp_rank
            seeing = [block for block, _, chunk in blocks if lower or chunk == 1]
            if seeing:
                q_len = len(seeing) * self.width
                rectangles.append((seeing[0] * self.width, q_len, s.start, s.size if lower else 2 * s.size))
        return collect(rectangles)

    def _own(self) -> list[Spans]:
        """Prefixes of the own shard. A prefix of `n` rows is cut at the binary digits of `n`; blocks that share a piece
        share its rectangle, and one call has at most one piece of each block."""
        starts, seen, blocks = [], [], []
        for number, of_sequence in self.of_sequence.items():
            s = self.known[number]
            for block, position, chunk in of_sequence:
                local = (
                    position
                    - (self.layout.cp_rank if chunk == 0 else 2 * self.layout.cp_size - 2 - self.layout.cp_rank)
                    * s.size
                )
                starts.append(s.start)
                seen.append(local)
                blocks.append(block)
        start_N, seen_N, block_N = (torch.tensor(x, dtype=torch.long) for x in (starts, seen, blocks))
        calls, piece = [], SMALLEST_PIECE
        while piece <= int(seen_N.max() if len(seen_N) else 0):
            has = (seen_N // piece) % 2 == 1
            first_key = start_N[has] + seen_N[has] // (2 * piece) * (2 * piece)
            keys, counts = torch.unique_consecutive(first_key, return_counts=True)
            first_block = block_N[has][(counts.cumsum(0) - counts)]
            calls += collect(
                (block * self.width, count * self.width, key, piece)
                for block, count, key in zip(first_block.tolist(), counts.tolist(), keys.tolist(), strict=True)
            )
            piece *= 2
        rest_N = seen_N % SMALLEST_PIECE
        ends = zip(block_N.tolist(), rest_N.tolist(), (start_N + seen_N - rest_N).tolist(), strict=True)
        return calls + collect((block * self.width, self.width, key, rest) for block, rest, key in ends)

    def _windowed(self, source: int) -> list[Spans]:
        found = []
        for k_number, k_chunk in enumerate((source, 2 * self.layout.cp_size - 1 - source)):
            rectangles = []
            for number, blocks in self.of_sequence.items():
                s = self.known[number]
                for block, position, _ in blocks:
                    before = position - k_chunk * s.size  # rows of this chunk before the anchor, if any
                    k_len = min(max(before, 0), s.real(k_chunk))
                    rectangles.append(
                        (block * self.width, self.width, s.start + k_number * s.size, k_len)
                        + (before - self.window + 1, None)
                    )
            found += collect_bands(rectangles)
        return found


def in_block_calls(blocks: int, width: int, window: int | None, causal: bool) -> list[Spans]:
    """A block's own slots: all of them, those at or before the slot if causal; within the window on either side."""
    low = None if window is None or window >= width else 1 - window
    high = 0 if causal else None if low is None else -low
    starts = range(0, blocks * width, width)
    return collect(((start, width, start, width) for start in starts), low, high)
