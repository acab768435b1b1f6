"""Makes a new pinned version out of a checkout, for maintainers: patch files, manifest and lock."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from nemo_ext.nemo_rl.patch import drift
from nemo_ext.nemo_rl.patch.places import Found, Place, locate
from nemo_ext.nemo_rl.patch.signature_lock import LOCK, lock_of
from nemo_ext.nemo_rl.patch.source import NotFound, Source
from nemo_ext.nemo_rl.patch_set import PATCHES, PatchError, PatchSet, digest, inserted


def write_pin(
    root: Path, sets: Sequence[PatchSet], version: str, *, accept_changes: bool = False, to: Path | None = None
) -> tuple[Path, list[str]]:
    """Writes `patches/<version>/` for an unpatched checkout that is at no pinned version.

    Args:
        accept_changes: lock signatures and code as they are now, and take places whose anchors changed, because the
            package was adapted to them. A place must still be the only one, and every fact must hold.
        to: instead of the folder of the known versions.

    Returns the folder, and a line for each change that was accepted.

    Raises:
        PatchError: nothing was written.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", version):
        raise PatchError(f"--version is {version}; give letters, digits, dots, dashes and underscores")
    base = to if to is not None else _folder(sets)
    folder = base / version
    if folder.exists():
        raise PatchError(f"--version is {version}, and there is {folder} already; give another name")
    commit = drift.head(root)
    if commit is None:
        raise PatchError(f"--upstream is {root}, of which git cannot tell the commit; give a clone")
    found = drift.survey(root, sets)
    if found is None or found.nearest is None:
        trouble = found.troubles[0] if found else "no pinned version describes its places"
        raise PatchError(f"{root} cannot be pinned: {trouble}")
    if found.edited:
        raise PatchError(f"{found.edited[0]} has changes that are not committed; pin what upstream has")
    if not found.fits and not accept_changes:
        raise PatchError(f"{found.troubles[0]}; adapt the package to it, and then pin with --accept-drift")
    near = drift.described(found.nearest)
    checkout = Source(root)
    try:
        placed = {
            file.path: [
                locate(checkout.read(file.path), file.path, place, one.lines, relock=True)
                for place, one in zip(near.places[file.path], file.insertions, strict=True)
            ]
            for file in found.nearest.files
        }
        broken = list(drift.facts.broken(checkout))
        if broken:
            raise NotFound(broken[0])
        lock = lock_of(checkout)
    except NotFound as error:
        raise PatchError(f"{root} cannot be pinned: {error}") from None
    names = [path.name for path in sorted(found.nearest.folder.glob("*.patch"))]
    folder.mkdir(parents=True)
    for name, (path, places) in zip(names, placed.items(), strict=True):
        (folder / name).write_text(_patch_text(path, places))
    files = [
        (name, path, checkout.read(path), places) for name, (path, places) in zip(names, placed.items(), strict=True)
    ]
    (folder / "manifest.toml").write_text(_manifest(version, commit, found.vllm, files))
    (folder / LOCK).write_text(lock_text(lock))
    return folder, [f"accepted: {line}" for line in (*found.missing, *found.changes)]


def _folder(sets: Sequence[PatchSet]) -> Path:
    return next((one.folder.parent for one in sets if one.folder is not None), PATCHES)


def lock_text(lock: dict) -> str:
    """The file of a lock."""
    return json.dumps(lock, indent=2, sort_keys=True) + "\n"


def _patch_text(path: str, places: Sequence[Found]) -> str:
    """A zero-context diff that only inserts."""
    text, shift = f"--- a/{path}\n+++ b/{path}\n", 0
    for one in (place.insertion for place in places):
        text += f"@@ -{one.after},0 +{one.after + shift + 1},{len(one.lines)} @@\n"
        text += "".join(f"+{line}\n" for line in one.lines)
        shift += len(one.lines)
    return text


def _manifest(version: str, commit: str, vllm: str, files: Sequence[tuple[str, str, bytes, Sequence[Found]]]) -> str:
    lines = [f'version = "{version}"', f'upstream = "{version}"', f'commit = "{commit}"', f'vllm = "{vllm}"']
    for name, path, text, places in files:
        after = digest(inserted(text, [place.insertion for place in places]))
        lines += ["", "[[patch]]", f'file = "{name}"', f'path = "{path}"']
        lines += [f'before = "{digest(text)}"', f'after = "{after}"']
        for one in places:
            lines += ["", "[[patch.place]]", *place_lines(one.place)]
    return "\n".join(lines) + "\n"


def place_lines(place: Place) -> list[str]:
    """A place in a manifest."""
    lines = [f"{name} = {json.dumps(getattr(place, name))}" for name in ("inside", "at")]
    lines += [
        f"{name} = {json.dumps(value)}"
        for name in ("name", "anchor", "above", "scope")
        if (value := getattr(place, name))
    ]
    if place.made:
        made = ", ".join(f"{name} = {json.dumps(list(keywords))}" for name, keywords in place.made.items())
        lines.append(f"made = {{ {made} }}")
    return lines
