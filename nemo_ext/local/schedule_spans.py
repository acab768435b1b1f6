"""Megatron's timers as spans: what its schedule does on this rank, and when."""

from collections.abc import Callable

from nemo_ext.taps.trace import Trace

_ROWS = {"forward-compute": "forward", "backward-compute": "backward"}


class ScheduleSpans:
    """Goes into `TransformerConfig.timers`; records a span for each microbatch's forward and backward.

    Attributes:
        before: called before each of them, outside its span; None for nothing.
    """

    def __init__(self, trace: Trace):
        self._trace = trace
        self._open: dict[str, object] = {}
        self._count: dict[str, int] = {}
        self.before: Callable[[], None] | None = None

    def __call__(self, name: str, log_level: int = 0) -> "_Timer":
        return _Timer(self, name)

    def start(self, name: str) -> None:
        if name == "forward-backward":
            self._count.clear()
        row = _ROWS.get(name)
        if row is None:
            return
        if self.before is not None:
            self.before()
        number = self._count.setdefault(row, 0)
        self._count[row] += 1
        self._open[name] = self._trace.span(f"{row} {number}")
        self._open[name].__enter__()

    def stop(self, name: str) -> None:
        if name in self._open:
            self._open.pop(name).__exit__(None, None, None)


class _Timer:
    def __init__(self, spans: ScheduleSpans, name: str):
        self._spans, self._name = spans, name

    def start(self, barrier: bool = False) -> None:
        self._spans.start(self._name)

    def stop(self, barrier: bool = False) -> None:
        self._spans.stop(self._name)
