"""Plots of runs as matplotlib figures, and figures as inline SVG or files."""

import io
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

from nemo_ext.local.run_stats import MODE_NAMES, Metrics, Runs, listed, series, smoothed

MODE_COLORS = {"none": "#6b7280", "frozen": "#d97706", "cotrain": "#2563eb"}
# Shades from first to last place of a list (positions, passes).
SHADES = ("#1e3a8a", "#2563eb", "#0ea5e9", "#22b8a5", "#84cc16", "#eab308", "#f97316", "#dc2626")
PHASES = (("rollout_s", "rollout", "#2563eb"), ("train_s", "training", "#f59e0b"), ("refresh_s", "refresh", "#10b981"))
_INK, _FAINT = "#1f2937", "#9ca3af"
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.7,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
}
_SIZE = (5.2, 2.6)


def svg(figure: Figure, salt: str) -> str:
    """The figure as an `<svg>` element. `salt` keeps apart the ids of several figures on a page."""
    with rc_context({**_STYLE, "svg.hashsalt": salt}):
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def save(figure: Figure, path: Path) -> None:
    """Writes the figure as the path's suffix says (`.png`, `.svg`)."""
    with rc_context(_STYLE):
        figure.savefig(path, dpi=160)


def _axes(ylabel: str, size: tuple[float, float] = _SIZE) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=(1, 2, 5, 10)))
    axes.margins(x=0.01)
    return figure, axes


def _legend(axes: Axes, columns: int) -> None:
    """Above the plot, where no line runs."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, handlelength=1.2)


@rc_context(_STYLE)
def curve(metrics: Metrics, key: str, ylabel: str, color: str = MODE_COLORS["cotrain"]) -> Figure:
    """One key over the steps: each step faint, a running mean over a tenth of the run strong."""
    figure, axes = _axes(ylabel)
    steps, values = series(metrics, key)
    window = max(1, len(values) // 10)
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1, label="each step")
    axes.plot(steps, smoothed(values, window), color=color, label=f"mean of the last {window} steps")
    _legend(axes, 2)
    return figure


@rc_context(_STYLE)
def accepted_length_curve(metrics: Metrics) -> Figure:
    """Accepted length of the rollouts, and what training says it should be on the same tokens."""
    figure = curve(metrics, "accepted_length", "tokens per verification")
    axes = figure.axes[0]
    steps, expected = series(metrics, "draft_expected_accepted_length")
    if expected:
        axes.plot(steps, expected, color=_INK, linestyle=":", linewidth=1.2, label="expected in training")
        _legend(axes, 3)
    return figure


@rc_context(_STYLE)
def places(metrics: Metrics, key: str, ylabel: str, label: str, bottom: float | None = None) -> Figure:
    """A key whose values are lists: one line for each place, named `label` 1, 2, ..."""
    figure, axes = _axes(ylabel)
    steps, columns = listed(metrics, key)
    for index, values in enumerate(columns):
        axes.plot(steps, values, color=SHADES[index % len(SHADES)], label=f"{label} {index + 1}")
    if bottom is not None:
        axes.set_ylim(bottom, 1.02)
    _legend(axes, min(len(columns), 6))
    return figure


@rc_context(_STYLE)
def phases(metrics: Metrics) -> Figure:
    """Seconds of each phase, stacked; what is left of the step on top."""
    figure, axes = _axes("seconds")
    steps = [m["step"] + 1 for m in metrics]
    known = [[m.get(key) or 0.0 for m in metrics] for key, _, _ in PHASES]
    rest = [max(0.0, m["step_s"] - sum(part)) for m, part in zip(metrics, zip(*known, strict=True), strict=True)]
    axes.stackplot(
        steps,
        *known,
        rest,
        labels=[*(name for _, name, _ in PHASES), "other"],
        colors=[*(color for _, _, color in PHASES), "#d1d5db"],
        linewidth=0,
    )
    axes.set_ylim(0)
    _legend(axes, 4)
    return figure


@rc_context(_STYLE)
def gradient_norms(metrics: Metrics) -> Figure:
    """Norms of the policy's and the draft's gradients, before their own clips."""
    figure, axes = _axes("norm (log)")
    for key, name, color in (("grad_norm", "policy", _INK), ("draft_grad_norm", "draft", MODE_COLORS["cotrain"])):
        steps, values = series(metrics, key)
        if values:
            axes.plot(steps, values, color=color, label=name)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _legend(axes, 2)
    return figure


@rc_context(_STYLE)
def three_ways(
    runs: Runs, key: str, ylabel: str, *, bottom: float | None = None, size: tuple[float, float] = _SIZE
) -> Figure:
    """One key, a curve for each mode: the mean over seeds, and from the lowest to the highest seed as a band."""
    figure, axes = _axes(ylabel, size)
    drawn = 0
    for mode, seeds in runs.items():
        curves = [dict(zip(*series(metrics, key), strict=True)) for metrics in seeds.values()]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if not steps:
            continue
        window = max(1, len(steps) // 20)
        seeds_at = list(zip(*(smoothed([c[step] for step in steps], window) for c in curves), strict=True))
        color = MODE_COLORS[mode]
        if len(curves) > 1:
            low, high = [min(at) for at in seeds_at], [max(at) for at in seeds_at]
            axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
        axes.plot(steps, [sum(at) / len(at) for at in seeds_at], color=color, label=MODE_NAMES[mode])
        drawn += 1
    axes.set_ylim(bottom=bottom)
    _legend(axes, drawn)
    return figure


@rc_context(_STYLE)
def acceptance_bars(runs: Runs, part) -> Figure:
    """Acceptance per position, averaged over seeds and the steps that `part` keeps of a run."""
    figure, axes = _axes("acceptance")
    modes = {}
    for mode, seeds in runs.items():
        rows = [
            m["acceptance_per_position"]
            for run in seeds.values()
            for m in part(run)
            if m.get("acceptance_per_position")
        ]
        if rows:
            modes[mode] = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    width = 0.8 / max(1, len(modes))
    for number, (mode, heights) in enumerate(modes.items()):
        at = [i + 1 + (number - (len(modes) - 1) / 2) * width for i in range(len(heights))]
        bars = axes.bar(at, heights, width * 0.94, color=MODE_COLORS[mode], label=MODE_NAMES[mode])
        axes.bar_label(bars, fmt="%.2f", fontsize=7, color=_INK, padding=1)
    axes.set_xlabel("position in the drafted chain")
    axes.set_ylim(0, 1.08)
    axes.grid(axis="x", visible=False)
    _legend(axes, max(1, len(modes)))
    return figure


def accepted_length_picture(runs: Runs) -> Figure:
    """The README's picture: accepted length of the frozen and the co-trained draft over the run."""
    return three_ways(runs, "accepted_length", "accepted length (tokens per verification)", size=(7.2, 3.2))
