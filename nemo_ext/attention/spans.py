"""Which query rows meet which key rows in one kernel call."""

from typing import NamedTuple


class Spans(NamedTuple):
    """Rectangles of one attention call: rows `q_starts[b] : + q_lens[b]` meet rows `k_starts[b] : + k_lens[b]`.

    Within each rectangle query `i` sees key `j` iff `i + low <= j <= i + high`; None is no bound, so the default sees
    everything and `high=0` on a square is causal. Query rows of different rectangles never overlap (their results are
    merged row by row); key rows may. No rectangle is empty and every query row sees a key.
    """

    q_starts: tuple[int, ...]
    q_lens: tuple[int, ...]
    k_starts: tuple[int, ...]
    k_lens: tuple[int, ...]
    low: int | None = None
    high: int | None = None

    @property
    def causal(self) -> bool:
        return self.low is None and self.high == 0 and self.q_lens == self.k_lens

    @property
    def full(self) -> bool:
        return self.low is None and self.high is None

    def pairs(self) -> int:
        """How many (query, key) pairs are visible: attention costs `4 * pairs * heads * head_dim` FLOPs forward."""
        return sum(visible_pairs(q, k, self.low, self.high) for q, k in zip(self.q_lens, self.k_lens, strict=True))


def visible_pairs(q_len: int, k_len: int, low: int | None, high: int | None) -> int:
    """Pairs of a `q_len x k_len` rectangle with `i + low <= j <= i + high`."""
    before_low = 0 if low is None else _pairs_below(q_len, k_len, low)
    up_to_high = q_len * k_len if high is None else _pairs_below(q_len, k_len, high + 1)
    return up_to_high - before_low


def _pairs_below(q_len: int, k_len: int, bound: int) -> int:
    """Pairs with `j < i + bound`: the sum of `clamp(i + bound, 0, k_len)` over `i`."""
    first = min(max(-bound, 0), q_len)  # queries before it see none
    last = min(max(k_len - bound, first), q_len)  # queries from it on see all
    rising = (first + bound + last - 1 + bound) * (last - first) // 2
    return rising + (q_len - last) * k_len


def collect(rectangles, low: int | None = None, high: int | None = None) -> list[Spans]:
    """One `Spans` of `(q_start, q_len, k_start, k_len)` rectangles, in a list; none if every rectangle is empty."""
    kept = [rectangle for rectangle in rectangles if rectangle[1] > 0 and rectangle[3] > 0]
    if not kept:
        return []
    q_starts, q_lens, k_starts, k_lens = zip(*kept, strict=True)
    return [Spans(q_starts, q_lens, k_starts, k_lens, low, high)]


def collect_bands(rectangles) -> list[Spans]:
    """`Spans` of `(q_start, q_len, k_start, k_len, low, high)` rectangles whose query rows do not overlap.

    Rows and keys outside the band are cut off, and bounds that cut nothing are dropped, so that as many rectangles as
    possible share a call and need no mask.
    """
    calls: dict[tuple[int | None, int | None], list] = {}
    for rectangle in rectangles:
        q_start, q_len, k_start, k_len, low, high = _trim(*rectangle)
        if q_len > 0 and k_len > 0:
            calls.setdefault((low, high), []).append((q_start, q_len, k_start, k_len))
    return [spans for (low, high), same in calls.items() for spans in collect(same, low, high)]


def _trim(q_start, q_len, k_start, k_len, low, high):
    """The smallest rectangle with the same visible pairs, and the bounds that it still needs."""
    if high is not None:
        blind = min(max(-high, 0), q_len)  # queries whose last visible key lies before the first key
        q_start, q_len, high = q_start + blind, q_len - blind, high + blind
        low = None if low is None else low + blind
        k_len = min(k_len, q_len + high)
    if low is not None:
        q_len = min(q_len, k_len - low)  # queries after it see only keys past the last
        unseen = min(max(low, 0), k_len)
        k_start, k_len, low = k_start + unseen, k_len - unseen, low - unseen
        high = None if high is None else high - unseen
        if high is not None:
            k_len = min(k_len, q_len + high)
    if low is not None and low + q_len - 1 <= 0:
        low = None
    if high is not None and high >= k_len - 1:
        high = None
    return q_start, q_len, k_start, k_len, low, high
