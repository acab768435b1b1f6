"""PackedLayout against a plain walk over every row of every rank."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_ext.layout import PackedLayout

SETTINGS = settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
seq_lens = st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(0, 60)), max_size=6)
cp_sizes = st.sampled_from([1, 2, 3, 4, 8])
pad_multiples = st.sampled_from([1, 2, 3, 5, 16])


def walk(lens, cp_size, pad_multiple):
    """`(row, sequence, position or -1)` of each rank's rows, in the zigzag order."""
    unit = math.lcm(2 * cp_size, pad_multiple)
    ranks, start = [[] for _ in range(cp_size)], 0
    for number, length in enumerate(lens):
        padded = math.ceil(length / unit) * unit
        chunk = padded // (2 * cp_size)
        for rank in range(cp_size):
            for position in range(padded):
                if position // chunk in (rank, 2 * cp_size - 1 - rank):
                    ranks[rank].append((start + position, number, position if position < length else -1))
        start += padded
    return ranks, start


@SETTINGS
@given(seq_lens, cp_sizes, pad_multiples)
def test_rows_sequences_positions(lens, cp_size, pad_multiple):
    expected, total = walk(lens, cp_size, pad_multiple)
    for rank in range(cp_size):
        layout = PackedLayout(lens, cp_size=cp_size, cp_rank=rank, pad_multiple=pad_multiple)
        assert layout.total_rows == total
        assert layout.local_total == len(expected[rank])
        found = zip(
            layout.local_rows.tolist(), layout.local_sequences.tolist(), layout.local_positions.tolist(), strict=True
        )
        assert list(found) == expected[rank]
        assert layout.seq_lens == tuple(lens)
        assert layout.cu_seqlens_padded.tolist() == [sum(layout.padded_lens[:n]) for n in range(len(lens) + 1)]
        assert layout.cu_seqlens_padded.dtype == torch.int32


@SETTINGS
@given(seq_lens, cp_sizes, pad_multiples, st.integers(0, 20))
def test_halo_index(lens, cp_size, pad_multiple, depth):
    """The row that `index` points at is the one `distance` positions on, and no row comes that nobody looks at."""
    expected, total = walk(lens, cp_size, pad_multiple)
    place = {row: (number, position) for rank in expected for row, number, position in rank}
    for rank in range(cp_size):
        layout = PackedLayout(lens, cp_size=cp_size, cp_rank=rank, pad_multiple=pad_multiple)
        halo = layout.halo(depth)
        assert halo.rows[: layout.local_total].tolist() == layout.local_rows.tolist()
        assert len(set(halo.rows.tolist())) == len(halo.rows)
        looked_at = set(range(layout.local_total))
        for distance in range(depth + 1):
            index = halo.index(distance)
            assert len(index) == layout.local_total
            for (_, number, position), at in zip(expected[rank], index.tolist(), strict=True):
                if position < 0 or position + distance >= lens[number]:
                    assert at == -1
                else:
                    assert place[int(halo.rows[at])] == (number, position + distance)
                    looked_at.add(at)
        assert looked_at == set(range(len(halo.rows)))


def test_pack_and_shard():
    layout = PackedLayout([3, 0, 1], cp_size=2, cp_rank=1)
    full = layout.pack([torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.long), torch.tensor([4])], fill=-1)
    assert full.tolist() == [1, 2, 3, -1, 4, -1, -1, -1]
    assert layout.shard(full).tolist() == [2, 3, -1, -1]
    assert layout.shard(full[None], dim=1).tolist() == [[2, 3, -1, -1]]


def test_one_rank_holds_everything():
    layout = PackedLayout([3, 5], pad_multiple=4)
    x = torch.arange(12)
    assert layout.shard(x).tolist() == x.tolist() == layout.unshard(x, None).tolist() == layout.halo(2).rows.tolist()
    assert layout.halo(2).exchange(x, None) is x


def test_shard_is_differentiable():
    layout = PackedLayout([4], cp_size=2, cp_rank=0)
    x = torch.ones(4, requires_grad=True)
    layout.shard(x).sum().backward()
    assert x.grad.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(
    "arguments, told",
    [
        (dict(seq_lens=[3, -1]), "seq_lens has -1; lengths are 0 or more"),
        (dict(seq_lens=[3], cp_size=2, cp_rank=2), "cp_rank is 2 of cp_size 2; use 0 to 1"),
        (dict(seq_lens=[3], cp_size=0), "cp_size is 0 and pad_multiple 1; both are 1 or more"),
        (dict(seq_lens=[3], pad_multiple=0), "cp_size is 1 and pad_multiple 0; both are 1 or more"),
    ],
)
def test_impossible_layouts(arguments, told):
    with pytest.raises(ValueError) as error:
        PackedLayout(arguments.pop("seq_lens"), **arguments)
    assert str(error.value) == told


def test_wrong_sizes():
    layout = PackedLayout([3], cp_size=2, cp_rank=0)
    with pytest.raises(ValueError, match="the full pack has 3 rows along dim 0; it needs 4"):
        layout.shard(torch.zeros(3))
    with pytest.raises(ValueError, match="the shard has 4 rows along dim 0; it needs 2"):
        layout.unshard(torch.zeros(4), None)
    with pytest.raises(ValueError, match=r"have lengths \(2,\); the layout was made for \(3,\)"):
        layout.pack([torch.zeros(2)])
    with pytest.raises(ValueError, match="the distance is 3; this halo reaches 0 to 2"):
        layout.halo(2).index(3)
