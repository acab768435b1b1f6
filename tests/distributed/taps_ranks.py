"""What the ranks of `test_taps` run: channels without a model, whose sources and draft go at their own pace.

Every rank is a stage of one pipeline. Stage s has layer s, which is tapped; stage 0 has the embedding too.
"""

import os
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nemo_ext.taps.channel import TapChannel
from nemo_ext.taps.connect import connect
from nemo_ext.taps.plan import Rows, agree, make_plan

WIDTH, MAX_ROWS, HALO = 8, 40, 5


def plan_of(stages: int, dtype=torch.float32, **changes):
    options = {"width": WIDTH, "dtype": dtype, "max_rows": MAX_ROWS, "max_embedding_rows": MAX_ROWS + HALO, **changes}
    return make_plan([[[stage]] for stage in range(stages)], list(range(stages)), **options)


@contextmanager
def channel_of(rank, world_size, transport, dtype=torch.float32, timeout_s=10.0, grace_s=4.0, **changes):
    """A channel over the default group."""
    group = dist.group.WORLD
    plan = agree(lambda: plan_of(world_size, dtype, **changes), group)
    links = connect(plan, group, transport, torch.device("cpu"), grace_s=grace_s)
    channel = TapChannel(plan, rank, links, timeout_s=timeout_s)
    try:
        yield channel
    finally:
        channel.close()


def lengths(step: int, microbatches: int) -> list[Rows]:
    """Rows of each microbatch, from none to the most; the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, MAX_ROWS + 1, (microbatches,), generator=generator).tolist()
    return [Rows(n, n + HALO) for n in rows]


def content(stream, step: int, microbatch: int, rows: int, dtype) -> torch.Tensor:
    """Rows that tell streams, steps, microbatches and places apart; whole numbers that bf16 holds."""
    start = 97 * stream.index + 31 * step + 7 * microbatch
    return (torch.arange(start, start + rows * WIDTH) % 251).view(rows, WIDTH).to(dtype)


def rows_of(channel, stream, rows: Rows) -> int:
    return rows.embedding if stream is channel.plan.embedding else rows.taps


def produce(channel, step: int, rows: list[Rows], pause_s: float = 0.0) -> None:
    """All that a source sends in a step."""
    for microbatch, stream in channel.plan.send_order(channel.stage, len(rows)):
        sent = content(stream, step, microbatch, rows_of(channel, stream, rows[microbatch]), channel.plan.dtype)
        channel.put(stream, microbatch, sent)
        sent.fill_(-1)  # what was handed over may be overwritten
        time.sleep(pause_s)


def consume(channel, step: int, rows: list[Rows], pause_s: float = 0.0) -> None:
    """The last stage's side of a step: takes every stream, as late as slots allow, and compares."""
    for microbatch in range(len(rows)):
        for stream in channel.plan.streams:
            n = rows_of(channel, stream, rows[microbatch])
            wanted = content(stream, step, microbatch, n, channel.plan.dtype)
            if stream.stage == channel.stage:
                channel.put(stream, microbatch, wanted.clone())
            got = channel.take(stream, microbatch)
            assert torch.equal(got, wanted), f"{stream.name}, step {step}, microbatch {microbatch}"
        time.sleep(pause_s)
        # Nobody wrote into a slot while it was in use.
        for stream in channel.plan.streams:
            n = rows_of(channel, stream, rows[microbatch])
            assert torch.equal(
                channel.take(stream, microbatch), content(stream, step, microbatch, n, channel.plan.dtype)
            )
        channel.free(microbatch)


def run_steps(channel, steps: int, microbatches: int, pause_s: float) -> list:
    stats = []
    for step in range(steps):
        rows = lengths(step, microbatches)
        with channel.step(rows) as one:
            (consume if channel.is_last else produce)(channel, step, rows, pause_s)
        stats.append(one)
    return stats


def carry(rank, world_size, transport, steps, microbatches, dtype=torch.float32, slow=(), pause_s=0.0):
    """Runs steps; `slow` stages pause after every message. Gives the links' transports and the stats of each step."""
    with channel_of(rank, world_size, transport, dtype) as channel:
        return channel.transports, run_steps(channel, steps, microbatches, pause_s if rank in slow else 0.0)


def taken_late(rank, world_size, transport):
    """Sources fill every slot before the draft looks at any; nobody waits. Gives the stats."""
    with channel_of(rank, world_size, transport) as channel:
        fewest = min(stream.slots for stream in channel.plan.streams)
        rows = lengths(0, fewest)
        with channel.step(rows) as stats:
            if not channel.is_last:
                produce(channel, 0, rows)
            dist.barrier()
            if channel.is_last:
                consume(channel, 0, rows)
        return stats


def set_up(rank, world_size, transport, changes_by_rank):
    """Opens a channel with settings of each rank's own; gives the error."""
    try:
        with channel_of(rank, world_size, transport, **changes_by_rank.get(rank, {})):
            return None
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)


def without_nixl(rank, world_size, missing_on):
    """Sets up `nixl` where one rank has no NIXL package."""
    import sys

    packages = ("nixl", "nixl_cu12", "nixl_cu13")
    hidden = {name: sys.modules.pop(name, None) for name in list(sys.modules) if name.split(".")[0] in packages}
    if rank == missing_on:
        sys.modules |= dict.fromkeys(packages)
    try:
        return set_up(rank, world_size, "nixl", {}), set_up(rank, world_size, "auto", {})
    finally:
        for name in packages:
            sys.modules.pop(name, None)
        sys.modules |= {name: module for name, module in hidden.items() if module is not None}


def full_memory(rank, world_size, transport):
    """Sets up where the kernel says that shared memory is full only when it is asked for pages."""
    import errno

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    allocate = os.posix_fallocate
    os.posix_fallocate = refuse
    try:
        return set_up(rank, world_size, transport, {})
    finally:
        os.posix_fallocate = allocate


def fault(rank, world_size, transport, culprit, how):
    """In the second step a stage dies, raises, hangs, or goes on without sending. Gives the error and its seconds."""
    start = None
    try:
        with channel_of(rank, world_size, transport, timeout_s=3.0 if how == "silent" else 10.0) as channel:
            for step in range(3):
                rows = lengths(step, 8)
                with channel.step(rows):
                    if step == 1:
                        start = time.monotonic()
                    if step == 1 and rank == culprit:
                        if how == "killed":
                            time.sleep(0.5)
                            os.kill(os.getpid(), 9)
                        if how == "raises":
                            raise KeyError("a trouble of its own")
                        if how == "silent":
                            time.sleep(5.6)
                    (consume if channel.is_last else produce)(channel, step, rows)
    except (RuntimeError, KeyError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None


def keep_last_words(folder: str, rank: int) -> None:
    """What this process writes to standard error from now on goes to a file."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY, 0o600), 2)


def stuck_beside_a_dead_stage(rank, world_size, culprit, folder):
    """A stage dies while another waits for a third in the pipeline's own group, where no error reaches it."""
    keep_last_words(folder, rank)
    with channel_of(rank, world_size, "shm", grace_s=1.0) as channel:
        with channel.step(lengths(0, 4)):
            if rank == culprit:
                time.sleep(0.5)
                os.kill(os.getpid(), 9)
            dist.recv(torch.zeros(1), src=(set(range(world_size)) - {rank, culprit}).pop())


def open_and_close(rank, world_size, transport, times):
    """Channels one after the other; gives this process's open files before and after, and its threads."""
    import threading

    def use():
        with channel_of(rank, world_size, transport) as channel:
            run_steps(channel, 1, 4, 0.0)

    use()  # what stays open once
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(times):
        use()
    dist.barrier()
    return before, (len(os.listdir("/proc/self/fd")), threading.active_count())


def two_transports(rank, world_size, transports):
    """Each rank asks for a transport of its own."""
    with channel_of(rank, world_size, transports[rank]):
        pass
