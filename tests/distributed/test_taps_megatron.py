"""Megatron's own schedules over a tiny policy: what lands on the last stage, and that the policy notices nothing."""

import pytest
import torch

from tests.distributed import taps_megatron_ranks as ranks_code
from tests.fixtures_models import policy_config, policy_tensors

TAPS = (0, 3, 7)
LAYOUTS = {
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "pp2 vpp4": {"pp": 2, "vpp": 4},
    "pp4 vpp2": {"pp": 4, "vpp": 2},
    "pp2 cp2": {"pp": 2, "cp": 2},
    "pp2 tp2": {"pp": 2, "tp": 2},
    "pp2 tp2 sp": {"pp": 2, "tp": 2},
}


def world(sizes: dict) -> int:
    return sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.get("tp", 1)


def options_of(layout: str) -> dict:
    return {"sequence_parallel": True} if layout.endswith(" sp") else {}


@pytest.fixture(scope="module")
def policy():
    config = policy_config(num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2)
    return config, policy_tensors(config)


@pytest.fixture(scope="module")
def packs():
    """Eight microbatches of one to three sequences, all of different lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = [[5, 9], [17], [3, 4, 8], [30], [2, 21], [11], [1, 1, 6], [13, 12]]
    return [[torch.randint(3, 64, (n,), generator=generator) for n in pack] for pack in lengths]


@pytest.fixture(scope="module")
def reference(ranks, policy, packs):
    """`reference(layout)`: what plain hooks see without stages, by rank."""
    made = {}

    def of(layout: str):
        sizes = {key: n for key, n in LAYOUTS[layout].items() if key in ("cp", "tp")}
        key = (*sizes.items(), *options_of(layout))
        if key not in made:
            made[key] = ranks(world(sizes)).run(
                ranks_code.plain_capture, *policy, packs, sizes, TAPS, options_of(layout)
            )
        return made[key]

    return of


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_microbatch_lands_as_without_stages_and_the_policy_notices_nothing(
    ranks, policy, packs, reference, layout, recompute
):
    sizes, options = LAYOUTS[layout], {**options_of(layout), "recompute": recompute}
    pool = ranks(world(sizes))
    tapped = pool.run(ranks_code.tapped_step, *policy, packs, sizes, TAPS, "auto", options)
    plain = pool.run(ranks_code.tapped_step, *policy, packs, sizes, TAPS, ranks_code.OFF, options)
    assert [digest for _, digest, _ in tapped] == [digest for _, digest, _ in plain]

    wanted = reference(layout)
    first_of_last_stage = world(sizes) - len(wanted)
    for rank, (landed, _, stats) in enumerate(tapped):
        assert stats.credit_wait_s < 0.5
        if rank < first_of_last_stage:
            assert landed == []
            continue
        assert len(landed) == len(packs)
        for got, want in zip(landed, wanted[rank - first_of_last_stage], strict=True):
            for got_rows, want_rows in zip(got, want, strict=True):
                assert torch.equal(got_rows, want_rows)


@pytest.mark.parametrize("transport", ["p2p", "nixl"])
@pytest.mark.parametrize("layout", ["pp4", "pp2 vpp2"])
def test_the_other_transports(ranks, policy, packs, reference, layout, transport):
    sizes = LAYOUTS[layout]
    *_, (landed, _, _) = ranks(world(sizes)).run(
        ranks_code.tapped_step, *policy, packs, sizes, TAPS, transport, {"recompute": True}
    )
    (wanted,) = reference(layout)
    for got, want in zip(landed, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_taps_on_some_stages_only(ranks, policy, packs, reference):
    """Stages 1 and 2 of 4 have no tap and send nothing."""
    results = ranks(4).run(ranks_code.tapped_step, *policy, packs, {"pp": 4}, (0, 7), "auto", {})
    rows = 2 * sum(sum(-(-len(tokens) // 2) * 2 for tokens in pack) for pack in packs)
    assert [stats.sent_bytes for _, _, stats in results] == [rows * 64 * 4, 0, 0, 0]
    (wanted,) = reference("pp4")
    for (taps, _, _), (want, _, _) in zip(results[3][0], wanted, strict=True):
        assert torch.equal(taps, torch.cat([want[:, :64], want[:, 128:]], dim=-1))


def test_evaluation_through_the_same_forward_step(ranks, policy, packs):
    for hooked, landed in ranks(2).run(ranks_code.evaluation, *policy, packs, {"pp": 2}, TAPS):
        assert not hooked and landed == [None] * len(packs)


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_a_stage_that_dies_in_the_schedule_is_named_by_all_others(ranks, policy, packs, culprit, tmp_path):
    outcomes = ranks(4).outcomes(
        ranks_code.killed_in_a_schedule, *policy, packs, {"pp": 4}, (0, 7), culprit, str(tmp_path), timeout=240.0
    )
    for rank, outcome in enumerate(outcomes):
        if rank == culprit:
            assert "died" in str(outcome)
        elif isinstance(outcome, tuple):
            assert outcome[0] == "StageLost" and f"stage {culprit} (process" in outcome[1]
        else:
            # It was waiting for a live stage in gloo, which nothing interrupts: the monitor ended it.
            assert f"nemo_ext.taps: stage {culprit} (process" in (tmp_path / str(rank)).read_text()
