"""Transport `nixl`: one-sided writes over UCX, into host or CUDA memory, on one host or over RDMA.

Both ends register their slots once. The source copies rows into its own slot (on CUDA on the current stream, with an
event), and a thread waits for the event and posts the write, so that no hook blocks the launch queue. The write's
notification carries the message's header: NIXL delivers it after the data. Credits are notifications the other way, sent
by a thread once the kernels that read the slot are done.

NIXL's own progress thread stays off, because it spins on a core; the source's thread and the last stage's asking make
progress instead.
"""

import importlib
import os
import queue
import secrets
import struct
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from nemo_ext.taps.errors import TransportUnavailable
from nemo_ext.taps.plan import Message, Stream, TapPlan
from nemo_ext.taps.slots import SlotRings, header
from nemo_ext.taps.transport import Inlet, Outlet

_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
_HEADER = struct.Struct("<8q")
_CREDIT = struct.Struct("<2q")
# Credits may arrive a little after the gradients that followed them.
_SPARE = 1
_FLUSH_S = 5.0


def load_nixl() -> ModuleType:
    """NIXL's Python interface.

    Raises:
        TransportUnavailable: if none of its packages is installed, or it does not load.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise TransportUnavailable(
                f"policy.draft.tap_transport is nixl, but {package} does not load: {error}"
            ) from error
    raise TransportUnavailable(
        "policy.draft.tap_transport is nixl, but NIXL is not installed; "
        "install nixl-cu12 (or nixl-cu13 for CUDA 13), or set policy.draft.tap_transport: auto"
    )


class _End:
    """An agent with registered slots, and the agent on the other end."""

    def __init__(self, streams: Sequence[Stream], plan: TapPlan, device: torch.device):
        nixl = load_nixl()
        self.rings = SlotRings(streams, plan, spare=_SPARE)
        self.buffer = torch.zeros(max(self.rings.total_bytes, 1), dtype=torch.uint8, device=device)
        self.memory = "VRAM" if device.type == "cuda" else "DRAM"
        self.device_id = self.buffer.get_device() if device.type == "cuda" else 0
        self.agent = nixl.nixl_agent(
            f"nemo-ext-taps-{os.getpid()}-{secrets.token_hex(8)}",
            nixl.nixl_agent_config(
                enable_prog_thread=False,
                # The thread posts while the model's thread asks for credits.
                sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            ),
        )
        self._registered = self.agent.register_memory(self.buffer)
        self.peer: str | None = None

    @property
    def card(self) -> tuple[bytes, int, int]:
        """What the other end needs to know: the agent's metadata, and where its slots are."""
        return self.agent.get_agent_metadata(), self.buffer.data_ptr(), self.device_id

    def meet(self, metadata: bytes) -> None:
        peer = self.agent.add_remote_agent(metadata)
        self.peer = peer.decode() if isinstance(peer, bytes) else peer

    def notes(self) -> list[bytes]:
        """Notifications that are new; asking also moves transfers on."""
        return [note for notes in self.agent.get_new_notifs().values() for note in notes]

    def close(self) -> None:
        if self._registered is not None:
            if self.peer is not None:
                self.agent.remove_remote_agent(self.peer)
            self.agent.deregister_memory(self._registered)
            self._registered = self.agent = None  # the agent ends with its last reference


class _Worker:
    """A thread that does NIXL's calls in order, each after the CUDA work that was queued before it was handed over.

    Args:
        device: of the tensors.
        poll: called every now and then while it returns true.
    """

    def __init__(self, device: torch.device, poll: Callable[[], bool] = lambda: False):
        self._device, self._poll = device, poll
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="nemo-ext-taps-nixl", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        before = None
        if self._device.type == "cuda":
            before = torch.cuda.Event(blocking=True)  # the thread sleeps for it
            before.record()
        self._queue.put((before, call))

    def check(self) -> None:
        """Raises what a call or a poll raised."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        polling = ended = False
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread has a device, and UCX a context, of its own
            while polling or not ended:
                try:
                    item = self._queue.get(timeout=2e-4 if polling else None)
                except queue.Empty:
                    item = (None, lambda: None)
                if item is None:
                    ended = True
                    continue
                before, call = item
                if before is not None:
                    before.synchronize()
                call()
                polling = self._poll()
        except Exception as error:  # NIXL's errors have no common base; check raises it
            self._error = error

    def stop(self) -> None:
        """Ends the thread after what was handed over; gives up on a peer that does not answer."""
        self._queue.put(None)
        self._thread.join(timeout=_FLUSH_S)


class NixlInlet(Inlet):
    """Owns the landing slots; `offer` and `complete`'s answer are the ends' cards."""

    def __init__(self, streams: Sequence[Stream], plan: TapPlan, device: torch.device):
        self._end = _End(streams, plan, device)
        self._worker = _Worker(self._end.buffer.device)
        self._headers: dict[tuple[int, int], list[int]] = {}  # by stream and sequence number
        self.offer = self._end.card

    def complete(self, answer) -> None:
        self._end.meet(answer)

    def arrived(self, message: Message) -> bool:
        for note in self._end.notes():
            words = list(_HEADER.unpack(note))
            self._headers[words[3], words[0] - 1] = words
        if (message.stream.index, message.sequence) in self._headers:
            return True
        # Only now: a source that sent everything may have closed, and needs no more credits.
        self._worker.check()
        return False

    def rows(self, message: Message) -> torch.Tensor:
        SlotRings.compare(self._headers[message.stream.index, message.sequence], message)
        return self._end.rings.rows_of(self._end.buffer, message)

    def release(self, message: Message) -> None:
        del self._headers[message.stream.index, message.sequence]
        credit = _CREDIT.pack(message.stream.index, message.sequence)
        # Kernels that read the slot may still be queued.
        self._worker.submit(lambda: self._end.agent.send_notif(self._end.peer, credit))

    def close(self) -> None:
        self._worker.stop()
        self._end.close()


class NixlOutlet(Outlet):
    """Writes into the slots of an inlet's offer; `answer` is its own metadata."""

    def __init__(self, streams: Sequence[Stream], plan: TapPlan, device: torch.device, offer: tuple[bytes, int, int]):
        self._end = _End(streams, plan, device)
        metadata, self._address, self._remote_device = offer
        self._end.meet(metadata)
        self.answer = self._end.card[0]
        self._freed = {stream.index: 0 for stream in streams}
        self._sent = {stream.index: 0 for stream in streams}
        self._under_way: list = []
        self._worker = _Worker(self._end.buffer.device, poll=self._progress)

    def has_room(self, message: Message) -> bool:
        self._worker.check()
        room = message.sequence - self._end.rings.slots(message.stream)
        if self._freed[message.stream.index] <= room:
            self._take_credits()
        return self._freed[message.stream.index] > room

    def _take_credits(self) -> None:
        for note in self._end.notes():
            stream, sequence = _CREDIT.unpack(note)
            self._freed[stream] = sequence + 1

    def settled(self) -> bool:
        self._worker.check()
        self._take_credits()
        return self._freed == self._sent

    def send(self, message: Message, rows_TH: torch.Tensor) -> None:
        self._end.rings.rows_of(self._end.buffer, message).copy_(rows_TH)
        self._sent[message.stream.index] = message.sequence + 1
        self._worker.submit(lambda: self._write(message))

    def _write(self, message: Message) -> None:
        end, offset, size = self._end, self._end.rings.offset(message), self._end.rings.size(message)
        write = end.agent.initialize_xfer(
            "WRITE",
            end.agent.get_xfer_descs([(end.buffer.data_ptr() + offset, size, end.device_id)], end.memory),
            end.agent.get_xfer_descs([(self._address + offset, size, self._remote_device)], end.memory),
            end.peer,
            _HEADER.pack(*header(message)),
        )
        _raise_if_bad(end.agent.transfer(write))
        self._under_way.append(write)

    def _progress(self) -> bool:
        """Moves the writes on; whether any is under way."""
        still = []
        for write in self._under_way:
            state = self._end.agent.check_xfer_state(write)
            _raise_if_bad(state)
            if state == "DONE":
                self._end.agent.release_xfer_handle(write)
            else:
                still.append(write)
        self._under_way = still
        return bool(still)

    def close(self) -> None:
        self._worker.stop()
        self._end.close()


def _raise_if_bad(state: str) -> None:
    if state == "ERR":
        raise RuntimeError("a NIXL write failed")
