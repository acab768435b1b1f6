"""`nemo-ext bench ring`: what the ring costs over the bare kernel, gains from ranks, sends, and holds; on CPU ranks.

Every number is of this run. Times are of forward and backward together, one thread a rank, the fastest of the repeats.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from nemo_ext.attention.measure import WAYS, Measure, Work, kernel_alone, measure_rank, whole_ring
from nemo_ext.attention.merge import wide_dtype
from nemo_ext.attention.plans import CausalPlan
from nemo_ext.config import ConfigError
from nemo_ext.layout import PackedLayout

BALANCE_TOKENS = 262144
DENSE_LIMIT = 4 << 30  # bytes of the dense mask that a rank may hold


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark and prints its figures. Raises ConfigError for arguments that cannot be run."""
    args = _parse(argv)
    work = Work(args.tokens, args.heads, args.key_heads, args.head_dim, getattr(torch, args.dtype))
    figures = measure(work, args.cp, args.repeats, args.ways.split(","))
    print(json.dumps(figures, indent=2) if args.json else _text(figures))
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{message}; see nemo-ext bench ring --help")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="nemo-ext bench ring", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=16384, help="of one sequence (default %(default)s)")
    parser.add_argument("--cp", type=int, default=2, help="ranks (default %(default)s)")
    parser.add_argument("--heads", type=int, default=1, help="query heads (default %(default)s)")
    parser.add_argument("--key-heads", type=int, default=1, help="key heads (default %(default)s)")
    parser.add_argument("--head-dim", type=int, default=32, help="(default %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(default %(default)s)")
    parser.add_argument("--repeats", type=int, help="runs of each measure (default: 5, fewer for many tokens)")
    parser.add_argument("--ways", default=",".join(WAYS), help="of these, the ones to run (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(list(argv))
    unknown = [way for way in args.ways.split(",") if way not in WAYS]
    if unknown or not args.ways.startswith("ring"):
        raise ConfigError(f"--ways is {args.ways}; use ring, and after it any of {', '.join(list(WAYS)[1:])}")
    if args.cp < 2 or args.tokens < 2 * args.cp or args.tokens % (2 * args.cp):
        raise ConfigError(
            f"--tokens is {args.tokens} and --cp {args.cp}; use 2 or more ranks and a multiple of 2 x ranks"
        )
    if min(args.heads, args.key_heads, args.head_dim) < 1 or args.heads % args.key_heads:
        raise ConfigError(
            f"--heads is {args.heads}, --key-heads {args.key_heads} and --head-dim {args.head_dim}; use numbers from 1 up, "
            "and heads that are a multiple of the key heads"
        )
    if args.repeats is not None and args.repeats < 1:
        raise ConfigError(f"--repeats is {args.repeats}; use 1 or more")
    if args.repeats is None:
        args.repeats = max(1, min(5, (1 << 35) // args.tokens**2))
    return args


def measure(work: Work, cp: int, repeats: int, ways: Sequence[str]) -> dict:
    """All figures of one run, as they are printed by `--json`."""
    rows = work.tokens // cp
    mask = rows * work.tokens * (1 + work.dtype.itemsize)  # booleans, and what they are added to the scores as
    skipped = "dense" in ways and mask > DENSE_LIMIT
    ways = [way for way in ways if not (skipped and way == "dense")]
    alone, ours = _one_rank(work, repeats)
    per_way = _on_ranks(work, ways, repeats, cp)
    ring = per_way["ring"]

    wide = wide_dtype(work.dtype).itemsize
    bound = (cp - 1) * work.shard_bytes(rows)  # 2 (C - 1) / C x S x kv, for keys and values once round
    backward_bound = bound + bound // work.dtype.itemsize * wide
    floor = work.own_bytes(rows) + 2 * work.shard_bytes(rows)
    return {
        "setup": {
            "tokens": work.tokens, "cp": cp, "heads": work.heads, "key_heads": work.key_heads,
            "head_dim": work.head_dim, "dtype": str(work.dtype).removeprefix("torch."), "repeats": repeats,
            "torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count(),
            "load_1min": round(os.getloadavg()[0], 1),
        },
        "one_rank_over_kernel": {
            "goal": 1.10, "ratio": ours[0] / alone[0], "cpu_ratio": ours[1] / alone[1],
            "seconds": ours[0], "kernel_seconds": alone[0],
        },
        "speed_up": {
            "goal": 1.8 if cp == 2 else None,
            "ratio": ours[0] / max(m.seconds for m in ring),
            "cpu_ratio": ours[1] / max(m.cpu_seconds for m in ring),
            "one_rank_seconds": ours[0], "seconds": max(m.seconds for m in ring),
        },
        "flops_max_over_mean": {"goal": 1.02, "tokens": BALANCE_TOKENS} | balance(),
        "bytes_over_bound": {
            "goal": 1.0,
            "forward": max(m.forward_bytes for m in ring) / bound,
            "backward": max(m.backward_bytes for m in ring) / backward_bound,
            "forward_bytes": max(m.forward_bytes for m in ring), "forward_bound": bound,
            "backward_bytes": max(m.backward_bytes for m in ring), "backward_bound": backward_bound,
        },
        "peak_over_floor": {
            "goal": 1.25, "ratio": max(m.peak_bytes for m in ring) / floor,
            "bytes": max(m.peak_bytes for m in ring), "floor": floor,
        },
        "ways": {
            way: {
                "seconds": max(m.seconds for m in measures),
                "cpu_seconds": max(m.cpu_seconds for m in measures),
                "sent_bytes": max(m.forward_bytes + m.backward_bytes for m in measures),
                "peak_bytes": max(m.peak_bytes for m in measures),
            }
            for way, measures in per_way.items()
        } | ({"dense": {"not_run": f"its mask alone is {mask / 2**30:.1f} GiB a rank"}} if skipped else {}),
    }  # fmt: skip


def balance() -> dict[str, dict[str, float]]:
    """The most over the mean of the ranks' visible pairs, counted in the kernel calls of every rank's every step."""
    packs = {"one sequence": [BALANCE_TOKENS], "ragged pack": _ragged(BALANCE_TOKENS)}
    found: dict[str, dict[str, float]] = {}
    for cp in (2, 4, 8, 16, 32, 64):
        for name, lengths in packs.items():
            pairs = []
            for rank in range(cp):
                plan = CausalPlan(PackedLayout(lengths, cp_size=cp, cp_rank=rank))
                pairs.append(sum(spans.pairs() for step in range(cp) for spans in plan.calls(step)))
            found.setdefault(name, {})[f"cp {cp}"] = max(pairs) * cp / sum(pairs)
    return found


def _ragged(tokens: int) -> list[int]:
    """Eight sequences from 1/32 of the tokens up, of odd lengths."""
    shares = [1, 1, 2, 3, 4, 5, 7, 9]
    return [tokens * share // sum(shares) - 7 for share in shares]


def _one_rank(work: Work, repeats: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """`(wall, CPU seconds)` of the bare kernel and of our attention, in turns, so that a busy machine hits both."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runs = kernel_alone(work), whole_ring(work)
    small = Work(256, work.heads, work.key_heads, work.head_dim, work.dtype)
    kernel_alone(small)(), whole_ring(small)()
    best = [(float("inf"), float("inf"))] * 2
    for _ in range(repeats):
        for n, run in enumerate(runs):
            start, cpu_start = time.perf_counter(), time.process_time()
            run()
            took = time.perf_counter() - start, time.process_time() - cpu_start
            best[n] = min(best[n][0], took[0]), min(best[n][1], took[1])
    torch.set_num_threads(threads)
    return best[0], best[1]


def _on_ranks(work: Work, ways: Sequence[str], repeats: int, cp: int) -> dict[str, list[Measure]]:
    """Each way's measure on every rank of a gloo group of this machine."""
    os.environ["KINETO_LOG_LEVEL"] = "6"  # nothing on standard error
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (work, list(ways), repeats, cp, folder), nprocs=cp)
        per_rank = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(cp)]
    return {way: [Measure(**one[way]) for one in per_rank] for way in ways}


def _rank(rank: int, work: Work, ways: list[str], repeats: int, cp: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", cp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=cp, timeout=timedelta(hours=1))
    small = Work(64 * cp, work.heads, work.key_heads, work.head_dim, work.dtype)
    measures = {}
    for way in ways:
        measure_rank(small, way, 1, dist.group.WORLD)
        measures[way] = asdict(measure_rank(work, way, repeats, dist.group.WORLD))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(measures))
    dist.destroy_process_group()


def _text(figures: dict) -> str:
    setup, kernel, speed = figures["setup"], figures["one_rank_over_kernel"], figures["speed_up"]
    sent, peak, balanced = figures["bytes_over_bound"], figures["peak_over_floor"], figures["flops_max_over_mean"]
    goal = f", goal >= {speed['goal']}" if speed["goal"] else ""
    lines = [
        "{tokens} tokens, {cp} ranks of one thread on {cores} cores, {heads} query and {key_heads} key heads of "
        "{head_dim}, {dtype}, best of {repeats}; load {load_1min}".format(**setup),
        f"one rank over the bare kernel   {kernel['ratio']:.3f}  (CPU time {kernel['cpu_ratio']:.3f}, goal <= 1.10)",
        f"{setup['cp']} ranks over one             {speed['ratio']:.2f}x  (CPU time {speed['cpu_ratio']:.2f}x{goal})",
        f"bytes sent over the bound       {sent['forward']:.3f} forward, {sent['backward']:.3f} backward  (goal 1)",
        f"peak memory over the floor      {peak['ratio']:.3f}  (goal <= 1.25)",
    ]
    for name in ("one sequence", "ragged pack"):
        worst = max(balanced[name].values())
        lines.append(
            f"FLOPs max/mean, {name:14}  {worst:.4f}  ({balanced['tokens']} tokens, 2 to 64 ranks, goal <= 1.02)"
        )
    lines.append(f"\n{'per rank':10}{'seconds':>10}{'CPU seconds':>14}{'sent MiB':>12}{'peak MiB':>12}")
    for way, cost in figures["ways"].items():
        if "not_run" in cost:
            lines.append(f"{way:10}not run: {cost['not_run']}")
        else:
            sizes = f"{cost['sent_bytes'] / 2**20:>12.1f}{cost['peak_bytes'] / 2**20:>12.1f}"
            lines.append(f"{way:10}{cost['seconds']:>10.2f}{cost['cpu_seconds']:>14.2f}{sizes}")
    return "\n".join(lines)
