"""`nemo-ext patch ACTION --upstream PATH`: what is said, and the exit code."""

from collections.abc import Sequence
from pathlib import Path

from nemo_ext.config import ConfigError, nearest
from nemo_ext.nemo_rl import patching
from nemo_ext.nemo_rl.patch.drift import Survey, survey
from nemo_ext.nemo_rl.patch.pin import write_pin
from nemo_ext.nemo_rl.patch_set import PatchError, PatchSet, Unrecognised

ACTIONS = ("apply", "status", "check", "revert", "pin")


def run(
    action: str,
    upstream: Path,
    sets: Sequence[PatchSet] | None = None,
    *,
    accept_drift: bool = False,
    version: str | None = None,
) -> int:
    """Runs one action; `sets` are the patches to know, by default the package's own.

    Args:
        accept_drift: for `apply`: patch a checkout at no pinned version too. For `pin`: lock signatures that changed.
        version: for `pin`: name of the new version.

    Returns 0; for `check` 1 where the patches could be applied, and 2 where they do not fit.

    Raises:
        ConfigError: there is no such action, or the checkout is none that the patches fit. Nothing was changed.
    """
    if action not in ACTIONS:
        raise ConfigError(f"{action} is not an action of patch; {nearest(action, ACTIONS, 'the actions are')}")
    if accept_drift and action not in ("apply", "pin"):
        raise ConfigError(f"--accept-drift is not for {action}; it goes with apply, and with pin")
    if (version is None) == (action == "pin"):
        raise ConfigError(
            "--version is not set; name the new version, like main-0123abcd"
            if action == "pin"
            else f"--version is not for {action}; the version is recognised"
        )
    root = upstream.expanduser().resolve()
    sets = patching.patch_sets() if sets is None else sets
    try:
        if action == "pin":
            return _pin(root, sets, version, accept_drift)
        if action == "apply":
            return _done(*patching.apply(root, sets, accept_drift=accept_drift))
        if action == "revert":
            return _done(*patching.revert(root, sets))
        return _look(action, root, sets)
    except PatchError as error:
        raise ConfigError(str(error)) from None


def _done(checkout: patching.Checkout, done: bool) -> int:
    files = len(checkout.patches.files)
    print(f"{_name(checkout)}: {checkout.state}{'' if done else ' already'} ({files} files)")
    return 0


def _look(action: str, root: Path, sets: Sequence[PatchSet]) -> int:
    """`check` and `status`."""
    try:
        checkout = patching.recognise(root, sets)
    except Unrecognised as error:
        found = survey(root, sets)
        if found is None:
            raise
        if action == "status":
            if not found.fits:
                raise PatchError(f"{error}; {found.advice}") from None
            print(f"{root} is near NeMo-RL {found.nearest.version}: unpatched, and apply --accept-drift would patch it")
            return 0
        return _told(found, patched=False)
    print(f"{_name(checkout)}: {checkout.state}")
    if action == "status":
        return 0
    if checkout.state != patching.PATCHED:
        return 1
    if not checkout.patches.drifted:
        return 0
    # The record tells the patched files; all others may have moved on since.
    unpatched = {file.path: file.revert((root / file.path).read_bytes()) for file in checkout.patches.files}
    return _told(survey(root, sets, unpatched), patched=True)


def _told(found: Survey, *, patched: bool) -> int:
    """Prints what was found in a drifted checkout; the exit code."""
    if found.nearest is None:
        print(f"{found.root} is no pinned version of NeMo-RL")
    elif not patched:
        print(f"{found.root} is no pinned version of NeMo-RL; nearest: {found.nearest.version} (vLLM {found.vllm})")
    for path in found.edited or ():
        print(f"{path}: not committed; commit or discard your changes of it first")
    if found.edited is None:
        print("without git nobody can tell upstream's changes from yours")
    for line in found.found:
        print(line)
    for line in found.missing:
        print(f"NOT FOUND {line}")
    for line in found.changes:
        print(f"CHANGED {line}")
    if found.nearest is not None and not found.changes:
        print("signatures, and all else that is counted on: as written for")
    for line in found.notes:
        print(f"note: {line}")
    if not found.fits:
        print("the patches do not fit" + ("; revert, and check out a commit that they fit" if patched else ""))
        return 2
    if not patched:
        print(f"the patches fit: nemo-ext patch apply --upstream {found.root} --accept-drift")
    return 0 if patched else 1


def _pin(root: Path, sets: Sequence[PatchSet], version: str, accept_drift: bool) -> int:
    try:
        checkout = patching.recognise(root, sets)
    except Unrecognised:
        folder, lines = write_pin(root, sets, version, accept_changes=accept_drift)
        for line in lines:
            print(line)
        print(f"{folder}: written; add {version} to VERSIONS in nemo_ext/nemo_rl/support.py, and run ci/regression.sh")
        return 0
    raise PatchError(f"{_name(checkout)} and {checkout.state}; pin takes an unpatched checkout of another version")


def _name(checkout: patching.Checkout) -> str:
    near = "near " if checkout.patches.drifted else ""
    return f"{checkout.root} is {near}NeMo-RL {checkout.patches.version}"
