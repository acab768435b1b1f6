"""The `nemo-ext` command.

Bad input ends with a line `error: …` for each trouble on standard error and exit code 2, before any process is started.
Everything heavy (torch, Ray, matplotlib) is imported by the command that needs it, after its input was found good.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from nemo_ext.config import ConfigError, check_output, nearest

# Benchmark -> module with `main(argv) -> exit code`.
BENCHES: dict[str, str] = {
    "loss": "nemo_ext.losses.bench",
    "ring": "nemo_ext.attention.bench",
    "taps": "nemo_ext.local.bench_taps",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    try:
        args = _parse(list(sys.argv[1:] if argv is None else argv))
        return args.run(args)
    except ConfigError as error:
        for line in error.lines:
            print(f"error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are ours."""

    def error(self, message: str):
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="nemo-ext", description="Online draft co-training for NeMo-RL.", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run, help: str, **kwargs) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, allow_abbrev=False, **kwargs)
        added.set_defaults(run=run, command=name, overrides=None)
        return added

    overridden = {"usage": "%(prog)s CONFIG [key=value ...] [options]"}
    train = command("train", _train, "Train as CONFIG says; a run that was stopped goes on.", **overridden)
    compare = command(
        "compare", _compare, "Run CONFIG without, with a frozen, and with a co-trained draft.", **overridden
    )
    for each in (train, compare):
        each.add_argument("config", metavar="CONFIG", help="YAML file; key=value arguments override it")
        each.set_defaults(overrides=[])
    compare.add_argument("--seeds", default="1,2,3", help="like 1,2,3 (default)")

    export = command("export", _export, "Write a run's policy and draft as Hugging Face folders.")
    export.add_argument("folder", metavar="RUN", type=_path, help="folder of a run")
    export.add_argument("--to", metavar="DIR", type=_path, required=True, help="where the folders go")

    report = command("report", _report, "Write the report of a run, or of compared runs, again.")
    report.add_argument("folder", metavar="RUN", type=_path, help="folder of a run, or of compare")
    report.add_argument("--picture", metavar="FILE", type=_path, help="draw the accepted length too (.png or .svg)")

    bench = command("bench", _bench, f"Measure one part: {', '.join(BENCHES)}.", add_help=False)
    bench.add_argument("name", metavar="NAME", nargs="?")
    bench.set_defaults(overrides=[])

    patch = command("patch", _patch, "Put the hooks into a NeMo-RL checkout, or take them out again.")
    patch.add_argument(
        "action",
        metavar="ACTION",
        help="apply, status, check (exit 0: patched whole, 1: would be patched, 2: does not fit), revert, or pin "
        "(maintainers: write patches/VERSION for this commit)",
    )
    patch.add_argument("--upstream", metavar="PATH", type=_path, required=True, help="root of the checkout")
    patch.add_argument(
        "--accept-drift", action="store_true", help="apply: to a commit that is not pinned too, where all fits"
    )
    patch.add_argument("--version", metavar="NAME", help="pin: name of the new version")

    command("version", _version, "Print the version.")

    if argv and not argv[0].startswith("-") and argv[0] not in commands.choices:
        raise ConfigError(f"{argv[0]} is not a command; {nearest(argv[0], commands.choices, 'the commands are')}")
    # Not a positional of argparse: that would end where an option stands between overrides.
    args, rest = parser.parse_known_args(argv)
    wrong = [text for text in rest if args.overrides is None or (text.startswith("-") and args.command != "bench")]
    if wrong:
        raise ConfigError(f"{wrong[0]} is not an argument of {args.command}; see nemo-ext {args.command} --help")
    args.overrides = rest
    return args


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a path")
    return Path(text)


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds is {text}; give different whole numbers, like 1,2,3")
    return seeds


def _load(args: argparse.Namespace):
    from nemo_ext.local.settings_checks import load_run, notes

    config = load_run(args.config, args.overrides)
    for note in notes(config):
        print(f"note: {note}", file=sys.stderr)
    return config


def _train(args: argparse.Namespace) -> int:
    config = _load(args)
    from nemo_ext.local import train

    print(f"report: {train.run(config) / 'report.html'}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    seeds = _seeds(args.seeds)
    config = _load(args)
    if config.policy.generation.vllm_kwargs.speculative_config is None:
        raise ConfigError(
            "policy.generation.vllm_kwargs.speculative_config is null, but compare serves a draft; "
            f"set its method: {config.policy.draft.speculator_type} and num_speculative_tokens"
        )
    from nemo_ext.local import compare, report

    path = compare.run(config, seeds)
    _say(report.finding(path.parent), path)
    return 0


def _export(args: argparse.Namespace) -> int:
    _existing(args.folder)
    from nemo_ext.local import export

    for folder in export.run(args.folder, args.to):
        print(folder)
    return 0


def _report(args: argparse.Namespace) -> int:
    _existing(args.folder)
    if args.picture:
        check_output("--picture", args.picture, (".png", ".svg"))
    from nemo_ext.local import report

    _say(report.finding(args.folder), report.write_again(args.folder))
    if args.picture:
        print(f"picture: {report.write_accepted_length_picture(args.folder, args.picture)}")
    return 0


def _say(finding: str | None, path: Path) -> None:
    if finding:
        print(finding)
    print(f"report: {path}")


def _bench(args: argparse.Namespace) -> int:
    if args.name is None and {"-h", "--help"} & set(args.overrides):
        print(
            f"usage: nemo-ext bench NAME [options]; NAME is one of {', '.join(BENCHES)}, each with a --help of its own"
        )
        return 0
    if args.name is None:
        raise ConfigError(f"NAME is missing; the benchmarks are {', '.join(BENCHES)}")
    if args.name not in BENCHES:
        raise ConfigError(f"{args.name} is not a benchmark; {nearest(args.name, BENCHES, 'the benchmarks are')}")
    return import_module(BENCHES[args.name]).main(args.overrides)


def _patch(args: argparse.Namespace) -> int:
    from nemo_ext.nemo_rl import patch_cli

    return patch_cli.run(args.action, args.upstream, accept_drift=args.accept_drift, version=args.version)


def _version(args: argparse.Namespace) -> int:
    print(version("nemo-ext"))
    return 0


def _existing(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"RUN is {folder}: no such folder; name the folder of a run, like runs/NAME")
