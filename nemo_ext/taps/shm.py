"""Transport `shm`: one-sided writes into POSIX shared memory, between processes of one host.

The last stage makes a segment that never has a name, and the source opens it through the last stage's `/proc` entry:
whatever happens to the processes, the kernel frees the memory with the last of them. The source copies rows into a slot
and sets the header's first word last, which announces the message; the last stage frees a slot by counting up the
stream's credit word.
"""

import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from nemo_ext.taps.errors import TransportUnavailable
from nemo_ext.taps.plan import Message, Stream, TapPlan
from nemo_ext.taps.slots import SlotRings, header
from nemo_ext.taps.transport import Inlet, Outlet

FOLDER = Path("/dev/shm")
_LINE = 64  # a credit word has a cache line to itself


class _Segment:
    """The mapped memory: credit words, then the slots."""

    def __init__(self, streams: Sequence[Stream], plan: TapPlan, descriptor: int):
        self.rings = SlotRings(streams, plan)
        self._map = mmap.mmap(descriptor, segment_bytes(streams, plan))
        everything = torch.frombuffer(self._map, dtype=torch.uint8)
        credits_end = _LINE * len(streams)
        self.slots = everything[credits_end:]
        words = everything[:credits_end].view(torch.int64)
        self._credits = {stream: words[i * _LINE // 8] for i, stream in enumerate(streams)}

    def freed(self, stream: Stream) -> int:
        """How many messages of the stream the last stage is done with."""
        return int(self._credits[stream])

    def free(self, message: Message) -> None:
        self._credits[message.stream].fill_(message.sequence + 1)


def segment_bytes(streams: Sequence[Stream], plan: TapPlan) -> int:
    """Shared memory that a link with these streams takes."""
    return _LINE * len(streams) + SlotRings(streams, plan).total_bytes


def free_bytes() -> int:
    """Shared memory that is left on this host."""
    return shutil.disk_usage(FOLDER).free


class ShmInlet(Inlet):
    """Makes the segment; `offer` is the path under which the source can open it.

    Raises:
        TransportUnavailable: if shared memory has no room for it.
    """

    def __init__(self, streams: Sequence[Stream], plan: TapPlan):
        size, free = segment_bytes(streams, plan), free_bytes()
        self._descriptor: int | None = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
        self._segment: _Segment | None = None
        try:
            if size > free:
                raise OSError(f"{free} are free")
            # Takes the pages now: running out of them later would be a SIGBUS.
            os.posix_fallocate(self._descriptor, 0, size)
            self._segment = _Segment(streams, plan, self._descriptor)
        except OSError as error:
            self.close()
            raise TransportUnavailable(
                f"policy.draft.tap_transport is shm, but {FOLDER} has no room for {size} bytes of landing slots "
                f"({error}); give it more (--shm-size) or set policy.draft.tap_transport: p2p"
            ) from None
        self.offer = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def complete(self, answer) -> None:
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def arrived(self, message: Message) -> bool:
        return int(self._segment.rings.header_of(self._segment.slots, message)[0]) == message.sequence + 1

    def rows(self, message: Message) -> torch.Tensor:
        self._segment.rings.check(self._segment.slots, message)
        return self._segment.rings.rows_of(self._segment.slots, message)

    def release(self, message: Message) -> None:
        self._segment.free(message)

    def close(self) -> None:
        self._close_descriptor()
        self._segment = None  # unmapped with the last view of a slot


class ShmOutlet(Outlet):
    """Maps the segment of an inlet's offer."""

    def __init__(self, streams: Sequence[Stream], plan: TapPlan, offer: str):
        descriptor = os.open(offer, os.O_RDWR)
        try:
            self._segment: _Segment | None = _Segment(streams, plan, descriptor)
        finally:
            os.close(descriptor)

    def has_room(self, message: Message) -> bool:
        return self._segment.freed(message.stream) > message.sequence - self._segment.rings.slots(message.stream)

    def send(self, message: Message, rows_TH: torch.Tensor) -> None:
        rings, slots = self._segment.rings, self._segment.slots
        rings.rows_of(slots, message).copy_(rows_TH)
        head = rings.header_of(slots, message)
        words = torch.tensor(header(message))
        head[1:] = words[1:]
        head[0] = words[0]

    def close(self) -> None:
        self._segment = None
