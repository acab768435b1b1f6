"""Drafts with fewer key heads than tensor-parallel ranks: several ranks share a head, and train what one rank does."""

import copy

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.cotrain_cases import (
    BLOCKS,
    GRPO,
    LATER_TOLERANCE,
    assert_same,
    make_batches,
    run,
    save_models,
    settings,
)
from tests.distributed.cotrain_ranks import resumed_steps, whole_tensors

DRAFTS = {"reduced": 0.7, **BLOCKS}  # with the temperature that they are compared at
# Adam divides by an entry's own size: a larger epsilon keeps entries near zero from turning rounding into whole steps.
EPS = 1e-4


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """By the drafts' key heads, a policy of 4 key heads and drafts for it."""
    return {n: save_models(tmp_path_factory.mktemp("start"), key_heads=4, draft_key_heads=n) for n in (1, 2)}


@pytest.fixture(scope="module")
def batches():
    return make_batches()[:2]


@pytest.fixture(scope="module")
def reference(ranks, starts, batches):
    """One rank's steps, by draft, key heads and clip; each runs once."""
    seen = {}

    def steps(draft, key_heads, clip=1e9):
        key = (draft, key_heads, clip)
        if key not in seen:
            options = {"temperature": DRAFTS[draft], "eps": EPS, "clip": clip}
            seen[key] = run(ranks(1), starts[key_heads], batches, draft=draft, **options)
        return seen[key]

    return steps


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    ("key_heads", "world", "layout"),
    [
        (1, 2, {"tp": 2, "sp": True}),
        (1, 4, {"tp": 4}),
        (2, 4, {"tp": 4, "packed": False, "recompute": True}),
        (1, 4, {"tp": 2, "cp": 2, "sp": True, "residency": "resident"}),
        (1, 4, {"tp": 2, "cp": 2, "recompute": True, "residency": "ring"}),
        (1, 4, {"tp": 2, "pp": 2}),
    ],
)
def test_a_shared_head_trains_as_one_rank_does(ranks, starts, batches, reference, draft, key_heads, world, layout):
    options = {"temperature": DRAFTS[draft], "eps": EPS, **layout}
    got, want = run(ranks(world), starts[key_heads], batches, draft=draft, **options), reference(draft, key_heads)
    assert_same(got, want)
    drafts = [name for name in want.weights if name.startswith("draft.")]
    assert drafts
    for name in drafts:
        torch.testing.assert_close(got.weights[name], want.weights[name], atol=LATER_TOLERANCE, rtol=0, msg=name)


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_clip_is_one_ranks(ranks, starts, batches, reference, draft):
    got = run(ranks(4), starts[2], batches, draft=draft, temperature=DRAFTS[draft], eps=EPS, tp=4, clip=0.1)
    assert min(step["draft_grad_norm"] for step in got.metrics) > 0.2
    assert_same(got, reference(draft, 2, clip=0.1))


@pytest.mark.parametrize("draft", DRAFTS)
def test_copies_stay_the_same_bits(ranks, starts, batches, draft):
    kind = draft if draft in BLOCKS else "eagle3"
    args = (settings(kind=kind, tp=4), starts[2]["policy"], starts[2][draft], copy.deepcopy(batches), GRPO)
    first, *others = ranks(4).run(whole_tensors, *args)
    assert {"k_proj", "v_proj"} <= {part for name, _ in first for part in name.split(".")}
    for other in others:
        for (name, mine), (_, theirs) in zip(first, other, strict=True):
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("draft", DRAFTS)
def test_loaded_weights_are_exported_bit_for_bit(ranks, starts, draft):
    got = run(ranks(4), starts[2], [], draft=draft, tp=4)
    for name, tensor in load_file(f"{starts[2][draft]}/model.safetensors").items():
        assert torch.equal(got.weights[f"draft.{name}"], tensor), name


@pytest.mark.parametrize("draft", ["reduced", "dspark"])
def test_resume_continues_bitwise(ranks, starts, batches, tmp_path, draft):
    kind = draft if draft in BLOCKS else "eagle3"
    args = (settings(kind=kind, tp=4), starts[2]["policy"], starts[2][draft], copy.deepcopy(batches), GRPO)
    straight, resumed = next(each for each in ranks(4).run(resumed_steps, *args, str(tmp_path), 1) if each is not None)
    assert resumed[0] == straight[0]
    assert resumed[1].keys() == straight[1].keys()
    assert all(torch.equal(resumed[1][name], t) for name, t in straight[1].items())
