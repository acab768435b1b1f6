"""`nemo-ext bench ring` on small work: what it counts is exact, and arguments that cannot run are refused."""

import json

import pytest
import torch

from nemo_ext.attention import bench
from nemo_ext.attention.measure import Work
from nemo_ext.config import ConfigError

TOKENS, CP, HEADS, DIM = 2048, 2, 2, 16
ROWS = TOKENS // CP
SHARD = 2 * ROWS * DIM * 4  # bytes of one rank's keys and values


@pytest.fixture(scope="module")
def figures():
    work = Work(TOKENS, heads=HEADS, key_heads=1, head_dim=DIM, dtype=torch.float32)
    return bench.measure(work, CP, repeats=1, ways=["ring", "gather", "dense"])


def test_bytes_are_counted(figures):
    sent, ways = figures["bytes_over_bound"], figures["ways"]
    assert sent["forward_bytes"] == sent["forward_bound"] == (CP - 1) * SHARD
    assert sent["backward_bytes"] == sent["backward_bound"] == 2 * (CP - 1) * SHARD
    assert ways["ring"]["sent_bytes"] == 3 * (CP - 1) * SHARD
    assert ways["gather"]["sent_bytes"] == ways["dense"]["sent_bytes"] == 2 * (CP - 1) * SHARD


def test_peaks_are_counted(figures):
    ways, peak = figures["ways"], figures["peak_over_floor"]
    own = ROWS * HEADS * 4 * (4 * DIM + 1) + 2 * SHARD
    assert peak["floor"] == own + 2 * SHARD
    assert peak["bytes"] == ways["ring"]["peak_bytes"] > own
    mask = ROWS * TOKENS * (1 + 4)
    assert ways["ring"]["peak_bytes"] < mask < ways["dense"]["peak_bytes"]


def test_work_is_balanced(figures):
    for pack in ("one sequence", "ragged pack"):
        assert list(figures["flops_max_over_mean"][pack]) == ["cp 2", "cp 4", "cp 8", "cp 16", "cp 32", "cp 64"]
        assert all(1.0 <= ratio <= 1.02 for ratio in figures["flops_max_over_mean"][pack].values())


def test_a_dense_mask_too_large_is_not_run(figures, monkeypatch):
    monkeypatch.setattr(bench, "DENSE_LIMIT", 1 << 20)
    monkeypatch.setattr(bench, "_one_rank", lambda *_: [(1.0, 1.0), (1.0, 1.0)])
    ran = []

    def on_ranks(work, ways, repeats, cp):
        ran.extend(ways)
        return {way: [bench.Measure(1.0, 1.0, 1, 1, 1)] for way in ways}

    monkeypatch.setattr(bench, "_on_ranks", on_ranks)
    work = Work(TOKENS, heads=HEADS, key_heads=1, head_dim=DIM, dtype=torch.float32)
    skipped = bench.measure(work, CP, repeats=1, ways=["ring", "dense"])
    assert ran == ["ring"]
    assert skipped["ways"]["dense"] == {"not_run": "its mask alone is 0.0 GiB a rank"}


def test_prints(figures, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda *_: figures)
    assert bench.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == figures
    assert bench.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2048 tokens, 2 ranks of one thread")
    assert [line.split()[0] for line in lines[-3:]] == ["ring", "gather", "dense"]


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--tokens", "30", "--cp", "4"], "--tokens is 30 and --cp 4; use 2 or more ranks and a multiple of 2 x ranks"),
        (["--cp", "1"], "--tokens is 16384 and --cp 1; use 2 or more ranks"),
        (["--heads", "3", "--key-heads", "2"], "--heads is 3, --key-heads 2 and --head-dim 32; use numbers from 1 up"),
        (["--ways", "dense"], "--ways is dense; use ring, and after it any of gather, dense"),
        (["--ways", "ring,flash"], "--ways is ring,flash; use ring, and after it any of gather, dense"),
        (["--tokens", "many"], "argument --tokens: invalid int value: 'many'; see nemo-ext bench ring --help"),
    ],
)
def test_refused_arguments(arguments, told):
    with pytest.raises(ConfigError) as error:
        bench.main(arguments)
    assert str(error.value).startswith(told)
