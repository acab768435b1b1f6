"""The figures of `nemo-ext bench taps`, from what its ranks measured."""

import os
import platform
import statistics
from dataclasses import dataclass

import torch

from nemo_ext.taps.trace import Span

# Way -> (how taps travel, whether the draft trains).
WAYS: dict[str, tuple[str, bool]] = {
    "policy": ("none", False),
    "taps": ("channel", False),
    "blocking": ("blocking", False),
    "cotrain": ("channel", True),
    "blocking_cotrain": ("blocking", True),
}


@dataclass(frozen=True)
class BenchSize:
    """What is trained. `tokens` of each of `microbatches`; `passes` of the draft; `transport` of the channel."""

    hf_config: dict
    tap_layers: tuple[int, ...]
    pp: int
    microbatches: int
    tokens: int
    passes: int
    transport: str


@dataclass
class StepTimes:
    """Of one step on one rank, in seconds; `channel` is empty for ways without one."""

    step: float
    cpu: float
    forward: float
    backward: float
    channel: dict
    spans: dict[str, list[Span]]


def measure(size: BenchSize, ranks: list[dict], repeats: int) -> dict:
    """All figures of one run, as they are printed by `--json`."""
    seconds = {
        way: [max(rank["steps"][way][n].step for rank in ranks) for n in range(repeats)] for way in ranks[0]["steps"]
    }
    best, middle = {w: min(s) for w, s in seconds.items()}, {w: statistics.median(s) for w, s in seconds.items()}
    cpu = {way: min(sum(rank["steps"][way][n].cpu for rank in ranks) for n in range(repeats)) for way in seconds}
    last, sources = ranks[-1], ranks[:-1]

    def over(way: str, base: str) -> dict:
        return {
            "ratio": best[way] / best[base],
            "median_ratio": middle[way] / middle[base],
            "cpu_ratio": cpu[way] / cpu[base],
        }

    def best_of(way: str, read) -> float:
        return min(read(step) for step in last["steps"][way])

    computed = {w: best_of(w, lambda step: step.forward + step.backward) for w in ("policy", "taps", "cotrain")}
    sent = sum(rank["steps"]["cotrain"][-1].channel["sent_bytes"] for rank in ranks) / size.microbatches
    width = size.hf_config["hidden_size"] * 4
    moved = sum(layer < size.hf_config["num_hidden_layers"] * (size.pp - 1) // size.pp for layer in size.tap_layers)
    bound = moved * size.tokens * width + last["embedding_rows"] * width
    return {
        "setup": {
            "pp": size.pp, "microbatches": size.microbatches, "tokens": size.tokens,
            "layers": size.hf_config["num_hidden_layers"], "hidden": size.hf_config["hidden_size"],
            "tap_layers": list(size.tap_layers), "moved_taps": moved, "passes": size.passes, "repeats": repeats,
            "transport": last["transports"], "torch": torch.__version__, "machine": platform.machine(),
            "cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1),
        },
        "step_seconds": {way: {"best": best[way], "median": middle[way], "cpu": cpu[way]} for way in seconds},
        "taps_over_policy": {"goal": 1.03} | over("taps", "policy"),
        "blocking_over_policy": over("blocking", "policy"),
        "cotrain_over_policy": over("cotrain", "policy") | {
            "added_seconds": best["cotrain"] - best["policy"],
            "draft_compute_seconds": computed["cotrain"] - computed["policy"],
            "tap_wait_seconds": best_of("cotrain", lambda step: step.channel["tap_wait_s"]),
        },
        "blocking_cotrain_over_policy": over("blocking_cotrain", "policy"),
        "bytes_per_microbatch": {
            "goal": 1.0, "ratio": sent / bound, "sent": sent,
            "bound": bound,  # k * s * h * b + (s + halo) * h * b, for the k taps that leave their stage
        },
        "waits_per_step": {
            way: {
                "last_stage_for_taps": best_of(way, lambda step: step.channel["tap_wait_s"]),
                "sources_for_credit": max(min(s.channel["credit_wait_s"] for s in r["steps"][way]) for r in sources),
                "hooks_writing": max(min(s.channel["write_s"] for s in r["steps"][way]) for r in sources),
            }
            for way in ("taps", "cotrain")
        },
    }  # fmt: skip


def trace_rows(ranks: list[dict]) -> list[tuple[str, str, list[Span]]]:
    """The fastest step of each way, each from time 0, as rows of a trace."""
    rows = []
    for way in ranks[0]["steps"]:
        steps = [rank["steps"][way] for rank in ranks]
        fastest = min(range(len(steps[0])), key=lambda n: max(step[n].step for step in steps))
        start = min(span.start for step in steps for span in step[fastest].spans["schedule"])
        for stage, step in enumerate(steps):
            for row, spans in step[fastest].spans.items():
                moved = [Span(span.name, span.start - start, span.end - start, span.details) for span in spans]
                if moved:
                    rows.append((way, f"stage {stage}: {row}", moved))
    return rows
