"""Says in plain lines what a regression run did, from pytest's JUnit files, into `told.txt` beside them.

    python ci/regression/told.py subclasses|upstream RESULTS VERSION [LIST]
    python ci/regression/told.py list RESULTS VERSION LIST      # writes the numbers of the unpatched checkout's run down

Exits with 1 if anything failed, was skipped or did not run.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from nemo_ext.nemo_rl.patch_set import PATCHES, read_patch_set

# What a line says -> JUnit file, test module, beginning of the tests' names. The first that fits has the test.
LINES = {
    "patches{patches}: apply, idempotent, revert to the very bytes": (
        "subclasses",
        "test_patches",
        "test_patches_apply",
    ),
    "nothing of upstream's stands in this repository": ("subclasses", "test_patches", "test_nothing_of_upstreams"),
    "patches: refused whole for wrong version, dirty file, half-applied state, read-only checkout; git applies them too": (
        "subclasses",
        "test_patches",
        "",
    ),
    "drift: signatures read off the source are those of the imported functions": (
        "subclasses",
        "test_drift",
        "test_signatures_read_off",
    ),
    "drift: harmless changes are patched and reverted to the very bytes": (
        "subclasses",
        "test_drift",
        "test_a_harmless",
    ),
    "drift: changes that would break the patches are refused": ("subclasses", "test_drift", ""),
    "signature lock: what is overridden or called is as it was written for": (
        "subclasses",
        "test_hooks",
        "test_everything_of_upstreams",
    ),
    "hooks: upstream's path with the draft off, ours with it on": ("subclasses", "test_hooks", ""),
    "recipes: start with their policies' published configs, up to the first process": (
        "subclasses",
        "test_recipes",
        "test_it_starts",
    ),
    "policy families: a draft of every kind, or the line that says why not": (
        "subclasses",
        "test_recipes",
        "test_every_",
    ),
    "policy families: as the pinned engine's source has them": ("subclasses", "test_engine_families", ""),
    "recipes: valid against upstream's own schema": ("subclasses", "test_recipes", ""),
    "draft loss: one pass equals upstream's own EAGLE-3": ("subclasses", "test_policy_worker", "test_one_pass"),
    "policy worker: steps of upstream's own train in all layouts, refit stream, checkpoints": (
        "subclasses",
        "test_policy_worker",
        "",
    ),
    "facts of the engine, by reading its source": ("subclasses", "test_engine_facts", ""),
    **{
        f"{{engine}}, {runner.upper()} runner: {text}": (f"engine_{runner}", module, prefix)
        for runner in ("v1", "v2")
        for text, module, prefix in (
            (
                "refits of EAGLE-3 through both transports, announcement, torn and wrong streams, accepted length",
                "test_backend",
                "",
            ),
            (
                "EAGLE-3, train = serve at every depth, before and after refits; what cannot be is refused",
                "test_train_is_serve",
                "test_eagle3",
            ),
            (
                "DFlash and DSpark, train = serve in every slot, before and after refits; what cannot be is refused",
                "test_train_is_serve",
                "test_block",
            ),
        )
    },
}


def outcomes(file: Path) -> dict[tuple[str, str], str]:
    """`(class, test) -> passed | failed | skipped` of one JUnit file; nothing if pytest did not get as far."""
    if not file.is_file():
        return {}
    found = {}
    for case in ElementTree.parse(file).iter("testcase"):
        kinds = {child.tag for child in case}
        result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[case.get("classname"), case.get("name")] = result
    return found


def subclasses(results: Path, version: str) -> tuple[list[str], bool]:
    """Lines about this package's own tests, and whether all is well."""
    files = read_patch_set(PATCHES / version).files
    inserted = sum(len(one.lines) for file in files for one in file.insertions)
    number = (results / "engine.txt").read_text().strip()
    engine = f"vLLM {number} on a CPU"
    runners = ("engine_v1",) if number.startswith("0.20.") else ("engine_v1", "engine_v2")
    left = {name: outcomes(results / f"{name}.xml") for name in ("subclasses", *runners)}
    lines, good = [], True
    for text, (name, module, prefix) in LINES.items():
        if name not in left:
            continue
        of_line = [key for key in left[name] if key[0].endswith("." + module) and key[1].startswith(prefix)]
        counts = Counter(left[name].pop(key) for key in of_line)
        text = text.format(patches=f" {len(files)} ({inserted} lines)", engine=engine)
        lines.append(f"{text}: " + (", ".join(f"{counts[kind]} {kind}" for kind in counts) or "did not run"))
        good &= set(counts) == {"passed"}
    rest = {key: kind for name in left for key, kind in left[name].items()}
    lines += [f"{'.'.join(key)}: {kind}" for key, kind in rest.items()]
    return lines, good and not rest


def upstream(results: Path, listed: Path) -> tuple[list[str], bool]:
    """Lines about upstream's own tests. They must pass after the patches as before, as many as the list says, file by file."""
    before, after = outcomes(results / "before.xml"), outcomes(results / "after.xml")
    passed = [{key for key, kind in found.items() if kind == "passed"} for found in (before, after)]
    lines = [
        f"upstream tests: {len(passed[0])} passed before, {len(passed[1])} passed after ({listed.parent.name}/{listed.name})"
    ]
    lines += [
        f"  {'.'.join(key)}: {before[key]} before, {after.get(key, 'did not run')} after"
        for key in sorted(before)
        if before[key] != after.get(key)
    ]
    for expected, path in read_list(listed):
        count = passed_of(path, before)
        if count < expected:
            lines.append(f"  {path}: {count} passed, but {expected} are listed")
    return lines, len(lines) == 1


def read_list(listed: Path) -> list[tuple[int, str]]:
    """Number of passing tests and path of each file of upstream's that is run."""
    return [(int(count), path) for count, path in (line.split() for line in listed.read_text().splitlines())]


def passed_of(path: str, found: dict[tuple[str, str], str]) -> int:
    """How many of a file's tests passed."""
    module = path.removesuffix(".py").replace("/", ".") + "."
    # A test class follows the module in JUnit's class names.
    return sum(kind == "passed" and (key[0] + ".").startswith(module) for key, kind in found.items())


def main(part: str, results: str, version: str, listed: str = "") -> int:
    """Writes the lines and prints them; for `list` the list's numbers instead."""
    folder = Path(results)
    if part == "list":
        before = outcomes(folder / "before.xml")
        paths = [path for _, path in read_list(Path(listed))]
        Path(listed).write_text("".join(f"{passed_of(path, before)} {path}\n" for path in paths))
        return 0
    lines, good = subclasses(folder, version) if part == "subclasses" else upstream(folder, Path(listed))
    with (folder / "told.txt").open("a") as file:
        for line in lines:
            print(f"{version} {line}")
            file.write(f"{version} {line}\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
