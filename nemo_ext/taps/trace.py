"""Spans on the host's monotonic clock, which all its processes share, as a file that Perfetto opens."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Span:
    """Times in nanoseconds."""

    name: str
    start: int
    end: int = 0
    details: dict = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


class Trace:
    """Keeps spans if `recording`; times them anyhow."""

    def __init__(self, recording: bool = False, clock: Callable[[], int] = time.monotonic_ns):
        self._recording, self._clock = recording, clock
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str, **details) -> Iterator[Span]:
        """Around what is to be seen."""
        span = Span(name, self._clock(), details=details)
        try:
            yield span
        finally:
            span.end = self._clock()
            if self._recording:
                self.spans.append(span)


def write_trace(path: Path, rows: Sequence[tuple[str, str, Sequence[Span]]]) -> None:
    """Writes Chrome's trace format: (process, row, spans) each, such as ("stage 0", "schedule", ...)."""
    processes = list(dict.fromkeys(process for process, _, _ in rows))
    events = []
    for number, (process, row, spans) in enumerate(rows):
        at = {"pid": processes.index(process), "tid": number}
        events.append({"ph": "M", "name": "process_name", **at, "args": {"name": process}})
        events.append({"ph": "M", "name": "thread_name", **at, "args": {"name": row}})
        for span in spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "ts": span.start / 1e3,
                    "dur": (span.end - span.start) / 1e3,
                    **at,
                    "args": span.details,
                }
            )
    path.write_text(json.dumps({"traceEvents": events}))
