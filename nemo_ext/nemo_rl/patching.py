"""Recognises an upstream checkout by the hashes of its files, and patches it or takes the patches out: whole or not at all."""

import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nemo_ext.nemo_rl.patch.drift import survey
from nemo_ext.nemo_rl.patch.record import RECORD, read_record, record_text
from nemo_ext.nemo_rl.patch_set import FilePatch, PatchError, PatchSet, Unrecognised, digest, patch_sets

UNPATCHED, PATCHED = "unpatched", "patched"


@dataclass(frozen=True)
class Checkout:
    """A checkout that is one of the pinned versions, or whose drift was accepted: `unpatched` or `patched`."""

    root: Path
    patches: PatchSet
    state: str


def recognise(root: Path, sets: Sequence[PatchSet] | None = None) -> Checkout:
    """Reads the checkout and changes nothing. One whose drift was accepted is known by the record in it.

    Raises:
        Unrecognised: it is another version, or changed in a file that is to be patched.
        PatchError: it is no checkout of NeMo-RL, or half patched.
    """
    sets = patch_sets() if sets is None else sets
    if not (root / "nemo_rl").is_dir():
        raise PatchError(f"--upstream is {root}, which has no folder nemo_rl; give the root of a NeMo-RL checkout")
    links = [file.path for patches in sets for file in patches.files if (root / file.path).is_symlink()]
    if links:
        raise PatchError(f"{links[0]} is a symbolic link; put the file itself in its place")
    hashes = {path: _hash(root / path) for path in patched_paths(sets)}
    try:
        return _pinned(root, sets, hashes)
    except PatchError:
        recorded = _recorded(root, read_record(root, set(hashes)), hashes)
        if recorded is None:
            raise
        return recorded


def patched_paths(sets: Sequence[PatchSet]) -> list[str]:
    """The files that any of these patches touches."""
    return list(dict.fromkeys(file.path for patches in sets for file in patches.files))


def _pinned(root: Path, sets: Sequence[PatchSet], hashes: Mapping[str, str | None]) -> Checkout:
    """One of the pinned versions. Raises PatchError."""
    best = max(sets, key=lambda patches: sum(_state(file, hashes) is not None for file in patches.files))
    states = {file.path: _state(file, hashes) for file in best.files}
    known = [path for path, state in states.items() if state is not None]
    if len(known) <= len(states) // 2:
        versions = ", ".join(f"{patches.version} ({patches.commit[:9]})" for patches in sets)
        raise Unrecognised(f"{root} is none of the supported versions of NeMo-RL; check out one of {versions}")
    changed = [path for path, state in states.items() if state is None]
    if changed:
        what = "is missing" if hashes[changed[0]] is None else f"differs from that of {best.version}"
        raise Unrecognised(f"{changed[0]} {what}; {_way_back(root, best, changed)}")
    return _whole(root, best, states)


def _recorded(root: Path, patches: PatchSet | None, hashes: Mapping[str, str | None]) -> Checkout | None:
    """A checkout whose drift was accepted; None where no patched file is left of it. Raises PatchError for a changed one."""
    if patches is None:
        return None
    states = {file.path: _state(file, hashes) for file in patches.files}
    if PATCHED not in states.values():
        return None
    changed = [path for path, state in states.items() if state is None]
    if changed:
        raise PatchError(f"{changed[0]} was changed since it was patched; {_way_back(root, patches, list(states))}")
    return _whole(root, patches, states)


def _whole(root: Path, patches: PatchSet, states: Mapping[str, str | None]) -> Checkout:
    """Raises PatchError for a checkout that is half patched."""
    patched = [path for path, state in states.items() if state == PATCHED]
    if patched and len(patched) < len(states):
        raise PatchError(
            f"{root} is half patched: {len(patched)} of {len(states)} files, {patched[0]} is among them; "
            f"{_way_back(root, patches, list(states))}"
        )
    return Checkout(root, patches, PATCHED if patched else UNPATCHED)


def _way_back(root: Path, patches: PatchSet, paths: Sequence[str]) -> str:
    if not (root / ".git").exists() or not patches.commit:
        origin = "the commit that it was" if patches.drifted else patches.version
        return f"save what you need of your changes, and take {' '.join(paths)} from {origin} anew"
    return (
        "save what you need of your changes, which this discards: "
        f"git -C {root} checkout {patches.commit[:9]} -- {' '.join(paths)}"
    )


def apply(root: Path, sets: Sequence[PatchSet] | None = None, *, accept_drift: bool = False) -> tuple[Checkout, bool]:
    """Patches a checkout; one that is patched stays as it is. Returns it and whether anything was done.

    Args:
        accept_drift: patch a checkout that is at no pinned version too, where everything that the patches count on is
            found in it.

    Raises PatchError, and leaves every byte as it was, if it cannot be done whole.
    """
    sets = patch_sets() if sets is None else sets
    try:
        checkout = recognise(root, sets)
    except Unrecognised as error:
        found = survey(root, sets)
        if found is None:
            raise
        if not (accept_drift and found.fits):
            raise PatchError(f"{error}; {found.advice}") from None
        checkout = Checkout(root, found.patches, UNPATCHED)
    return _transform(checkout, PATCHED)


def revert(root: Path, sets: Sequence[PatchSet] | None = None) -> tuple[Checkout, bool]:
    """Takes the patches out, and the record of a drift; the counterpart of `apply`."""
    return _transform(recognise(root, sets), UNPATCHED)


def _transform(checkout: Checkout, wanted: str) -> tuple[Checkout, bool]:
    if checkout.state == wanted:
        return checkout, False
    new: dict[Path, bytes | None] = {}
    for file in checkout.patches.files:
        path = checkout.root / file.path
        text = path.read_bytes()
        new[path] = file.apply(text) if wanted == PATCHED else file.revert(text)
    record = checkout.root / RECORD
    if wanted == PATCHED and checkout.patches.drifted:
        new[record] = record_text(checkout.patches)
    elif record.exists():
        new[record] = None
    _replace(new)
    return Checkout(checkout.root, checkout.patches, wanted), True


def _replace(new: Mapping[Path, bytes | None]) -> None:
    """Writes all files beside the old ones, then exchanges them; what was exchanged goes back if one fails.

    None stands for a file that is to go; a file that is not there yet is made.
    """
    staged: dict[Path, Path] = {}
    old: dict[Path, Path] = {}
    done: list[Path] = []
    path = next(iter(new))
    try:
        for path, text in new.items():
            _require_writable(path)
            if text is not None:
                staged[path] = _beside(path, text)
        for path in new:
            if path.exists():
                old[path] = _beside(path, path.read_bytes())
        for path, text in new.items():
            if text is None:
                os.unlink(path)
            else:
                os.replace(staged[path], path)
                del staged[path]
            done.append(path)
    except OSError as error:
        for path_done in done:
            if path_done in old:
                os.replace(old.pop(path_done), path_done)
            else:
                os.unlink(path_done)
        raise PatchError(f"{path} cannot be written ({error.strerror or error}); nothing was changed") from None
    finally:
        for leftover in (*staged.values(), *old.values()):
            with suppress(OSError):
                leftover.unlink()


def _require_writable(path: Path) -> None:
    """Root may write everywhere, but a read-only checkout is meant to stay as it is."""
    for one in (path, path.parent) if path.exists() else (path.parent,):
        if not one.stat().st_mode & 0o222 or not os.access(one, os.W_OK):
            raise PermissionError(None, f"{one} is read-only")


def _beside(path: Path, text: bytes) -> Path:
    """A file in the same folder with this text and the mode of `path`, or that of any new file."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644)
    return Path(name)


def _hash(path: Path) -> str | None:
    return digest(path.read_bytes()) if path.is_file() else None


def _state(file: FilePatch, hashes: Mapping[str, str | None]) -> str | None:
    return {file.before: UNPATCHED, file.after: PATCHED}.get(hashes[file.path])
