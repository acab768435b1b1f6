"""Tells every stage of a pipeline, at once, that one of them died or failed, and which.

Each stage holds an idle TCP connection to the last stage; the kernel closes it when a process dies, and keepalive when
a host does. What the last stage learns it passes on. One thread a stage sleeps on its connections; nothing is polled.

A stage that hangs in its pipeline's own receive cannot be called back into Python: gloo does not return before its
group's timeout. So a stage that has not come out of its step some seconds after the news is ended, with the news as its
last words.
"""

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_ext.taps.errors import StageLost

GRACE_S = 8.0
_CONNECT_S = 20.0


@dataclass(frozen=True)
class Door:
    """Where the last stage listens."""

    host: str
    port: int
    token: str


def end_process(error: StageLost) -> None:
    """The default for a stage that hangs: prints the error and ends the process."""
    print(f"nemo_ext.taps: {error}; ending this stage, which hangs in its pipeline", file=sys.stderr, flush=True)
    os._exit(70)


class Monitor:
    """One stage's part.

    Args:
        stage: of this process.
        names: what to call each stage in an error, such as `stage 0 (process 12 on a1)`.
        on_stuck: called in the monitor's thread when this stage is still in a step `grace_s` after a loss.
    """

    def __init__(
        self,
        stage: int,
        names: Sequence[str],
        on_stuck: Callable[[StageLost], None] = end_process,
        grace_s: float = GRACE_S,
    ):
        self._stage, self._names, self._on_stuck, self._grace_s = stage, names, on_stuck, grace_s
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, int] = {}
        self._partial: dict[socket.socket, bytes] = {}
        self._wake, wake_end = socket.socketpair()
        self._selector.register(wake_end, selectors.EVENT_READ)
        self._wake_end = wake_end
        self._news = threading.Condition()
        self._lost: str | None = None
        self._lost_at = 0.0
        self._busy = False
        self._closing = False
        self._thread: threading.Thread | None = None

    @staticmethod
    def listen(outside: bool, token: str) -> tuple[socket.socket, Door]:
        """The last stage's socket. `outside`: some stage is on another host."""
        host = _own_address() if outside else "127.0.0.1"
        listener = socket.create_server(("" if outside else host, 0))
        return listener, Door(host, listener.getsockname()[1], token)

    def gather(self, listener: socket.socket, token: str, stages: int) -> None:
        """The last stage takes in the others, `stages` in all. Raises StageLost if one does not come."""
        end = time.monotonic() + _CONNECT_S
        with listener:
            while len(self._peers) < stages:
                listener.settimeout(max(end - time.monotonic(), 0.01))
                try:
                    peer, _ = listener.accept()
                    peer.settimeout(max(end - time.monotonic(), 0.01))
                    told, _, stage = _read_line(peer).partition(" ")
                except OSError:
                    here = set(self._peers.values())
                    missing = [name for i, name in enumerate(self._names) if i not in here and i != self._stage]
                    raise StageLost(f"{', '.join(missing)} did not connect within {_CONNECT_S:g} s") from None
                if told == token:
                    self._add(peer, int(stage))
                else:
                    peer.close()
        self._start()

    def join(self, door: Door) -> None:
        """Another stage connects to the last. Raises StageLost if it cannot."""
        try:
            peer = socket.create_connection((door.host, door.port), timeout=_CONNECT_S)
        except OSError as error:
            raise StageLost(f"{self._names[-1]} does not answer at {door.host}:{door.port}: {error}") from error
        peer.sendall(f"{door.token} {self._stage}\n".encode())
        self._add(peer, len(self._names) - 1)
        self._start()

    def _add(self, peer: socket.socket, stage: int) -> None:
        peer.settimeout(5.0)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in ((socket.TCP_KEEPIDLE, 4), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 4)):
            peer.setsockopt(socket.IPPROTO_TCP, option, seconds)
        self._peers[peer] = stage
        self._partial[peer] = b""
        self._selector.register(peer, selectors.EVENT_READ)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="nemo-ext-taps-monitor", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> StageLost | None:
        """The first loss that became known, as an error to raise."""
        return None if self._lost is None else StageLost(self._lost)

    def wait_for_news(self, seconds: float) -> StageLost | None:
        """`lost`, after waiting for it at most this long."""
        with self._news:
            self._news.wait_for(lambda: self._lost is not None, timeout=seconds)
        return self.lost

    def busy(self, busy: bool) -> None:
        """A step begins or ends."""
        self._busy = busy
        if busy and self._lost is not None:
            raise StageLost(self._lost)

    def fail(self, why: str) -> None:
        """Tells the others that this stage failed."""
        self._tell({"stage": self._stage, "why": f"{self._names[self._stage]} failed: {why}"})

    def close(self) -> None:
        """Leaves; the others do not take it for a loss."""
        if self._closing:
            return
        self._closing = True
        self._tell({"bye": self._stage})
        self._wake.send(b".")
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        for peer in [*self._peers, self._wake, self._wake_end]:
            peer.close()
        self._selector.close()

    def _tell(self, message: dict, but: socket.socket | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        for peer in list(self._peers):
            if peer is not but:
                try:
                    peer.sendall(line)
                except OSError:
                    pass  # its own end is noticed by reading

    def _run(self) -> None:
        while not self._closing:
            timeout = None
            if self._lost is not None:
                timeout = max(self._lost_at + self._grace_s - time.monotonic(), 0.0)
                if timeout == 0.0:
                    if self._busy:
                        self._on_stuck(StageLost(self._lost))
                    return
            for key, _ in self._selector.select(timeout):
                if key.fileobj in self._peers:
                    self._read(key.fileobj)

    def _read(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            self._learn(f"{self._names[self._peers[peer]]} is gone: its process or host died", peer)
            return
        *lines, self._partial[peer] = (self._partial[peer] + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "bye" in message:
                self._drop(peer)
            else:
                self._learn(message["why"], peer)

    def _drop(self, peer: socket.socket) -> None:
        if peer in self._selector.get_map():
            self._selector.unregister(peer)

    def _learn(self, why: str, source: socket.socket) -> None:
        if self._lost is not None:
            return
        # Passed on first: who reads it here may close this monitor at once, and a peer that has left is not heard.
        self._tell({"why": why}, but=source)
        with self._news:
            self._lost, self._lost_at = why, time.monotonic()
            self._news.notify_all()


def _read_line(peer: socket.socket) -> str:
    """The first line, and no byte of what follows."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 200:
        line += peer.recv(1) or b"\n"
    return line.decode().rstrip()


def _own_address() -> str:
    """This host's address on the way to the job's master."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return socket.gethostbyname(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        return probe.getsockname()[0]
