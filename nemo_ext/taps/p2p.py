"""Transport `p2p`: plain sends and receives in a process group of the link's own, gloo or NCCL.

Both ends know a step's messages, so the last stage posts receives ahead, each as long as its message will be, in the order
in which the source sends. A message whose slot is not free yet is posted when it is: that is the credit. The source
copies rows into a ring of its own, so that a hook never waits for the wire.

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
    """Waits for works in the order in which they were started, and counts each stream's that are done.

    Args:
        device: of the tensors.
        check: called with each message that is done.
    """

    def __init__(self, device: torch.device, check: Callable[[Message], None] = lambda message: None):
        self._device, self._check = device, check
        self._done: dict[Stream, int] = {}
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="nemo-ext-taps-p2p", daemon=True)
        self._thread.start()

    def add(self, work: dist.Work, message: Message) -> None:
        self._queue.put((work, message))

    def count(self, stream: Stream) -> int:
        """Messages of the stream that are done. Raises what went wrong with any."""
        if self._error is not None:
            raise self._error
        return self._done.get(stream, 0)

    def _run(self) -> None:
        # A stream of the thread's own: waiting for it does not wait for the model's kernels.
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with torch.cuda.stream(stream):
            while (item := self._queue.get()) is not None:
                work, message = item
                try:
                    work.wait(FOREVER)
                    if stream is not None:
                        stream.synchronize()
                    self._check(message)
                except RuntimeError as error:
                    self._error = error
                    return
                self._done[message.stream] = message.sequence + 1

    def stop(self) -> None:
        """Ends the thread after what was handed over; gives up on a peer that does not answer."""
        self._queue.put(None)
        self._thread.join(timeout=_FLUSH_S)


def _group(store: dist.Store, stage: int, end: int, device: torch.device) -> dist.Backend:
    """A group of two: the source as rank 0, the last stage as rank 1. Both must call this.

    It is built directly and not by `new_group`, which finds the members of a group that not all ranks make by how many
    groups each has already.
    """
    store = dist.PrefixStore(f"stage {stage}", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        return dist.ProcessGroupNCCL(store, end, 2, options)
    return dist.ProcessGroupGloo(store, end, 2, timeout=_SETUP)


class P2POutlet(Outlet):
    """The source's end; `offer` is where the last stage's store listens."""

    def __init__(self, streams: Sequence[Stream], plan: TapPlan, device: torch.device, offer: tuple[str, int]):
        self._rings = SlotRings(streams, plan)
        self._buffer = torch.zeros(self._rings.total_bytes, dtype=torch.uint8, device=device)
        self._completions = _Completions(device)
        self._stage = streams[0].stage
        self._store = dist.TCPStore(*offer, is_master=False, timeout=_SETUP)
        self._group: dist.Backend | None = None

    def complete(self) -> None:
        self._group = _group(self._store, self._stage, 0, self._buffer.device)

    def has_room(self, message: Message) -> bool:
        return self._completions.count(message.stream) > message.sequence - self._rings.slots(message.stream)

    def send(self, message: Message, rows_TH: torch.Tensor) -> None:
        self._rings.fill(self._buffer, message, rows_TH)
        sent = self._rings.bytes_of(self._buffer, message)
        self._completions.add(self._group.send([sent], 1, 0), message)

    def close(self) -> None:
        self._completions.stop()
        self._group = self._store = None


class P2PInlet(Inlet):
    """The last stage's end. `host`: this host's name for the source."""

    def __init__(self, streams: Sequence[Stream], plan: TapPlan, device: torch.device, host: str):
        self._rings = SlotRings(streams, plan)
        self._buffer = torch.zeros(self._rings.total_bytes, dtype=torch.uint8, device=device)
        self._completions = _Completions(device, check=lambda message: self._rings.check(self._buffer, message))
        self._waiting: deque[Message] = deque()
        self._freed = dict.fromkeys(streams, 0)
        self._stage = streams[0].stage
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_SETUP)
        self._group: dist.Backend | None = None
        self.offer = (host, self._store.port)

    def complete(self, answer) -> None:
        self._group = _group(self._store, self._stage, 1, self._buffer.device)

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
            self._completions.add(self._group.recv([slot], 0, 0), message)

    def arrived(self, message: Message) -> bool:
        return self._completions.count(message.stream) > message.sequence

    def rows(self, message: Message) -> torch.Tensor:
        return self._rings.rows_of(self._buffer, message)

    def release(self, message: Message) -> None:
        self._freed[message.stream] = message.sequence + 1
        self._post()

    def close(self) -> None:
        self._completions.stop()
        self._group = self._store = None
