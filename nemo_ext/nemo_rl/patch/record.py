"""The record that an accepted drift leaves in the checkout: what its files were, and what was inserted where.

`status`, `check` and `revert` know a drifted checkout by it, as they know a pinned one by its manifest.
"""

import json
import tomllib
from pathlib import Path

from nemo_ext.nemo_rl.patch_set import FilePatch, Insertion, PatchError, PatchSet

RECORD = ".nemo_ext_patches.toml"
_HEAD = """\
# Written by `nemo-ext patch apply --accept-drift`. `nemo-ext patch revert` takes the inserted lines out of this checkout
# and removes this file.
"""


def record_text(patches: PatchSet) -> bytes:
    """The record's file."""
    lines = [_HEAD, f"nearest = {_text(patches.version)}", f"vllm = {_text(patches.vllm)}"]
    lines.append(f"commit = {_text(patches.commit)}")
    for file in patches.files:
        lines += ["", "[[file]]"]
        lines += [f"{name} = {_text(getattr(file, name))}" for name in ("path", "before", "after")]
        for one in file.insertions:
            lines += ["", "[[file.insertion]]", f"after = {one.after}", "lines = ["]
            lines += [f"    {_text(line)}," for line in one.lines] + ["]"]
    return ("\n".join(lines) + "\n").encode()


def _text(value: str) -> str:
    """A TOML string; JSON's escapes are TOML's, but for DEL."""
    return json.dumps(value, ensure_ascii=True).replace("\x7f", "\\u007f")


def read_record(root: Path, known: set[str]) -> PatchSet | None:
    """The drift that was accepted for this checkout; None where none was.

    Args:
        known: the files that patches may touch; a record that names another one is none of ours.

    Raises:
        PatchError: the record is not as it was written.
    """
    file = root / RECORD
    if not file.is_file() or file.is_symlink():
        return None
    try:
        told = tomllib.loads(file.read_text())
        files = tuple(
            FilePatch(
                one["path"],
                one["before"],
                one["after"],
                tuple(Insertion(int(each["after"]), tuple(each["lines"])) for each in one["insertion"]),
            )
            for one in told["file"]
        )
        patches = PatchSet(told["nearest"], told["commit"], files, told["vllm"], drifted=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchError(f"{file} is not as it was written ({error!r}); {_anew(root)}") from None
    if not files or not {one.path for one in files} <= known:
        raise PatchError(f"{file} names files that no patch touches; {_anew(root)}")
    return patches


def _anew(root: Path) -> str:
    return f"check the five patched files out anew and remove {root / RECORD}"
