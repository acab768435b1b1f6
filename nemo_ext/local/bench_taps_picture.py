"""Draws the trace of `nemo-ext bench taps`: stages, microbatches, tap writes and the draft, way under way."""

from collections.abc import Sequence
from pathlib import Path

from nemo_ext.taps.trace import Span

_COLOURS = {
    "forward": "#4c8bc9",
    "backward": "#e0a03c",
    "write": "#2b8a3e",
    "wait": "#c92a2a",
    "draft": "#7048e8",
}
_TITLES = {
    "policy": "policy alone",
    "taps": "taps by TapChannel, not read",
    "blocking": "taps by blocking sends, not read",
    "cotrain": "draft co-trained, TapChannel",
    "blocking_cotrain": "draft co-trained, blocking sends",
}


def draw(path: Path, rows: Sequence[tuple[str, str, Sequence[Span]]]) -> None:
    """Writes the picture; `rows` as `write_trace` takes them, in nanoseconds from 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    ways = list(dict.fromkeys(way for way, _, _ in rows))
    figure, axes = pyplot.subplots(len(ways), 1, sharex=True, figsize=(11, 1.45 * len(ways) + 0.8))
    for way, axis in zip(ways, axes, strict=True):
        own = [(row, spans) for one, row, spans in rows if one == way]
        for y, (_, spans) in enumerate(own):
            for span in spans:
                kind = span.name.split()[0]
                start, seconds = span.start / 1e9, span.seconds
                edge = "white" if kind in ("forward", "backward") else _COLOURS[kind]  # a write is a line
                axis.barh(y, seconds, left=start, height=0.7, color=_COLOURS[kind], edgecolor=edge, linewidth=0.5)
                if kind in ("forward", "backward"):
                    axis.text(start + seconds / 2, y, span.name.split()[1], ha="center", va="center", fontsize=6)
        axis.set_yticks(range(len(own)), [row for row, _ in own], fontsize=7)
        axis.invert_yaxis()
        axis.set_title(_TITLES[way], fontsize=8, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("seconds")
    handles = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="upper right", fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
