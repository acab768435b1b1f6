"""Numbers about finished runs: series, quarters, and what the co-trained draft gained over the frozen one."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

Metrics = list[dict[str, Any]]  # one run: a dict for each step
Runs = dict[str, dict[int, Metrics]]  # mode -> seed -> run

MODES = ("none", "frozen", "cotrain")
MODE_NAMES = {"none": "no draft", "frozen": "frozen draft", "cotrain": "co-trained draft"}


def series(metrics: Metrics, key: str) -> tuple[list[int], list[float]]:
    """Steps (from 1) and values, of the steps that have one."""
    pairs = [(m["step"] + 1, m[key]) for m in metrics if m.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def listed(metrics: Metrics, key: str) -> tuple[list[int], list[list[float]]]:
    """The same for keys whose values are lists: steps, and one series for each place of the list."""
    steps, rows = series(metrics, key)
    return steps, [list(column) for column in zip(*rows, strict=True)]


def first_quarter(metrics: Metrics) -> Metrics:
    """The first fourth of the steps, at least one."""
    return metrics[: ceil(len(metrics) / 4)]


def last_quarter(metrics: Metrics) -> Metrics:
    """The last fourth of the steps, at least one."""
    return metrics[len(metrics) - ceil(len(metrics) / 4) :]


def mean(metrics: Metrics, key: str) -> float | None:
    """Mean of a key over the steps that have it; None if none has."""
    _, values = series(metrics, key)
    return sum(values) / len(values) if values else None


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values (fewer at the start)."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - window) : i + 1])]


@dataclass(frozen=True)
class Margin:
    """Accepted length of the co-trained draft minus that of the frozen one, over the last quarter of the steps."""

    per_seed: dict[int, float]
    first_step: int  # from 1
    last_step: int

    @property
    def smallest(self) -> float:
        return min(self.per_seed.values())

    @property
    def mean(self) -> float:
        return sum(self.per_seed.values()) / len(self.per_seed)

    def sentence(self) -> str:
        """The finding in words, whichever way it went."""
        seeds = ", ".join(f"{value:+.2f} (seed {seed})" for seed, value in self.per_seed.items())
        spread = f"mean {self.mean:+.2f}, smallest {self.smallest:+.2f}" if len(self.per_seed) > 1 else "one seed"
        return (
            f"Over the last quarter of the steps ({self.first_step} to {self.last_step}) the accepted length with the "
            f"co-trained draft minus that with the frozen draft is {seeds}: {spread}."
        )


def margin(runs: Runs) -> Margin | None:
    """None unless both modes have a run with accepted lengths on the same seed."""
    per_seed, steps = {}, []
    for seed, cotrain in sorted(runs.get("cotrain", {}).items()):
        frozen = runs.get("frozen", {}).get(seed)
        ends = [mean(last_quarter(run), "accepted_length") for run in (cotrain, frozen) if run]
        if len(ends) == 2 and None not in ends:
            per_seed[seed] = ends[0] - ends[1]
            steps += [m["step"] + 1 for m in last_quarter(cotrain)]
    return Margin(per_seed, min(steps), max(steps)) if per_seed else None
