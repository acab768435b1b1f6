"""`nemo-ext bench taps` at its smallest: its figures, trace and picture."""

import json

import pytest

from nemo_ext.config import ConfigError
from nemo_ext.local import bench_taps

SMALL = ["--layers", "4", "--hidden", "64", "--tokens", "32", "--microbatches", "3", "--repeats", "1"]


def test_figures_trace_and_picture(capsys, tmp_path):
    trace, picture = tmp_path / "out.json", tmp_path / "out.png"
    assert bench_taps.main([*SMALL, "--json", "--trace", str(trace), "--picture", str(picture)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["step_seconds"]) == {"policy", "taps", "blocking", "cotrain", "blocking_cotrain"}
    assert figures["setup"]["tap_layers"] == [0, 1, 3] and figures["setup"]["moved_taps"] == 2
    # Two taps of layers on stage 0, and the embedding; float32, no halo without context parallelism.
    assert figures["bytes_per_microbatch"]["sent"] == figures["bytes_per_microbatch"]["bound"] == 3 * 32 * 64 * 4
    assert figures["cotrain_over_policy"]["draft_compute_seconds"] > 0

    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert {"stage 0: schedule", "stage 1: schedule", "stage 0: taps", "stage 1: draft"} <= names
    spans = [event for event in events if event["ph"] == "X"]
    processes = {event["pid"] for event in spans}
    for process in processes:
        rows = [event["name"] for event in spans if event["pid"] == process]
        for name in ("forward", "backward"):
            assert sorted(row for row in rows if row.startswith(name)) == sorted(
                f"{name} {n}" for n in (0, 0, 1, 1, 2, 2)
            )
    assert sum(event["name"] == "write" for event in spans) == 2 * 3 * 3
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--pp", "1"], "--pp is 1"),
        (["--layers", "7"], "--layers 7"),
        (["--hidden", "100"], "--hidden is 100; use a multiple of 64"),
        (["--nothing"], "--nothing"),
    ],
)
def test_arguments_that_cannot_be_run(arguments, told):
    with pytest.raises(ConfigError, match=told):
        bench_taps.main(arguments)
