"""The three attentions on gloo ranks equal the dense float64 reference, output and every gradient, for random packs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.distributed.ring_cases import (
    Case,
    block_packs,
    dense_block,
    dense_causal,
    dense_ttt,
    joined,
    joined_blocks,
    packs,
    ring_block,
    ring_causal,
    ring_ttt,
    windows,
    with_anchors,
    worst_error,
)

TOLERANCE = 1e-10
BF16_TOLERANCE = 2e-2

# A failing case is reported whole and every rank call is bounded, so there is no deadline and no time limit here.
pytestmark = pytest.mark.timeout(0)


@pytest.fixture(scope="module", params=[1, 2, 4, 8], ids="cp{}".format)
def pool(request, ranks):
    return ranks(request.param)


@pytest.fixture
def property_of(request):
    """Checks a property of a strategy's cases: this test's share of `--ring-cases`, over 3 functions and 4 CP sizes."""
    total = request.config.getoption("ring_cases", None) or 300

    def run(strategy, check):
        configure = settings(
            max_examples=-(-total // 12), deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        configure(given(strategy)(check))()

    return run


def test_causal_attention(pool, property_of):
    def check(case: Case):
        assert worst_error(joined(case, pool.run(ring_causal, case)), dense_causal(case)) <= TOLERANCE

    property_of(packs(window=windows), check)


def test_ttt_attention(pool, property_of):
    def check(case: Case):
        assert worst_error(joined(case, pool.run(ring_ttt, case)), dense_ttt(case)) <= TOLERANCE

    property_of(packs(passes=st.integers(1, 4), resident=st.booleans()), check)


def test_block_attention(pool, property_of):
    property_of(block_packs(), lambda case: check_blocks(pool, case))


def check_blocks(pool, case: Case):
    per_rank = pool.run(ring_block, case)
    trunk = joined(case, [trunk for trunk, _ in per_rank])
    blocks = joined_blocks(case, [blocks for _, blocks in per_rank])
    dense_trunk, dense_blocks = dense_block(case)
    assert worst_error(trunk + blocks, dense_trunk + dense_blocks) <= TOLERANCE


BIG = Case((1500, 1, 0, 397, 30), 1, 2, 2, 8, None, seed=3)


@pytest.mark.parametrize("window", [None, 300])
def test_many_blocks_of_long_sequences(pool, window):
    case = replace(with_anchors(BIG, 150), width=5, window=window)
    check_blocks(pool, case)


@pytest.mark.parametrize("window", [None, 300])
def test_long_sequences(pool, window):
    case = replace(BIG, window=window)
    assert worst_error(joined(case, pool.run(ring_causal, case)), dense_causal(case)) <= TOLERANCE


def near(found, expected) -> bool:
    """Whether each tensor is the reference to bfloat16's precision."""
    pairs = zip(found, expected, strict=True)
    return all(float((ours.double() - theirs).norm() / theirs.norm()) <= BF16_TOLERANCE for ours, theirs in pairs)


EXACT = Case((150, 1, 0, 97, 30), 1, 2, 2, 32, None, seed=3)  # what bfloat16 is compared with, in float64


@pytest.mark.parametrize("resident", [False, True])
def test_bfloat16_ttt_is_near_float64(pool, resident):
    exact = replace(EXACT, passes=3, resident=resident)
    case = replace(exact, dtype=torch.bfloat16)
    assert near(joined(case, pool.run(ring_ttt, case)), dense_ttt(exact))


@pytest.mark.parametrize("window", [None, 40])
def test_bfloat16_causal_is_near_float64(pool, window):
    exact = replace(EXACT, window=window)
    case = replace(exact, dtype=torch.bfloat16)
    assert near(joined(case, pool.run(ring_causal, case)), dense_causal(exact))


@pytest.mark.parametrize("window", [None, 40])
def test_bfloat16_blocks_are_near_float64(pool, window):
    exact = replace(with_anchors(EXACT, 60), width=5, window=window)
    case = replace(exact, dtype=torch.bfloat16)
    per_rank = pool.run(ring_block, case)
    trunk = joined(case, [trunk for trunk, _ in per_rank])
    blocks = joined_blocks(case, [blocks for _, blocks in per_rank])
    dense_trunk, dense_blocks = dense_block(exact)
    assert near(trunk + blocks, dense_trunk + dense_blocks)
