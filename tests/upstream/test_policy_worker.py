"""Upstream's own `train`, run on CPU ranks, with the draft riding along."""

import json
from pathlib import Path

import pytest
import torch

from tests.upstream import worker_ranks
from tests.upstream.folders import block_folder, draft_folder, policy_folder

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 64}}
UNPACKED = {"sequence_packing": {"enabled": False}}
DYNAMIC = UNPACKED | {"dynamic_batching": {"enabled": True, "train_mb_tokens": 64, "sequence_length_round": 4}}
# fp32 sums in another order, two Adam steps of lr 1e-4 on weights of order 0.1.
WEIGHTS = {"rtol": 0, "atol": 2e-6}
# Total variation has a gradient that jumps, so that more of the rounding shows.
BLOCK_WEIGHTS = {"rtol": 0, "atol": 5e-6}
METRICS = {"rtol": 2e-4, "atol": 2e-5}


def settings(policy, divisible=1, **more):
    return policy | {"make_sequence_length_divisible_by": divisible, "max_total_sequence_length": 32} | more


def draft_of(folder, **more):
    # With Adam's usual epsilon the rounding of a gradient near zero would move its weight by a part of a whole step.
    base = {"enabled": True, "engine": "nemo_ext", "model_name": folder, "loss_weight": 0.5, "ttt_steps": 3}
    return base | {"optimizer": {"adam_eps": 1e-5}} | more


@pytest.fixture(scope="module")
def alone(ranks, folders):
    """One rank, packed: what every other layout is compared with."""
    policy, draft = folders
    return ranks(1).run(worker_ranks.train, policy, draft_of(draft), {}, settings(PACKED), {}, timeout=240)[0]


def test_the_draft_learns_and_tells_its_metrics(alone):
    first, second = alone.metrics
    assert second["draft_loss"] < first["draft_loss"]
    assert first["draft_grad_norm"] > 0
    assert {"draft_loss_per_pass_1", "draft_acceptance_per_pass_3", "draft_expected_accepted_length"} <= set(first)


def test_the_policy_is_bitwise_that_of_a_run_without_a_draft(ranks, folders, alone):
    policy, _ = folders
    off = ranks(1).run(
        worker_ranks.train, policy, {"enabled": False}, {}, settings(PACKED), {"kind": "upstream"}, timeout=240
    )[0]
    assert (alone.digest, alone.grad_norms, alone.losses) == (off.digest, off.grad_norms, off.losses)


LAYOUTS = {
    "unpacked": (1, {}, settings(UNPACKED)),
    "dynamic batches": (1, {}, settings(DYNAMIC)),
    "one sequence a microbatch": (1, {}, settings(UNPACKED, train_micro_batch_size=1)),
    "recompute": (1, {"recompute": True}, settings(PACKED)),
    "data parallel": (2, {}, settings(PACKED)),
    "tensor and sequence parallel": (2, {"tp": 2, "sp": True}, settings(PACKED, 2)),
    "tensor and sequence parallel, unpacked": (2, {"tp": 2, "sp": True}, settings(UNPACKED, 2)),
    "context parallel": (2, {"cp": 2}, settings(PACKED, 4)),
    "pipeline": (2, {"pp": 2}, settings(PACKED)),
    "pipeline, unpacked": (2, {"pp": 2}, settings(UNPACKED)),
    "pipeline and context parallel": (4, {"pp": 2, "cp": 2}, settings(PACKED, 4)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_the_same_draft(ranks, folders, alone, name):
    policy, draft = folders
    world, sizes, config = LAYOUTS[name]
    dp = world // (sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("pp", 1))
    seen = ranks(world).run(worker_ranks.train, policy, draft_of(draft), sizes, config, {"dp": dp}, timeout=400)
    assert_same_training(seen, alone, world // dp, WEIGHTS)


def assert_same_training(seen, alone, tellers, close):
    """All ranks have the draft of `alone`, and so many of them its metrics."""
    for one in seen:
        assert one.draft.keys() == alone.draft.keys()
        for tensor, tensor_alone in zip(one.draft.values(), alone.draft.values(), strict=True):
            torch.testing.assert_close(tensor, tensor_alone, **close)
    # Data-parallel ranks other than the first tell nothing, for NeMo-RL sums over them.
    told = [one.metrics for one in seen if one.metrics[0]["draft_loss"]]
    assert len(told) == tellers
    for metrics in told:
        for step, step_alone in zip(metrics, alone.metrics, strict=True):
            assert step == pytest.approx(step_alone, rel=METRICS["rtol"], abs=METRICS["atol"])


@pytest.fixture(scope="module")
def blocks(ranks, folders, tmp_path_factory):
    """`blocks(kind)`: settings of a block draft, and what one rank makes of it."""
    made = {}

    def train(kind):
        if kind not in made:
            folder = block_folder(tmp_path_factory.mktemp(kind), kind)
            draft = {"enabled": True, "engine": "nemo_ext", "speculator_type": kind, "model_name": folder}
            draft |= {"loss_weight": 0.5, "anchors_per_seq": 6}
            made[kind] = (
                draft,
                ranks(1).run(worker_ranks.train, folders[0], draft, {}, settings(PACKED), {}, timeout=240)[0],
            )
        return made[kind]

    return train


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_draft_trains_beside_an_untouched_policy(blocks, alone, kind):
    _, seen = blocks(kind)
    assert {"draft_loss_per_slot_1", "draft_acceptance_per_slot_3", "draft_expected_accepted_length"} <= set(
        seen.metrics[0]
    )
    assert (seen.digest, seen.grad_norms, seen.losses) == (alone.digest, alone.grad_norms, alone.losses)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_draft_learns(ranks, folders, blocks, kind):
    draft, _ = blocks(kind)
    # Of one batch, and from all its anchors, so that the steps can be compared.
    draft = draft | {"anchors_per_seq": 512, "optimizer": {"lr": 1e-3}}
    options = {"steps": 4, "same": True}
    seen = ranks(1).run(worker_ranks.train, folders[0], draft, {}, settings(PACKED), options, timeout=240)[0]
    losses = [metrics["draft_loss"] for metrics in seen.metrics]
    assert losses[3] < losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dflash", "unpacked"),
        ("dflash", "context parallel"),
        ("dspark", "dynamic batches"),
        ("dspark", "data parallel"),
        ("dspark", "tensor and sequence parallel"),
        ("dspark", "pipeline"),
        ("dspark", "pipeline and context parallel"),
    ],
)
def test_every_layout_trains_the_same_block_draft(ranks, folders, blocks, kind, name):
    draft, alone = blocks(kind)
    world, sizes, config = LAYOUTS[name]
    dp = world // (sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("pp", 1))
    seen = ranks(world).run(worker_ranks.train, folders[0], draft, sizes, config, {"dp": dp}, timeout=400)
    assert_same_training(seen, alone, world // dp, BLOCK_WEIGHTS)


def test_the_policy_is_bitwise_the_same_in_a_pipeline_too(ranks, folders):
    policy, draft = folders
    run = ranks(2).run
    on = run(worker_ranks.train, policy, draft_of(draft), {"pp": 2}, settings(PACKED), {}, timeout=240)[0]
    off = run(
        worker_ranks.train, policy, {"enabled": False}, {"pp": 2}, settings(PACKED), {"kind": "upstream"}, timeout=240
    )[0]
    assert (on.digest, on.grad_norms, on.losses) == (off.digest, off.grad_norms, off.losses)


def test_a_distributed_optimizer_that_overlaps_trains_the_same_draft_beside_the_same_policy(ranks, folders):
    """Two global batches a call: the second reads embeddings that are still being gathered."""
    policy, draft = folders

    def run(world, settings_of_draft, **options):
        options |= {"gbs": 2, "steps": 2}
        return ranks(world).run(
            worker_ranks.train, policy, settings_of_draft, {}, settings(PACKED), options, timeout=240
        )

    alone = run(1, draft_of(draft))[0]
    on = run(2, draft_of(draft), dp=2, distributed=True)
    assert_same_training(on, alone, 1, WEIGHTS)
    off = run(2, {"enabled": False}, dp=2, distributed=True, kind="upstream")
    assert (on[0].digest, on[0].grad_norms, on[0].losses) == (off[0].digest, off[0].grad_norms, off[0].losses)


def test_every_global_batch_of_a_call_is_a_step_of_the_draft(ranks, folders):
    policy, draft = folders
    seen = ranks(1).run(
        worker_ranks.train, policy, draft_of(draft), {}, settings(PACKED), {"steps": 1, "gbs": 2}, timeout=240
    )[0]
    once = ranks(1).run(worker_ranks.train, policy, draft_of(draft), {}, settings(PACKED), {"steps": 1}, timeout=240)[0]
    moved = [max(float((t - start).abs().max()) for t, start in _moves(draft, one)) for one in (seen, once)]
    # Adam moves no weight by more than about lr a step.
    assert 0.9e-4 < moved[1] < 1.1e-4 and 1.5e-4 < moved[0] < 2.2e-4


def _moves(draft, seen):
    from safetensors.torch import load_file

    start = load_file(Path(draft) / "model.safetensors")
    return [(tensor, start[name.removeprefix("draft.")]) for name, tensor in seen.draft.items()]


def test_a_block_drafts_anchors_go_on_where_they_were(ranks, folders, blocks, tmp_path):
    draft, _ = blocks("dspark")
    for _, _, whole, resumed in ranks(2).run(
        worker_ranks.resume, folders[0], draft, {"pp": 2}, settings(PACKED), str(tmp_path), timeout=400
    ):
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert (tmp_path / "weights" / "draft" / "model.safetensors").is_file()


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "sp": True}, {"pp": 2}], ids=str)
def test_a_checkpoint_has_the_draft_and_resumes_bitwise(ranks, folders, tmp_path, sizes):
    policy, draft = folders
    world = 2 if sizes else 1
    config = settings(PACKED, 2 if "tp" in sizes else 1)
    for saved, restored, whole, resumed in ranks(world).run(
        worker_ranks.resume, policy, draft_of(draft), sizes, config, str(tmp_path), timeout=400
    ):
        assert all(torch.equal(saved[name], restored[name]) for name in saved)
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
        assert any(not torch.equal(saved[name], whole[name]) for name in whole)
    folder = tmp_path / "weights" / "draft"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    tp = sizes.get("tp", 1)
    files = {path.name for path in folder.iterdir()}
    assert files == {"config.json", "model.safetensors", *(f"optimizer_tp{rank}of{tp}.pt" for rank in range(tp))}


def test_one_pass_gives_the_loss_of_upstreams_own_draft(ranks, tmp_path):
    # Upstream taps layers 1, n/2 - 1 and n - 4, whatever it is told, so the policy must be deep enough for three.
    policy = policy_folder(tmp_path / "policy", layers=8)
    draft = draft_folder(tmp_path / "draft", layers=8, taps=[1, 3, 4])
    ours, theirs, apart = ranks(1).run(worker_ranks.upstreams_draft, policy, draft, settings(UNPACKED), timeout=240)[0]
    assert apart and max(apart.values()) == 0
    assert sum(ours["draft_loss"]) == pytest.approx(sum(theirs["draft_loss"]), rel=2e-6)
