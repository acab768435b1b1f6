"""A run's progress: live in a terminal, plain lines elsewhere."""

import sys
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from nemo_ext.local.settings import RunConfig

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # steps in a sparkline

# Label, key, format of what is shown while a run goes on.
_SHOWN = (
    ("reward", "reward_mean", ".3f"),
    ("accepted length", "accepted_length", ".2f"),
    ("draft loss", "draft_loss", ".3f"),
    ("policy loss", "policy_loss", "+.4f"),
    ("grad norm", "grad_norm", ".3f"),
    ("draft grad norm", "draft_grad_norm", ".3f"),
    ("rollout tokens/s", "rollout_tokens_per_s", ",.0f"),
    ("rollout s", "rollout_s", ".2f"),
    ("train s", "train_s", ".2f"),
    ("refresh s", "refresh_s", ".3f"),
)


class Display:
    """Shows notes and steps. A context manager.

    Args:
        config: of the run; its name and number of steps are shown.
        stream: where to; standard output unless given.
    """

    def __init__(self, config: RunConfig, stream: TextIO | None = None):
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._steps = config.grpo.max_num_steps
        self._history: list[dict[str, Any]] = []
        self._live: Live | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn(config.logger.run_name),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("steps,"),
                TimeElapsedColumn(),
                TextColumn("gone,"),
                TimeRemainingColumn(),
                TextColumn("to go"),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=self._steps)
            self._live = Live(self._progress, console=self._console, refresh_per_second=4)

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc) -> None:
        if self._live:
            self._live.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    def step(self, metrics: dict[str, Any]) -> None:
        """One finished step."""
        self._history.append(metrics)
        if self._live:
            self._progress.update(self._task, completed=metrics["step"] + 1)
            self._live.update(Group(self._table(), self._progress))
        else:
            self._console.print(step_line(metrics, self._steps), markup=False)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title, side in (("", "left"), ("last", "right"), ("mean of 10", "right"), (f"last {_WIDTH} steps", "left")):
            table.add_column(title, justify=side)
        for label, key, form in _SHOWN:
            values = [m[key] for m in self._history if m.get(key) is not None]
            if values:
                recent = values[-10:]
                table.add_row(
                    label, f"{values[-1]:{form}}", f"{sum(recent) / len(recent):{form}}", sparkline(values[-_WIDTH:])
                )
        return table


def step_line(metrics: dict[str, Any], steps: int) -> str:
    """One step as one plain line, with what it has."""
    parts = [f"step {metrics['step'] + 1}/{steps}"]
    parts += [f"{label} {metrics[key]:{form}}" for label, key, form in _SHOWN if metrics.get(key) is not None]
    return "  ".join(parts)


def sparkline(values: list[float]) -> str:
    """Eight-level bars from the smallest to the largest value."""
    low, span = min(values), max(values) - min(values)
    return "".join(_BARS[int((v - low) / span * (len(_BARS) - 1) + 0.5) if span else 0] for v in values)
