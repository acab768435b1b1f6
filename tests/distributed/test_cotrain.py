"""The joint step on gloo ranks: the same draft for every layout, and a policy that the draft cannot touch."""

import copy
from dataclasses import replace

import pytest
import torch

from nemo_ext.local.batch import StepPlan
from tests.distributed.cotrain_cases import BLOCKS, GRPO, assert_same, make_batches, run, save_models, settings
from tests.distributed.cotrain_ranks import resumed_steps


@pytest.fixture(scope="module")
def one_rank(ranks):
    return ranks(1)


@pytest.fixture(scope="module")
def two_ranks(ranks):
    return ranks(2)


@pytest.fixture(scope="module")
def four_ranks(ranks):
    return ranks(4)


@pytest.fixture(scope="module")
def eight_ranks(ranks):
    return ranks(8)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Folders of a random policy and of drafts for it."""
    return save_models(tmp_path_factory.mktemp("start"), key_heads=2)


@pytest.fixture(scope="module")
def batches():
    return make_batches()


@pytest.fixture(scope="module")
def references(one_rank, start, batches):
    """One rank, one microbatch a sample group; by draft folder and temperature."""
    return {
        key: run(one_rank, start, batches, draft=key[0], temperature=key[1])
        for key in (("draft", 1.0), ("reduced", 0.7), *BLOCKS.items())
    }


CASES = [("draft", 1.0), ("reduced", 0.7)]


@pytest.mark.parametrize(("draft", "temperature"), CASES)
@pytest.mark.parametrize("sp", [False, True])
def test_tp2_equals_tp1(two_ranks, start, batches, references, draft, temperature, sp):
    got = run(two_ranks, start, batches, draft=draft, temperature=temperature, tp=2, sp=sp)
    assert_same(got, references[draft, temperature])


@pytest.mark.parametrize(("draft", "temperature"), CASES)
def test_dp2_equals_dp1(two_ranks, start, batches, references, draft, temperature):
    got = run(two_ranks, start, batches, draft=draft, temperature=temperature, dp=2)
    assert_same(got, references[draft, temperature])


def test_tp2_dp2_equals_one_rank(four_ranks, start, batches, references):
    got = run(four_ranks, start, batches, draft="reduced", temperature=0.7, tp=2, dp=2)
    assert_same(got, references["reduced", 0.7])


@pytest.mark.parametrize(("draft", "temperature"), CASES)
@pytest.mark.parametrize("packed", [True, False])
def test_cp2_equals_cp1(two_ranks, start, batches, references, draft, temperature, packed):
    residency = "ring" if packed else "resident"
    got = run(two_ranks, start, batches, draft=draft, temperature=temperature, cp=2, packed=packed, residency=residency)
    assert_same(got, references[draft, temperature])


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 4},
        {"cp": 2, "tp": 2},
        {"cp": 2, "dp": 2},
        {"cp": 2, "tp": 2, "sp": True, "recompute": True, "residency": "ring"},
    ],
)
def test_four_ranks_with_cp_equal_one(four_ranks, start, batches, references, layout):
    got = run(four_ranks, start, batches, draft="reduced", temperature=0.7, **layout)
    assert_same(got, references["reduced", 0.7])


PIPELINES = [{"pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2, "recompute": True, "packed": False}]


@pytest.mark.parametrize("layout", PIPELINES)
def test_pipeline_of_two_equals_one_rank(two_ranks, start, batches, references, layout):
    got = run(two_ranks, start, batches, draft="reduced", temperature=0.7, **layout)
    assert_same(got, references["reduced", 0.7])


@pytest.mark.parametrize("layout", [{"pp": 4}, {"pp": 2, "cp": 2}, {"pp": 2, "tp": 2, "sp": True}, {"pp": 2, "dp": 2}])
def test_pipelines_on_four_ranks_equal_one_rank(four_ranks, start, batches, references, layout):
    got = run(four_ranks, start, batches, draft="reduced", temperature=0.7, **layout)
    assert_same(got, references["reduced", 0.7])


@pytest.mark.parametrize("layout", [{"packed": False}, {"mb_tokens": 1000}, {"mb_tokens": 1}])
def test_microbatches_and_padding_change_nothing(one_rank, start, batches, references, layout):
    assert_same(run(one_rank, start, batches, **layout), references["draft", 1.0])


def test_recompute_changes_no_bit(one_rank, start, batches, references):
    got, want = run(one_rank, start, batches, recompute=True), references["draft", 1.0]
    assert got.digests == want.digests
    assert all(torch.equal(got.weights[name], t) for name, t in want.weights.items())


@pytest.mark.parametrize("draft", BLOCKS)
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "sp": True},
        {"dp": 2},
        {"cp": 2},
        {"cp": 2, "packed": False, "recompute": True},
        {"pp": 2},
        {"pp": 2, "vpp": 2},
    ],
)
def test_a_block_draft_on_two_ranks_equals_one(two_ranks, start, batches, references, draft, layout):
    got = run(two_ranks, start, batches, draft=draft, temperature=BLOCKS[draft], **layout)
    assert_same(got, references[draft, BLOCKS[draft]])


@pytest.mark.parametrize("draft", BLOCKS)
@pytest.mark.parametrize("layout", [{"cp": 4}, {"cp": 2, "pp": 2}])
def test_a_block_draft_on_four_ranks_equals_one(four_ranks, start, batches, references, draft, layout):
    got = run(four_ranks, start, batches, draft=draft, temperature=BLOCKS[draft], **layout)
    assert_same(got, references[draft, BLOCKS[draft]])


@pytest.mark.parametrize("draft", ["dspark"])
def test_tp2_cp2_pp2_equals_one_rank(eight_ranks, start, batches, references, draft):
    got = run(eight_ranks, start, batches, draft=draft, temperature=BLOCKS[draft], tp=2, cp=2, pp=2, sp=True)
    assert_same(got, references[draft, BLOCKS[draft]])


@pytest.mark.parametrize("draft", BLOCKS)
@pytest.mark.parametrize("layout", [{"packed": False}, {"mb_tokens": 1}, {"recompute": True}])
def test_microbatches_and_recompute_leave_a_block_draft_alone(one_rank, start, batches, references, draft, layout):
    """With one sequence each, some microbatches have no anchor at all."""
    got = run(one_rank, start, batches, draft=draft, temperature=BLOCKS[draft], **layout)
    assert_same(got, references[draft, BLOCKS[draft]])


@pytest.mark.parametrize("draft", BLOCKS)
def test_anchors_follow_the_number_of_the_step(one_rank, start, batches, references, draft):
    later = replace(GRPO, number=7)
    got = run(one_rank, start, batches[:1], draft=draft, temperature=BLOCKS[draft], plan=later)
    first = references[draft, BLOCKS[draft]].metrics[0]
    assert got.metrics[0]["draft_rows_per_slot"][0] == first["draft_rows_per_slot"][0]
    assert abs(got.metrics[0]["draft_loss"] - first["draft_loss"]) > 1e-3


@pytest.fixture(scope="module")
def without_draft(ranks_of, start, batches):
    """Steps of a policy alone, by layout; each layout runs once."""
    seen = {}

    def steps(layout):
        key = tuple(layout.items())
        if key not in seen:
            seen[key] = run(ranks_of(layout), start, batches, draft=None, enabled=False, **layout)
        return seen[key]

    return steps


LAYOUTS = [{}, {"tp": 2}, {"dp": 2}, {"cp": 2}, *PIPELINES, {"packed": False}, {"recompute": True}]


@pytest.mark.parametrize(
    ("draft", "layout"),
    [
        *(("draft", layout) for layout in LAYOUTS),
        *((draft, layout) for draft in BLOCKS for layout in ({}, {"tp": 2}, {"dp": 2}, {"cp": 2}, {"pp": 2, "vpp": 2})),
    ],
)
def test_policy_digests_are_bitwise_those_without_a_draft(ranks_of, start, batches, without_draft, draft, layout):
    with_draft, without = run(ranks_of(layout), start, batches, draft=draft, **layout), without_draft(layout)
    assert with_draft.digests == without.digests
    assert len(set(without.digests)) == len(batches)  # the policy does move
    assert all(m["grad_norm"] == w["grad_norm"] for m, w in zip(with_draft.metrics, without.metrics, strict=True))


@pytest.fixture(scope="module")
def ranks_of(one_rank, two_ranks):
    return lambda layout: two_ranks if 2 in layout.values() else one_rank


@pytest.mark.parametrize(
    ("draft", "layout"),
    [*(("reduced", layout) for layout in ({}, {"tp": 2}, {"pp": 2})), ("dflash", {"tp": 2}), ("dspark", {"pp": 2})],
)
def test_resume_continues_bitwise(ranks_of, start, batches, tmp_path, draft, layout):
    kind = draft if draft in BLOCKS else "eagle3"
    args = (
        settings(kind=kind, **layout),
        start["policy"],
        start[draft],
        copy.deepcopy(batches),
        GRPO,
        str(tmp_path),
        2,
    )
    straight, resumed = next(each for each in ranks_of(layout).run(resumed_steps, *args) if each is not None)
    assert resumed[0] == straight[0]
    assert resumed[1].keys() == straight[1].keys()
    assert all(torch.equal(resumed[1][name], t) for name, t in straight[1].items())


@pytest.mark.parametrize(
    ("draft", "layout"), [("draft", {}), ("draft", {"pp": 2}), ("dflash", {}), ("dflash", {"pp": 2})]
)
def test_draft_alone_learns_and_leaves_the_policy(ranks_of, start, batches, draft, layout):
    got = run(
        ranks_of(layout), start, batches[:1] * 3, draft=draft, **layout, plan=StepPlan("supervised", train_policy=False)
    )
    assert len(set(got.digests)) == 1
    losses = [m["draft_loss"] for m in got.metrics]
    assert losses[0] > losses[1] > losses[2]
