"""`nemo-ext bench loss`: memory and time of the block drafts' chunked loss against the whole one; on the CPU.

Each measure is of a process of its own. The whole form is measured at as many rows as fit into half of the free memory, and
at half as many: where those are fewer than asked for, its figures at all rows follow from the line through both points.
"""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from multiprocessing import get_context

import torch

from nemo_ext.config import ConfigError
from nemo_ext.losses.measure import TERMS, Measure, Work, measure, memory

# Copies of the logits, in float32, that the whole form holds at its peak.
_DENSE_COPIES = {"dflash": 6, "dspark": 9}
MEMORY_GOAL, TIME_GOAL = 1 / 8, 1.2


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark and prints its figures. Raises ConfigError for arguments that cannot be run."""
    args = _parse(argv)
    work = Work(args.draft, args.rows, args.vocab, args.hidden, args.markov_rank, args.chunk_rows)
    figures = compare(work, args.dense_rows or _fitting_rows(work), args.threads)
    print(json.dumps(figures, indent=2) if args.json else _text(figures))
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{message}; see nemo-ext bench loss --help")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="nemo-ext bench loss", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--draft", choices=list(TERMS), default="dflash", help="whose loss (default %(default)s)")
    parser.add_argument("--rows", type=int, default=8192, help="drafted tokens (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=151936, help="(default %(default)s)")
    parser.add_argument("--hidden", type=int, default=1024, help="(default %(default)s)")
    parser.add_argument("--markov-rank", type=int, help="of dspark (default 256)")
    parser.add_argument("--chunk-rows", type=int, default=256, help="logits at once (default %(default)s)")
    parser.add_argument("--dense-rows", type=int, help="of the whole form (default: as many as fit)")
    parser.add_argument("--threads", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(list(argv))
    if args.draft == "dflash" and args.markov_rank is not None:
        raise ConfigError(
            f"--markov-rank is {args.markov_rank}, which dflash does not have; leave it out, or use --draft dspark"
        )
    args.markov_rank = 256 if args.markov_rank is None else args.markov_rank
    for name in ("rows", "vocab", "hidden", "markov_rank", "chunk_rows", "threads"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use 1 or more")
    if args.dense_rows is not None and not 2 <= args.dense_rows <= args.rows:
        raise ConfigError(f"--dense-rows is {args.dense_rows}; use 2 to --rows {args.rows}")
    return args


def _fitting_rows(work: Work) -> int:
    """As many of the rows, halved again and again, as the whole form can hold in half of the free memory."""
    free = memory("MemAvailable", "/proc/meminfo")
    rows = work.rows
    while rows > 2 and rows * work.vocab * 4 * _DENSE_COPIES[work.kind] > free / 2:
        rows //= 2
    return rows


def compare(work: Work, dense_rows: int, threads: int) -> dict:
    """All figures of one run, as they are printed by `--json`."""
    chunked = _alone(work, "chunked", threads)
    some = replace(work, rows=dense_rows)
    dense, one_chunk = _alone(some, "dense", threads), _alone(some, "one_chunk", threads)
    chunked_some = chunked if some == work else _alone(some, "chunked", threads)
    whole = dense
    if some != work:
        whole = _line(_alone(replace(work, rows=dense_rows // 2), "dense", threads), dense, dense_rows, work.rows)
    return {
        "setup": asdict(work) | {
            "threads": threads, "dense_rows": dense_rows, "torch": torch.__version__, "machine": platform.machine(),
            "cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1),
        },
        "memory": {
            "goal": MEMORY_GOAL, "ratio": chunked.peak_bytes / whole.peak_bytes, "chunked_bytes": chunked.peak_bytes,
            "dense_bytes": whole.peak_bytes, "dense_extrapolated": some != work,
        },
        "time": {
            "goal": TIME_GOAL, "rows": dense_rows, "ratio": chunked_some.seconds / dense.seconds,
            "cpu_ratio": chunked_some.cpu_seconds / dense.cpu_seconds, "chunked_seconds": chunked_some.seconds,
            "dense_seconds": dense.seconds,
        },
        "same": {
            "loss": abs(chunked_some.loss - dense.loss) / abs(dense.loss),
            "gradient_norm": abs(chunked_some.gradient_norm - dense.gradient_norm) / dense.gradient_norm,
        },
        "measured": {
            "chunked": asdict(chunked), "chunked_at_dense_rows": asdict(chunked_some), "one_chunk": asdict(one_chunk),
            "dense": asdict(dense),
        },
    }  # fmt: skip


def _line(half: Measure, full: Measure, rows: int, wanted: int) -> Measure:
    """The whole form's memory at `wanted` rows, on the line through its points at `rows // 2` and `rows`."""
    slope = (full.peak_bytes - half.peak_bytes) / (rows - rows // 2)
    return replace(full, peak_bytes=round(full.peak_bytes + slope * (wanted - rows)))


def _alone(work: Work, form: str, threads: int) -> Measure:
    """One measure in a fresh process, whose peak memory is its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(measure, work, form, threads).result()
        except RuntimeError as error:
            if not isinstance(error, BrokenProcessPool) and "allocate memory" not in str(error):
                raise
            raise ConfigError(
                f"the {form} form at --rows {work.rows} has most likely too little memory; "
                + ("set --dense-rows to less" if form != "chunked" else "set --rows or --chunk-rows to less")
            ) from None


def _text(figures: dict) -> str:
    setup, memory, time_, same = figures["setup"], figures["memory"], figures["time"], figures["same"]
    measured, gib = figures["measured"], 2**30
    how = f"from {setup['dense_rows']} and half as many" if memory["dense_extrapolated"] else "measured"
    return "\n".join(
        [
            "{kind}: {rows} rows, vocabulary {vocab}, hidden size {hidden}, chunks of {chunk_rows}, {threads} threads on "
            "{cores} cores; load {load_1min}".format(**setup),
            f"peak memory over the inputs   {memory['chunked_bytes'] / gib:.2f} GiB chunked, "
            f"{memory['dense_bytes'] / gib:.2f} GiB whole ({how})",
            f"  chunked over whole          1/{1 / memory['ratio']:.1f}  (goal <= 1/{1 / memory['goal']:.0f})",
            f"time at {time_['rows']} rows            {time_['chunked_seconds']:.1f} s chunked, "
            f"{time_['dense_seconds']:.1f} s whole",
            f"  chunked over whole          {time_['ratio']:.2f}  (CPU time {time_['cpu_ratio']:.2f}, "
            f"goal <= {time_['goal']})",
            f"all rows, chunked             {measured['chunked']['seconds']:.1f} s",
            f"relative difference           loss {same['loss']:.1e}, gradient {same['gradient_norm']:.1e}",
        ]
    )
