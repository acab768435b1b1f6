"""Transport `p2p`: plain sends and receives in a gloo group of the link's own, from and to host memory.

Both ends know a step's messages, so the last stage posts receives ahead, each as long as its message will be, in the order
in which the source sends. A message whose slot is not free yet is posted when it is: that is the credit. The source
copies rows into a ring of its own, so that a hook never waits for the wire.

Rings lie in host memory, pinned where the rows are on a GPU. NCCL would take them as they are, but a receive that is posted
ahead is a kernel that spins until its message comes: whatever waits for the whole device meanwhile (Megatron after an
exchange of shapes, an allocation that frees memory, a single hardware queue) waits for the source, which may wait for it.

Works are completed by a thread, since gloo tells that a work is done only to who waits for it.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from nemo_ext.taps.plan import Message, Stream, TapPlan
from nemo_ext.taps.slots import SlotRings
from nemo_ext.taps.transport import Inlet, Outlet

# The channel's own waits are the bounded ones; a receive that is posted ahead may stand for a whole step.
FOREVER = timedelta(days=1)
_SETUP = timedelta(seconds=60)
_FLUSH_S = 5.0


class _Completions:
    """Starts works in the order in which they are handed over, waits for each, and counts each stream's that are done.

    Args:
        check: called with each message that is done.
    """

    def __init__(self, check: Callable[[Message], None] = lambda message: None):
        self._check = check
        self._done: dict[Stream, int] = {}
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="nemo-ext-taps-p2p", daemon=True)
        self._thread.start()

    def add(self, start: Callable[[], dist.Work], message: Message) -> None:
        self._queue.put((start, message))

    def count(self, stream: Stream) -> int:
        """Messages of the stream that are done. Raises what went wrong with any."""
        if self._error is not None:
            raise self._error
        return self._done.get(stream, 0)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            start, message = item
            try:
                start().wait(FOREVER)
                self._check(message)
            except RuntimeError as error:
                self._error = error
                return
            self._done[message.stream] = message.sequence + 1

    def stop(self) -> None:
        """Ends the thread after what was handed over; gives up on a peer that does not answer."""
        self._queue.put(None)
        self._thread.join(timeout=_FLUSH_S)


def _host_buffer(rings: SlotRings, device: torch.device) -> torch.Tensor:
    return torch.zeros(rings.total_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _copied(device: torch.device) -> Callable[[], None]:
    """Waits, when called, for the copies between GPU and host that are under way now."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _group(store: dist.Store, stage: int, end: int) -> dist.Backend:
    """A group of two: the source as rank 0, the last stage as rank 1. Both must call this.

    It is built directly and not by `new_group`, which finds the members of a group that not all ranks make by how many
    groups each has already.
    """
    return dist.ProcessGroupGloo(dist.PrefixStore(f"stage {stage}", store), end, 2, timeout=_SETUP)


class P2POutlet(Outlet):
    """The source's end; `offer` is where the last stage's store listens."""

    def __init__(self, streams: Sequence[Stream], plan: TapPlan, device: torch.device, offer: tuple[str, int]):
        self._rings, self._device = SlotRings(streams, plan), device
        self._buffer = _host_buffer(self._rings, device)
        self._completions = _Completions()
        self._stage = streams[0].stage
        self._store = dist.TCPStore(*offer, is_master=False, timeout=_SETUP)
        self._group: dist.Backend | None = None

    def complete(self) -> None:
        self._group = _group(self._store, self._stage, 0)

    def has_room(self, message: Message) -> bool:
        return self._completions.count(message.stream) > message.sequence - self._rings.slots(message.stream)

    def send(self, message: Message, rows_TH: torch.Tensor) -> None:
        self._rings.fill(self._buffer, message, rows_TH)
        copied, group, sent = _copied(self._device), self._group, self._rings.bytes_of(self._buffer, message)

        def start() -> dist.Work:
            copied()
            return group.send([sent], 1, 0)

        self._completions.add(start, message)

    def close(self) -> None:
        self._completions.stop()
        self._group = self._store = None


class P2PInlet(Inlet):
    """The last stage's end. `host`: this host's name for the source."""

    def __init__(self, streams: Sequence[Stream], plan: TapPlan, device: torch.device, host: str):
        self._rings, self._device = SlotRings(streams, plan), device
        self._buffer = _host_buffer(self._rings, device)
        self._on_device: dict[Message, tuple[torch.Tensor, Callable[[], None]]] = {}
        self._completions = _Completions(check=lambda message: self._rings.check(self._buffer, message))
        self._waiting: deque[Message] = deque()
        self._freed = dict.fromkeys(streams, 0)
        self._stage = streams[0].stage
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_SETUP)
        self._group: dist.Backend | None = None
        self.offer = (host, self._store.port)

    def complete(self, answer) -> None:
        self._group = _group(self._store, self._stage, 1)

    def begin(self, messages: Sequence[Message]) -> None:
        self._waiting.extend(messages)
        self._post()

    def _post(self) -> None:
        """Starts receives, in the order of the sends, as far as slots are free."""
        while self._waiting:
            message = self._waiting[0]
            if message.sequence - self._freed[message.stream] >= self._rings.slots(message.stream):
                return
            self._waiting.popleft()
            slot = self._rings.bytes_of(self._buffer, message)
            work = self._group.recv([slot], 0, 0)
            self._completions.add(lambda work=work: work, message)

    def arrived(self, message: Message) -> bool:
        return self._completions.count(message.stream) > message.sequence

    def rows(self, message: Message) -> torch.Tensor:
        rows = self._rings.rows_of(self._buffer, message)
        if self._device.type == "cpu":
            return rows
        if message not in self._on_device:
            self._on_device[message] = rows.to(self._device, non_blocking=True), _copied(self._device)
        return self._on_device[message][0]

    def release(self, message: Message) -> None:
        if message in self._on_device:
            self._on_device.pop(message)[1]()
        self._freed[message.stream] = message.sequence + 1
        self._post()

    def close(self) -> None:
        self._completions.stop()
        self._group = self._store = None
