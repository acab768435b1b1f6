"""Block drafts on gloo ranks: loss, metrics and every gradient equal the dense float64 reference for any CP and TP."""

import random

import pytest
import torch

from nemo_ext.losses import LossTerms
from tests.distributed.block_ranks import Case, run_cases
from tests.unit.block_cases import (
    SHAPES,
    dense_loss,
    make_objective,
    make_pack,
    make_tensors,
)

# CP, TP; replicas fill up four ranks. Of the one or two key heads, four TP ranks share each.
LAYOUTS = [(1, 1), (1, 2), (2, 1), (4, 1), (2, 2), (1, 4)]
OPTIONS = [
    {},
    {"temperature": 0.7, "recompute": True},
    {"anchors_per_seq": 1},
    {"anchors_per_seq": 100, "chunk_rows": 3},
]


def _random_cases() -> list[Case]:
    """Every shape on random packs: empty and one-token sequences, chunks shorter than a block, few trained tokens."""
    dice = random.Random(3)
    cases = []
    for number, shape in enumerate(SHAPES):
        lengths = [dice.choice([0, 1, 2, 5, 9, 14, 23]) for _ in range(dice.randint(1, 5))] + [11]
        options = dict(dice.choice(OPTIONS))
        cases.append(Case(shape, lengths, number, dice.choice([0.3, 0.7, 1.0]), dice.choice([1, 4]), options))
    return cases


CASES = [
    *_random_cases(),
    Case("dflash", [5, 9], 20, options={"terms": LossTerms(hard_labels=True)}),
    Case("dflash-causal-reduced", [5, 9], 21, options={"terms": LossTerms(hard_labels=True)}),
    # Ranks without a block, one block in all, and none anywhere.
    Case("dspark", [17], 22, trained=1.0, options={"anchors_per_seq": 1}),
    Case("dflash-window", [17], 23, trained=1.0, options={"anchors_per_seq": 1}),
    Case("dspark-reduced-window", [9, 3], 24, trained=0.0),
    Case("dflash", [9, 3], 25, trained=0.0),
]


@pytest.fixture(scope="module")
def references():
    """Loss and gradients of each case from the dense reference."""
    found = []
    for case in CASES:
        cfg = SHAPES[case.shape]
        tensors = make_tensors(cfg, case.seed)
        leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}
        pack = make_pack(case.lengths, seed=case.seed, trained=case.trained)
        settings = make_objective(_Shape(cfg), **case.options)
        dense = dense_loss(cfg, leaves, pack, settings, case.draw)
        if dense.targets.mask.any():
            dense.loss.backward()
        zeros = {n: torch.zeros_like(t) for n, t in leaves.items()}
        found.append((dense.loss.detach(), {n: zeros[n] if t.grad is None else t.grad for n, t in leaves.items()}))
    return found


class _Shape:
    """What the objective's settings need of a draft."""

    def __init__(self, cfg):
        self.cfg = cfg


@pytest.fixture(scope="module")
def seen(ranks):
    """What rank 0 saw of the cases, by layout."""
    return {layout: ranks(4).run(run_cases, CASES, *layout, timeout=240)[0] for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_equal_dense(seen, references, layout):
    for case, got, (loss, gradients) in zip(CASES, seen[layout], references, strict=True):
        torch.testing.assert_close(got.loss, loss, rtol=0, atol=1e-10, msg=f"{case}: loss")
        for name, gradient in got.gradients.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-10, msg=f"{case}: {name}")


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_metrics_and_blocks_are_those_of_one_rank(seen, layout):
    for case, mine, theirs in zip(CASES, seen[layout], seen[1, 1], strict=True):
        torch.testing.assert_close(mine.sums, theirs.sums, rtol=0, atol=1e-9, msg=str(case))
        assert sum(mine.blocks) == theirs.blocks[0], case


def test_there_were_ranks_without_a_block(seen):
    assert any(0 in each.blocks and sum(each.blocks) for each in seen[4, 1])
