"""`nemo-ext bench taps`: what carrying taps to the last pipeline stage costs a training step; on CPU ranks.

The same batch is trained five ways, in turns: the policy alone; with taps that nobody reads, by TapChannel and by blocking
sends inside the forward; and with the draft, by both. Every number is of this run; a step is as long as its slowest rank.
"""

import argparse
import json
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.multiprocessing

from nemo_ext.config import ConfigError, check_output, default_taps
from nemo_ext.local.bench_taps_figures import BenchSize, measure, trace_rows
from nemo_ext.taps.trace import write_trace


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark and prints its figures. Raises ConfigError for arguments that cannot be run."""
    args = _parse(argv)
    size = BenchSize(
        _hf_config(args), tuple(args.taps), args.pp, args.microbatches, args.tokens, args.passes, args.transport
    )
    ranks = _on_ranks(size, args.repeats)
    figures = measure(size, ranks, args.repeats)
    if args.trace:
        write_trace(args.trace, trace_rows(ranks))
    if args.picture:
        from nemo_ext.local.bench_taps_picture import draw

        draw(args.picture, trace_rows(ranks))
    print(json.dumps(figures, indent=2) if args.json else _text(figures))
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{message}; see nemo-ext bench taps --help")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="nemo-ext bench taps", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of a microbatch (default %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of the policy (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="size, a multiple of 64 (default %(default)s)")
    parser.add_argument("--passes", type=int, default=3, help="of the draft (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each way (default %(default)s)")
    parser.add_argument("--transport", choices=["auto", "shm", "p2p", "nixl"], default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace that Perfetto opens")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the trace (.png or .svg)")
    args = parser.parse_args(list(argv))
    least = min(args.microbatches, args.passes, args.repeats, args.layers)
    if args.pp < 2 or args.layers % args.pp or args.tokens < 16 or least < 1:
        raise ConfigError(
            f"--pp is {args.pp}, --layers {args.layers}, --tokens {args.tokens}; use 2 or more stages, layers that they "
            "divide, 16 or more tokens, and at least 1 of everything else"
        )
    if args.picture:
        check_output("--picture", args.picture, (".png", ".svg"))
    if args.trace:
        check_output("--trace", args.trace)
    if args.hidden < 64 or args.hidden % 64:
        raise ConfigError(f"--hidden is {args.hidden}; use a multiple of 64")
    args.taps = default_taps(args.layers)
    return args


def _hf_config(args: argparse.Namespace) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": args.hidden,
        "intermediate_size": 2 * args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 64,
        "num_key_value_heads": max(args.hidden // 128, 1),
        "head_dim": 64,
        "max_position_embeddings": args.tokens,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _on_ranks(size: BenchSize, repeats: int) -> list[dict]:
    """What each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (size, repeats, folder), nprocs=size.pp)
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(size.pp)]


def _rank(rank: int, size: BenchSize, repeats: int, folder: str) -> None:
    from nemo_ext.local.bench_taps_rank import run_rank

    torch.set_num_threads(1)
    times = run_rank(rank, size.pp, f"file://{folder}/store", size, repeats)
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(times))


def _text(figures: dict) -> str:
    setup, cotrain, sent = figures["setup"], figures["cotrain_over_policy"], figures["bytes_per_microbatch"]
    kinds = ", ".join(f"stage {stage} by {kind}" for stage, kind in setup["transport"].items())
    lines = [
        "{pp} stages of one thread on {cores} cores, {microbatches} microbatches of {tokens} tokens, {layers} layers of "
        "{hidden}, taps {tap_layers}, best of {repeats}; load {load_1min}".format(**setup),
        f"taps go from {kinds}",
        "",
        f"{'':18}{'seconds':>9}{'over policy':>13}{'CPU, likewise':>14}",
    ]
    policy, cpu = figures["step_seconds"]["policy"]["best"], figures["step_seconds"]["policy"]["cpu"]
    for way, taken in figures["step_seconds"].items():
        lines.append(f"{way:18}{taken['best']:>9.3f}{taken['best'] / policy:>13.3f}{taken['cpu'] / cpu:>14.3f}")
    waits = figures["waits_per_step"]["cotrain"]
    lines += [
        "",
        f"taps that nobody reads, over the policy alone   {figures['taps_over_policy']['ratio']:.3f}  (goal <= 1.03)",
        f"co-training adds {cotrain['added_seconds']:.3f} s; the draft computes for "
        f"{cotrain['draft_compute_seconds']:.3f} s and waits for taps for {cotrain['tap_wait_seconds']:.4f} s",
        f"bytes per microbatch over k*s*h*b + (s+halo)*h*b   {sent['ratio']:.3f}  ({sent['sent'] / 2**20:.2f} MiB)",
        f"per step: hooks write for {waits['hooks_writing']:.4f} s, sources wait for credit for "
        f"{waits['sources_for_credit']:.4f} s",
    ]
    return "\n".join(lines)
