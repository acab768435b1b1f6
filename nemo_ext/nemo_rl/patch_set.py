"""One pinned upstream version's patches: the manifest, and the insert-only patch files that it lists.

A patch file is a zero-context unified diff that only inserts lines, so it has no text of upstream's and `git apply
--unidiff-zero` takes it too. Where it may land is decided by the file's SHA-256 alone.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).parent / "patches"
_HUNK = re.compile(r"@@ -(\d+),0 \+(\d+),(\d+) @@")


class PatchError(ValueError):
    """The checkout, or a patch file, is not as it must be; nothing was changed. One line."""


class Unrecognised(PatchError):
    """The checkout is at no pinned version, or changed in a file that is to be patched."""


@dataclass(frozen=True)
class Insertion:
    """`lines` go after line `after` (from 1; 0 is the top) of the unpatched file."""

    after: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class FilePatch:
    """What happens to one file of the checkout.

    Attributes:
        path: relative to the checkout.
        before, after: SHA-256 of the file without and with the insertions.
    """

    path: str
    before: str
    after: str
    insertions: tuple[Insertion, ...]

    def apply(self, text: bytes) -> bytes:
        """The patched file. Raises PatchError if the result is not the manifest's."""
        return self._checked(inserted(text, self.insertions), self.after)

    def revert(self, text: bytes) -> bytes:
        """The unpatched file. Raises PatchError if the result is not the manifest's."""
        lines = text.splitlines(keepends=True)
        for one in self.insertions:
            del lines[one.after : one.after + len(one.lines)]
        return self._checked(b"".join(lines), self.before)

    def _checked(self, text: bytes, expected: str) -> bytes:
        if digest(text) != expected:
            raise PatchError(f"the patch of {self.path} does not give the file that its manifest names")
        return text


@dataclass(frozen=True)
class PatchSet:
    """All patches of one upstream version, in order.

    Attributes:
        version: of upstream; for a drifted checkout that of the nearest pinned one.
        commit: of upstream.
        vllm: version of its engine.
        folder: where the manifest is.
        drifted: the patches were placed in a checkout that is at no pinned version.
    """

    version: str
    commit: str
    files: tuple[FilePatch, ...]
    vllm: str = ""
    folder: Path | None = None
    drifted: bool = False


def patch_sets(root: Path = PATCHES) -> list[PatchSet]:
    """Every version's patches, by version."""
    return [read_patch_set(manifest.parent) for manifest in sorted(root.glob("*/manifest.toml"))]


def read_patch_set(folder: Path) -> PatchSet:
    """The patches of one folder. Raises PatchError for a file that does more than insert lines."""
    manifest = tomllib.loads((folder / "manifest.toml").read_text())
    files = tuple(
        FilePatch(one["path"], one["before"], one["after"], tuple(_insertions(folder / one["file"], one["path"])))
        for one in manifest["patch"]
    )
    return PatchSet(manifest["version"], manifest["commit"], files, manifest.get("vllm", ""), folder)


def _insertions(file: Path, path: str) -> Iterator[Insertion]:
    lines = file.read_text().splitlines()
    if lines[:2] != [f"--- a/{path}", f"+++ b/{path}"]:
        raise PatchError(f"{file.name} must be a patch of {path} alone")
    rest = lines[2:]
    while rest:
        hunk = _HUNK.fullmatch(rest[0])
        count = int(hunk[3]) if hunk else 0
        added = rest[1 : 1 + count]
        if not hunk or len(added) < count or not all(line.startswith("+") for line in added):
            raise PatchError(f"{file.name} must only insert lines, without context; it has {rest[0]!r}")
        yield Insertion(int(hunk[1]), tuple(line[1:] for line in added))
        rest = rest[1 + count :]


def inserted(text: bytes, insertions: Sequence[Insertion]) -> bytes:
    """The text with the lines of all insertions, which are in the order of their places."""
    lines = text.splitlines(keepends=True)
    for one in reversed(insertions):
        lines[one.after : one.after] = [line.encode() + b"\n" for line in one.lines]
    return b"".join(lines)


def digest(text: bytes) -> str:
    """SHA-256, as manifests have it."""
    return hashlib.sha256(text).hexdigest()
