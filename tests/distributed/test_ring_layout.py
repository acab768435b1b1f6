"""Rows that cross ranks: unshard and halo exchange, for chunks longer and shorter than the halo."""

import pytest
import torch
import torch.distributed as dist

from nemo_ext.layout import PackedLayout

PACKS = [[40, 3, 0, 1, 17], [1], [0, 0], [5, 5, 5]]


@pytest.fixture(scope="module", params=[1, 2, 4, 8], ids="cp{}".format)
def pool(request, ranks):
    return ranks(request.param)


def cross(rank: int, world_size: int, lens: list[int], depth: int, dtype: torch.dtype, shape: tuple[int, ...]):
    """Whether unshard gives the full pack, and exchange the rows that the halo names."""
    layout = PackedLayout(lens, cp_size=world_size, cp_rank=rank)
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(layout.total_rows, *shape, generator=generator).mul(5).to(dtype)
    group = dist.group.WORLD if world_size > 1 else None
    halo = layout.halo(depth)
    last = full.movedim(0, -1)
    return (
        torch.equal(layout.unshard(layout.shard(full), group), full),
        torch.equal(layout.unshard(layout.shard(last, dim=-1), group, dim=-1), last),
        torch.equal(halo.exchange(layout.shard(full), group), full[halo.rows]),
    )


@pytest.mark.parametrize("lens", PACKS, ids=str)
@pytest.mark.parametrize("depth", [0, 1, 15])
def test_rows_cross_ranks(pool, lens, depth):
    for dtype, shape in [(torch.bfloat16, (3,)), (torch.float64, ()), (torch.bool, ()), (torch.long, (2, 2))]:
        for found in pool.run(cross, lens, depth, dtype, shape):
            assert found == (True, True, True)


def other_pack(rank: int, world_size: int):
    layout = PackedLayout([8, 8] if rank else [16], cp_size=world_size, cp_rank=rank)
    try:
        layout.halo(1).exchange(torch.zeros(layout.local_total), dist.group.WORLD)
    except Exception as error:
        return type(error).__name__
    return "no error"


def test_exchange_of_different_packs_is_an_error(ranks):
    assert ranks(2).run(other_pack) == ["LayoutMismatch"] * 2
