"""A rank that dies, hangs or holds another pack ends every other rank in an error, in bounded time."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from nemo_ext.attention import causal_attention, comm, gather_trunk, ttt_attention
from nemo_ext.layout import PackedLayout

WORLD, GROUP_TIMEOUT = 4, 3.0
CULPRIT = 1


def lose_rank(rank: int, world_size: int, swaps: int, hang: bool, resident: bool) -> tuple[str, str, float]:
    """Runs attention forward and backward; the culprit dies or hangs at its swap number `swaps` (from 0)."""
    layout = PackedLayout([30, 20], cp_size=world_size, cp_rank=rank)
    q = torch.randn(layout.local_total, 2, 4, requires_grad=True)
    if rank == CULPRIT:
        _sabotage(swaps, hang)
    start = time.monotonic()
    try:
        group = dist.group.WORLD
        trunk = gather_trunk(q, q, layout=layout, group=group) if resident else None
        no_branch = q.new_zeros(len(q), 0, 2, 4)
        ttt_attention(q, q, q, no_branch, no_branch, layout=layout, group=group, resident=trunk).sum().backward()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "no error", time.monotonic() - start


def _sabotage(swaps: int, hang: bool) -> None:
    swap, count = comm.RingComm.swap, iter(range(1000))

    def sabotaged(self, *args):
        if next(count) == swaps:
            time.sleep(2.5 * GROUP_TIMEOUT) if hang else os._exit(1)
        return swap(self, *args)

    comm.RingComm.swap = sabotaged


# Swaps of four ranks: 0 to 2 are the forward's; then keys and gradients of the backward.
@pytest.mark.parametrize(
    "swaps, hang, resident",
    [(0, False, False), (2, False, False), (4, False, False), (4, True, False), (0, True, True), (4, False, True)],
)
def test_a_lost_rank_ends_the_others(ranks, swaps, hang, resident):
    pool = ranks(WORLD, group_timeout=GROUP_TIMEOUT)
    outcomes = pool.outcomes(lose_rank, swaps, hang, resident, timeout=60)
    pool.stop()
    for rank in set(range(WORLD)) - {CULPRIT}:
        name, told, seconds = outcomes[rank]
        assert name == "RingError", told
        assert f"rank {rank} of {WORLD}, step " in told
        # Each wait is bounded by the timeout; a rank may wait for its neighbour, which waited for the culprit.
        assert seconds < 2 * GROUP_TIMEOUT + 2
    assert any(f"rank {CULPRIT}" in outcomes[rank][1] for rank in set(range(WORLD)) - {CULPRIT})


def disagree(rank: int, world_size: int, lengths: list[int]) -> tuple[str, str]:
    layout = PackedLayout(lengths if rank == CULPRIT else [30, 20], cp_size=world_size, cp_rank=rank)
    x = torch.randn(layout.local_total, 2, 4)
    try:
        causal_attention(x, x, x, layout=layout, group=dist.group.WORLD)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


@pytest.mark.parametrize("lengths", [[30, 21], [20, 30], [30, 20, 1], []])
def test_other_lengths_are_told_on_every_rank(ranks, lengths):
    for name, told in ranks(WORLD).run(disagree, lengths):
        assert name == "LayoutMismatch"
        assert f"ranks [{CULPRIT}] hold other sequences than rank 0" in told
        assert "\n" not in told


def absent(rank: int, world_size: int) -> tuple[str, str]:
    if rank == CULPRIT:
        time.sleep(2 * GROUP_TIMEOUT)
        return "", ""
    layout = PackedLayout([30], cp_size=world_size, cp_rank=rank)
    x = torch.randn(layout.local_total, 2, 4)
    try:
        causal_attention(x, x, x, layout=layout, group=dist.group.WORLD)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def test_a_rank_that_never_comes(ranks):
    pool = ranks(WORLD, group_timeout=GROUP_TIMEOUT)
    outcomes = pool.outcomes(absent, timeout=60)
    pool.stop()
    for rank in set(range(WORLD)) - {CULPRIT}:
        name, told = outcomes[rank]
        assert name == "RingError"
        assert f"rank {rank} of {WORLD}, before step 0" in told
