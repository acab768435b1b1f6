"""What the ring sends, counted by the communicator: exactly the shards that must move, and nothing in later passes."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from nemo_ext.attention import comm, gather_trunk, ttt_attention
from nemo_ext.layout import PackedLayout

HEADS, DIM, PASSES = 2, 8, 4
WORLD = 4


def passes(rank: int, world_size: int, dtype: torch.dtype, resident: bool, recompute: bool):
    """Bytes that the forward and the backward of four passes send, and the gradient of the trunk's keys."""
    layout = PackedLayout([40, 9], cp_size=world_size, cp_rank=rank)
    generator = torch.Generator().manual_seed(rank)
    q, k, v = (
        torch.randn(layout.local_total, heads, DIM, generator=generator).to(dtype).requires_grad_()
        for heads in (2 * HEADS, HEADS, HEADS)
    )
    none = k.new_zeros(len(k), 0, HEADS, DIM)
    group = dist.group.WORLD
    sent = _count_bytes()

    def one(q, k, v, trunk):
        return ttt_attention(q, k, v, none, none, layout=layout, group=group, resident=trunk)

    trunk = gather_trunk(k, v, layout=layout, group=group) if resident else None
    outs = [
        checkpoint(one, q, k, v, trunk, use_reentrant=False) if recompute else one(q, k, v, trunk)
        for _ in range(PASSES)
    ]
    forward = sum(sent)
    sum(out.float().square().sum() for out in outs).backward()
    return layout.local_total, forward, sum(sent) - forward, k.grad


def _count_bytes() -> list[int]:
    """A list to which every further communicator of this process adds what it sends."""
    sent, swap = [], getattr(comm.RingComm.swap, "plain", comm.RingComm.swap)

    def counted(self, *args):
        before = self.bytes_sent
        hop = swap(self, *args)
        sent.append(self.bytes_sent - before)
        return hop

    counted.plain = swap
    comm.RingComm.swap = counted
    return sent


@pytest.fixture(scope="module")
def pool(ranks):
    return ranks(WORLD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("resident", [False, True])
def test_bytes(pool, dtype, resident):
    wide = 4
    for rows, forward, backward, _ in pool.run(passes, dtype, resident, False):
        shard = 2 * rows * HEADS * DIM  # elements of one rank's keys and values
        hops = (WORLD - 1) * (1 if resident else PASSES)
        assert forward == hops * shard * dtype.itemsize
        assert backward == hops * shard * (wide if resident else dtype.itemsize + wide)


def test_recomputed_passes_of_a_resident_trunk_move_nothing(pool):
    for rows, forward, backward, _ in pool.run(passes, torch.float32, True, True):
        shard = 2 * rows * HEADS * DIM * 4
        assert (forward, backward) == ((WORLD - 1) * shard, (WORLD - 1) * shard)


def test_ring_resident_and_recomputed_agree(pool):
    kinds = [(False, False), (True, False), (False, True), (True, True)]
    gradients = [[grad for *_, grad in pool.run(passes, torch.float64, *kind)] for kind in kinds]
    for other in gradients[1:]:
        for ours, theirs in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
