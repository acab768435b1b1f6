"""Every transport between real processes: contents, order, lengths, slot reuse, pace; and what goes wrong."""

import os
from pathlib import Path

import pytest
import torch

from tests.distributed import taps_ranks

REMOTE = ("shm", "p2p", "nixl")


@pytest.mark.parametrize("transport", REMOTE)
def test_a_thousand_microbatches_arrive_whole_and_in_order(ranks, transport):
    results = ranks(3).run(taps_ranks.carry, transport, 4, 250)
    for kinds, _ in results:
        assert kinds == {0: transport, 1: transport}
    rows = [one for step in range(4) for one in taps_ranks.lengths(step, 250)]
    row_bytes = taps_ranks.WIDTH * 4
    sent = [sum(stats.sent_bytes for stats in steps) for _, steps in results]
    taps = sum(one.taps for one in rows) * row_bytes
    assert sent == [taps + sum(one.embedding for one in rows) * row_bytes, taps, 0]


def test_one_stage_keeps_its_own_rows(ranks):
    (kinds, stats), *_ = ranks(1).run(taps_ranks.carry, "auto", 4, 250)
    assert kinds == {}
    assert sum(one.sent_bytes for one in stats) == 0


@pytest.mark.parametrize("transport", REMOTE)
def test_bf16(ranks, transport):
    ranks(3).run(taps_ranks.carry, transport, 2, 20, torch.bfloat16)


@pytest.mark.parametrize("transport", REMOTE)
def test_a_slow_draft_holds_the_sources_back(ranks, transport):
    results = ranks(3).run(taps_ranks.carry, transport, 1, 15, torch.float32, (2,), 0.02)
    waits = [stats[0].credit_wait_s for _, stats in results]
    assert waits[0] > 0.05 and waits[1] > 0.05


@pytest.mark.parametrize("transport", REMOTE)
def test_a_slow_source_is_waited_for(ranks, transport):
    results = ranks(3).run(taps_ranks.carry, transport, 1, 15, torch.float32, (1,), 0.02)
    assert results[2][1][0].tap_wait_s > 0.1


@pytest.mark.parametrize("transport", REMOTE)
def test_sources_fill_their_slots_without_waiting(ranks, transport):
    for stats in ranks(3).run(taps_ranks.taken_late, transport):
        assert stats.credit_wait_s == 0


def test_auto_takes_shared_memory_between_processes_of_one_host(ranks):
    for kinds, _ in ranks(3).run(taps_ranks.carry, "auto", 1, 4):
        assert kinds == {0: "shm", 1: "shm"}


@pytest.mark.parametrize("transport", REMOTE)
def test_nothing_stays_open(ranks, transport):
    shared = _shared_memory()
    for before, after in ranks(2).run(taps_ranks.open_and_close, transport, 3):
        assert after == before
    assert _shared_memory() <= shared


# Set-up


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_plans_that_differ_are_an_error_on_every_stage(ranks, culprit):
    changes = {culprit: {"max_rows": 64}}
    for kind, text in ranks(3).run(taps_ranks.set_up, "auto", changes):
        assert kind == "PlanMismatch"
        assert "max_rows is " in text and f"stage {culprit if culprit < 2 else 0} has another tap plan" in text


def test_a_tap_that_no_stage_has_is_an_error_on_every_stage(ranks):
    results = ranks(2).run(taps_ranks.set_up, "auto", {0: {"group": 1}, 1: {"group": 1}})
    assert results == [None, None]  # without virtual stages the group size is nobody's business


@pytest.mark.parametrize("missing_on", [0, 2])
def test_nixl_that_is_not_installed(ranks, missing_on):
    for asked, automatic in ranks(3).run(taps_ranks.without_nixl, missing_on):
        assert asked[0] == "TransportUnavailable"
        assert "policy.draft.tap_transport is nixl, but NIXL is not installed; install nixl-cu12" in asked[1]
        assert automatic is None


def test_transports_that_differ(ranks):
    with pytest.raises(Exception, match="tap_transport is p2p and shm on different stages"):
        ranks(2).run(taps_ranks.two_transports, ["shm", "p2p"])


def test_local_between_processes_is_refused(ranks):
    for kind, text in ranks(2).run(taps_ranks.set_up, "local", {}):
        assert kind == "TransportUnavailable" and "tap_transport is local, but" in text


def test_shared_memory_too_small(ranks):
    changes = {rank: {"max_rows": 10**12} for rank in range(2)}
    for kind, text in ranks(2).run(taps_ranks.set_up, "shm", changes):
        assert kind == "TransportUnavailable" and "/dev/shm has no room for" in text and "tap_transport: p2p" in text


def test_shared_memory_that_is_full_when_it_is_taken(ranks):
    for kind, text in ranks(2).run(taps_ranks.full_memory, "shm"):
        assert kind == "TransportUnavailable" and "No space left on device" in text


# Faults


@pytest.mark.parametrize("transport", REMOTE)
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_stage_that_is_killed(ranks, transport, culprit):
    shared = _shared_memory()
    outcomes = ranks(3).outcomes(taps_ranks.fault, transport, culprit, "killed", timeout=120.0)
    for rank, outcome in enumerate(outcomes):
        if rank == culprit:
            assert "died" in str(outcome)
            continue
        kind, text, seconds = outcome
        assert kind == "StageLost" and f"stage {culprit} (process" in text and "is gone" in text
        assert seconds < 30
    assert _shared_memory() <= shared


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_stage_that_raises_tells_the_others(ranks, culprit):
    outcomes = ranks(3).run(taps_ranks.fault, "shm", culprit, "raises")
    for rank, (kind, text, seconds) in enumerate(outcomes):
        if rank == culprit:
            assert (kind, text) == ("KeyError", "'a trouble of its own'")
        else:
            assert kind == "StageLost" and f"stage {culprit} (" in text and "a trouble of its own" in text
        assert seconds < 30


@pytest.mark.parametrize("transport", REMOTE)
def test_a_source_that_falls_silent(ranks, transport):
    outcomes = ranks(3).run(taps_ranks.fault, transport, 1, "silent")
    kind, text, _ = outcomes[2]
    assert kind == "TapTimeout"
    assert "the tap of layer 1, step 1, microbatch 0, from stage 1: it did not arrive on the last stage" in text


@pytest.mark.parametrize("transport", REMOTE)
def test_a_draft_that_falls_silent(ranks, transport):
    outcomes = ranks(3).run(taps_ranks.fault, transport, 2, "silent")[:2]
    # Both sources wait; the one that gives up first tells the other.
    assert "TapTimeout" in [kind for kind, _, _ in outcomes]
    for kind, text, _ in outcomes:
        assert kind in ("TapTimeout", "StageLost")
        assert "step 1, microbatch" in text and "no slot came free; the credit for message" in text


def test_a_stage_that_hangs_elsewhere_is_ended(ranks, tmp_path):
    outcomes = ranks(3).outcomes(taps_ranks.stuck_beside_a_dead_stage, 1, str(tmp_path), timeout=120.0)
    assert all("died" in str(outcome) for outcome in outcomes)
    for rank in (0, 2):
        words = (tmp_path / str(rank)).read_text()
        assert "nemo_ext.taps: stage 1 (process" in words and "is gone: its process or host died" in words


def test_no_process_is_left(ranks):
    """The last test: pools that failed were stopped, and nothing of theirs runs."""
    ranks(2).run(taps_ranks.carry, "auto", 1, 2)
    tails = {line for path in Path("/proc").glob("[0-9]*/comm") for line in _read(path) if "nemo-ext-taps" in line}
    assert tails == set()


def _shared_memory() -> set[str]:
    """Names in shared memory; Python's own semaphores, of any process on the machine, have one for a moment."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def _read(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
