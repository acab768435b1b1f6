"""Gloo rank processes, started once per test module and fed with functions."""

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

# Forked from a server that has torch imported: a rank starts in a tenth of a second instead of seconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed"])


class RankFailed(RuntimeError):
    """What a rank's function raised, its traceback, or that the rank died or did not answer in time."""


class RankPool:
    """`world_size` processes in one gloo group. A failure stops them; the next call starts new ones.

    Args:
        group_timeout: of the default group, in seconds.
        folder: where the ranks meet.
    """

    def __init__(self, world_size: int, group_timeout: float, folder: Path):
        self.world_size, self._group_timeout, self._folder = world_size, group_timeout, folder
        self._processes, self._pipes = [], []

    def run(self, fn: Callable, *args, timeout: float = 120.0) -> list:
        """`fn(rank, world_size, *args)` on every rank; `fn` is a top-level function of an importable module.

        Returns the results by rank. Raises RankFailed with the first failing rank's traceback.
        """
        results = self.outcomes(fn, *args, timeout=timeout)
        failures = [x for x in results if isinstance(x, RankFailed)]
        if failures:
            raise failures[0]
        return results

    def outcomes(self, fn: Callable, *args, timeout: float = 120.0) -> list:
        """As `run`, with a RankFailed in the place of each rank's result that has none."""
        self._start()
        task = pickle.dumps((fn, args))
        end = time.monotonic() + timeout
        for pipe in self._pipes:
            pipe.send_bytes(task)
        results = [self._receive(rank, pipe, end) for rank, pipe in enumerate(self._pipes)]
        if any(isinstance(x, RankFailed) for x in results):
            self.stop()
        return results

    def _receive(self, rank: int, pipe, end: float):
        try:
            if not pipe.poll(max(end - time.monotonic(), 0.0)):
                return RankFailed(f"rank {rank} of {self.world_size} gave no result in time")
            failed, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return RankFailed(f"rank {rank} of {self.world_size} died")
        return RankFailed(f"rank {rank} of {self.world_size}:\n{value}") if failed else value

    def _start(self) -> None:
        if self._processes:
            return
        store = Path(tempfile.mkdtemp(dir=self._folder)) / "store"
        for rank in range(self.world_size):
            pipe, child_pipe = _context.Pipe()
            args = (rank, self.world_size, str(store), self._group_timeout, child_pipe)
            process = _context.Process(target=_serve, args=args, daemon=True)
            process.start()
            child_pipe.close()
            self._processes.append(process)
            self._pipes.append(pipe)

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []


def _serve(rank: int, world_size: int, store: str, group_timeout: float, pipe) -> None:
    """One rank: runs what comes through the pipe until it is closed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout),
    )
    while True:
        try:
            fn, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # not through gloo's destructor, which waits for ranks that may be gone
        try:
            answer = (False, fn(rank, world_size, *args))
        except Exception:
            answer = (True, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
        # Models hold process groups, each with threads, in reference cycles.
        del answer
        gc.collect()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """`ranks(world_size, group_timeout=60.0) -> RankPool`, the same pool for the same arguments in one module."""
    pools: dict[tuple[int, float], RankPool] = {}
    folder = tmp_path_factory.mktemp("ranks")

    def pool(world_size: int, group_timeout: float = 60.0) -> RankPool:
        key = (world_size, group_timeout)
        return pools.setdefault(key, RankPool(*key, folder))

    yield pool
    for each in pools.values():
        each.stop()


def pytest_addoption(parser):
    parser.addoption("--ring-cases", type=int, help="random packs of the ring attention's property tests (300)")
