"""Tries the patches on commits of upstream between the pinned versions: which do they fit, and does what was applied work?

    python ci/regression/drift.py --upstream CLONE [--commits N] [--before N] [--only COMMIT ...] [--tests FILE ...]
        [--environment DIR] [--out FILE]

Every commit is checked, and so are --before N older ones. --commits N of them (default 60; all that touch a patched file
first, then an even spread), and all that are taken for a pinned version by their hashes, are patched with --accept-drift
where the patches fit, tested with tests/upstream/test_hooks.py or --tests, and reverted to the very bytes. A commit whose
files that the tests import are those of one that was run has its result without a run of its own. One JSON object a commit
goes to FILE, and what stands there already is not done again; the last lines say what came of it all. Exit code 1 if a
commit was accepted and is broken.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))

from nemo_ext.nemo_rl import patching  # noqa: E402
from nemo_ext.nemo_rl.patch.drift import survey  # noqa: E402
from nemo_ext.nemo_rl.patch_set import PatchError, Unrecognised, patch_sets  # noqa: E402

TAKEN = ("nemo_rl", "examples", "pyproject.toml")
CONFIGS = "examples/configs"
TESTS = "tests/upstream/test_hooks.py"
FIXED = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "NVTE_FRAMEWORK": "pytorch",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--upstream", type=Path, required=True, help="a clone that has the pinned commits and main")
    parser.add_argument("--commits", type=int, default=60, help="how many are patched and tested")
    parser.add_argument("--before", type=int, default=0, help="how many commits from before the pins' merge base, too")
    parser.add_argument("--only", nargs="+", default=[], help="these commits, instead of all")
    parser.add_argument("--tests", nargs="+", default=[TESTS], help="test files of this repository")
    parser.add_argument("--environment", type=Path, help="has env and megatron (default: environment.sh makes it)")
    parser.add_argument("--out", type=Path, default=HERE / ".cache/regression/drift.jsonl")
    args = parser.parse_args(argv)
    if args.environment is None:
        made = subprocess.run(
            ["bash", HERE / "ci/regression/environment.sh"], stdout=subprocess.PIPE, text=True, check=True
        )
        args.environment = Path(made.stdout.strip())
    sets = patch_sets()
    touched = patching.patched_paths(sets)
    if args.only:
        commits = [git(args.upstream, "rev-parse", f"{commit}^{{commit}}").strip() for commit in args.only]
        chosen = set(commits)
    else:
        commits = list(history(args.upstream, sets, args.before))
        chosen = spread(commits, touching(args.upstream, commits, touched), args.commits)
    done = {one["commit"]: one for one in read(args.out)}
    runs: dict[tuple, dict] = {}  # imported files -> what the tests said
    for index, commit in enumerate(commits):
        if commit in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "RL"
            export(args.upstream, commit, root)
            entry = {"commit": commit, "date": date(args.upstream, commit), **checked(root, sets)}
            if entry["fits"] and (commit in chosen or entry["pinned"]):
                entry |= tried(root, args.environment, args.tests, runs)
        done[commit] = entry
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{index + 1}/{len(commits)} {commit[:9]} {entry['told']} {entry.get('tests', '')}", flush=True)
    return summary([done[commit] for commit in commits])


def git(clone: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(clone), *arguments], capture_output=True, text=True, check=True).stdout


def history(clone: Path, sets, before: int) -> Iterator[str]:
    """Commits from the pins' merge base to the newer one, on the branch of the newer one, and the release branch's;
    and `before` older ones."""
    pins = sorted(
        (one.commit for one in sets), key=lambda commit: int(git(clone, "show", "-s", "--format=%ct", commit))
    )
    base = git(clone, "merge-base", *pins).strip()
    yield from reversed(git(clone, "rev-list", "--first-parent", f"--max-count={before + 1}", base).split())
    for pin in reversed(pins):
        yield from git(clone, "rev-list", "--first-parent", "--reverse", f"{base}..{pin}").split()


def touching(clone: Path, commits: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Those commits that change one of these files."""
    changed = git(clone, "rev-list", *commits[-1:], *commits, "--", *paths).split()
    return [commit for commit in commits if commit in set(changed)]


def spread(commits: Sequence[str], first: Sequence[str], count: int) -> set[str]:
    """`count` of the commits: the first ones, evenly thinned if there are more, and then an even spread."""
    chosen = set(evenly(first, count))
    return chosen | set(evenly([commit for commit in commits if commit not in chosen], count - len(chosen)))


def evenly(items: Sequence[str], count: int) -> list[str]:
    count = max(0, min(count, len(items)))
    return [items[index * len(items) // count] for index in range(count)]


def date(clone: Path, commit: str) -> str:
    return git(clone, "show", "-s", "--format=%cs", commit).strip()


def export(clone: Path, commit: str, root: Path) -> None:
    root.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", str(clone), "archive", commit, *TAKEN], capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(root)], input=archive, check=True)


def checked(root: Path, sets) -> dict:
    """What `patch check` finds."""
    try:
        checkout = patching.recognise(root, sets)
        return {"fits": True, "pinned": True, "told": f"has the files of {checkout.patches.version}"}
    except Unrecognised:
        found = survey(root, sets)
    except PatchError as error:
        return {"fits": False, "pinned": False, "told": f"refused: {error}"}
    near = found.nearest.version if found.nearest else "none"
    told = f"fits, near {near}" if found.fits else f"refused: {found.troubles[0]}"
    return {
        "fits": found.fits,
        "pinned": False,
        "near": near,
        "told": told,
        "troubles": found.troubles,
        "notes": found.notes,
    }


def tried(root: Path, environment: Path, tests: Sequence[str], runs: dict[tuple, dict]) -> dict:
    """Applies, checks again, runs the tests, reverts."""
    sets = patch_sets()
    before = files(root)
    patching.apply(root, sets, accept_drift=True)
    applied = patching.recognise(root, sets).state == patching.PATCHED
    patched = {path: sha256(root / path) for path in patching.patched_paths(sets)}
    known = next(
        (result for seen, result in runs.items() if fingerprint(root, [path for path, _ in seen]) == seen), None
    )
    result = known or tested(root, environment, tests)
    if known is None:
        runs[fingerprint(root, [*result["imported"], *configs(root)])] = result
    patching.revert(root, sets)
    return {
        "applied": applied,
        "patched": patched,
        "reverted": files(root) == before,
        "tests": result["tests"],
        "failed": result["failed"],
        "seconds": result["seconds"],
        "as_another": known is not None,
    }


def files(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode)
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    }


def configs(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in (root / CONFIGS).glob("*.yaml"))


def fingerprint(root: Path, paths: Sequence[str]) -> tuple:
    return tuple((path, sha256(root / path)) for path in sorted(paths))


def sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def tested(root: Path, environment: Path, tests: Sequence[str]) -> dict:
    """The tests against the patched checkout, in the regression environment."""
    stubs = HERE / "ci/regression/stubs"
    imported = root.parent / "imported.txt"
    path = os.pathsep.join(map(str, (stubs, root, environment / "megatron", HERE)))
    settings = {"PYTHONPATH": path, "NEMO_RL_UPSTREAM": str(root), "NEMO_RL_IMPORTED": str(imported)}
    started = time.perf_counter()
    python = str(environment / "env/bin/python")
    done = subprocess.run(
        ["nice", "-n", "10", python, "-m", "pytest", "-p", "imported", "-p", "no:cacheprovider", "--timeout", "400"]
        + ["-o", "addopts=", "-W", "ignore", *tests],
        cwd=HERE,
        env=os.environ | FIXED | settings,
        capture_output=True,
        text=True,
    )
    last = done.stdout.strip().splitlines()
    failed = [line for line in last if line.startswith(("FAILED", "ERROR"))] or ["no test ran"]
    return {
        "tests": last[-1].strip("= ") if last else "nothing ran",
        "failed": failed if done.returncode else [],
        "imported": imported.read_text().split("\n") if imported.is_file() else [],
        "seconds": round(time.perf_counter() - started, 1),
    }


def read(file: Path) -> list[dict]:
    """What an earlier run that was cut short has found."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def summary(entries: Sequence[dict]) -> int:
    fit = [one for one in entries if one["fits"]]
    tried_ones = [one for one in entries if "tests" in one]
    wrong = [one for one in tried_ones if one["failed"] or not one["applied"] or not one["reverted"]]
    alike = sum(one["as_another"] for one in tried_ones)
    pinned = sum(one["pinned"] for one in fit)
    print(
        f"{len(entries)} commits: the patches fit {len(fit)} ({pinned} by the files' hashes) and not {len(entries) - len(fit)}"
    )
    for reason, count in Counter(one["told"] for one in entries if not one["fits"]).most_common():
        print(f"  {count} {reason}")
    print(
        f"{len(tried_ones)} of those that fit were patched, tested and reverted ({alike} of them import the very files of "
        f"another one): {len(tried_ones) - len(wrong)} pass, {len(wrong)} were accepted wrongly"
    )
    for one in wrong:
        print(f"  {one['commit'][:9]}: {one['tests']} {one['failed'][:2]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
