"""Whether patches fit a checkout that is at no pinned version: each place, each signature, and all else that they count on.

The pinned version that is held against it is the one with the same vLLM: what a draft can do hangs on the engine.
"""

import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nemo_ext.nemo_rl.patch import facts, signature_lock
from nemo_ext.nemo_rl.patch.engine import vllm_version
from nemo_ext.nemo_rl.patch.places import Place, locate
from nemo_ext.nemo_rl.patch.signature_lock import read_lock
from nemo_ext.nemo_rl.patch.source import NotFound, Source
from nemo_ext.nemo_rl.patch_set import FilePatch, PatchSet, digest, inserted


@dataclass(frozen=True)
class Description:
    """What a pinned version's folder says for checkouts near it.

    Attributes:
        vllm: version of its engine.
        places: of each file's insertions, by path.
        lock: see `signature_lock`.
    """

    patches: PatchSet
    vllm: str
    places: Mapping[str, tuple[Place, ...]]
    lock: dict


@dataclass
class Survey:
    """What was found in a checkout.

    Attributes:
        nearest: the pinned version that was held against it; None if no one has its engine.
        vllm: version of its engine.
        found: for each patch that has its place, a line on how it was found.
        missing: for each patch that has none, a line on why.
        changes: a line for each signature, function or fact that is not as it was written for.
        notes: lines on what nobody has looked at, and which keeps nothing from being patched.
        edited: patched files that differ from HEAD; None where git cannot tell.
        patches: for this very checkout; None unless every place was found.
    """

    root: Path
    nearest: PatchSet | None = None
    vllm: str = ""
    found: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    edited: list[str] | None = None
    patches: PatchSet | None = None

    @property
    def troubles(self) -> list[str]:
        """All that keeps the patches from being applied."""
        edits = [f"{path} has changes that are not committed" for path in self.edited or ()]
        return [*edits, *self.missing, *self.changes]

    @property
    def fits(self) -> bool:
        return not self.troubles and self.patches is not None

    @property
    def advice(self) -> str:
        """Ends the line that says that this is no pinned version."""
        if self.fits:
            near = f"nearest: {self.nearest.version}, which has its vLLM {self.vllm}"
            own = "" if self.edited is not None else "; without git nobody can tell upstream's changes from yours"
            return f"or apply with --accept-drift: all that the patches count on is found in it ({near}{own})"
        rest = len(self.troubles) - 1
        more = f", and {rest} more that patch check tells" if rest else ""
        return f"nor do the patches fit it as it is: {self.troubles[0]}{more}"


def described(patches: PatchSet) -> Description | None:
    """None for a version whose folder says nothing for checkouts near it."""
    if patches.folder is None:
        return None
    manifest = tomllib.loads((patches.folder / "manifest.toml").read_text())
    lock = read_lock(patches.folder)
    places = {one["path"]: tuple(Place(**place) for place in one.get("place", ())) for one in manifest["patch"]}
    return Description(patches, patches.vllm, places, lock) if lock is not None and patches.vllm else None


def survey(root: Path, sets: Sequence[PatchSet], instead: Mapping[str, bytes] | None = None) -> Survey | None:
    """Looks at a checkout and changes nothing. None where no pinned version says anything for checkouts near it.

    Args:
        instead: the unpatched text of files that are patched, by path.
    """
    known = [one for one in map(described, sets) if one is not None]
    if not known:
        return None
    result = Survey(root)
    checkout = Source(root, instead)
    paths = list(dict.fromkeys(path for one in known for path in one.places))
    result.edited = [] if instead else edited(root, paths)
    try:
        result.vllm = vllm_version(root)
    except NotFound as error:
        result.changes.append(str(error))
        return result
    near = next((one for one in known if one.vllm == result.vllm), None)
    if near is None:
        versions = " and ".join(f"{one.vllm} ({one.patches.version})" for one in known)
        result.changes.append(f"pyproject.toml pins vLLM {result.vllm}; drafts were tried with {versions}")
        return result
    result.nearest = near.patches
    files = [_placed(checkout, file, near.places[file.path], result) for file in near.patches.files]
    if not result.missing:
        result.patches = PatchSet(near.patches.version, head(root) or "", tuple(files), near.vllm, drifted=True)
    locks = [one.lock for one in known]
    result.changes += [*signature_lock.changes(checkout, locks), *facts.broken(checkout)]
    new = list(signature_lock.new_settings(checkout, locks))
    if new:
        result.notes.append(f"settings that no pinned version has, with which no draft was tried: {', '.join(new)}")
    return result


def _placed(checkout: Source, file: FilePatch, places: Sequence[Place], result: Survey) -> FilePatch | None:
    """The patch for this checkout's file. What was found, or is missing, is added to the result."""
    try:
        text = checkout.read(file.path)
        if b"nemo_ext" in text:
            raise NotFound("it has lines of nemo_ext already, and no record of them; check it out anew")
        if len(places) != len(file.insertions):
            raise NotFound("the manifest describes no place for it")
        found = [locate(text, file.path, place, one.lines) for place, one in zip(places, file.insertions, strict=True)]
    except NotFound as error:
        result.missing.append(f"{file.path}: {error}")
        return None
    insertions = tuple(sorted((one.insertion for one in found), key=lambda one: one.after))
    for one in found:
        result.found.append(f"{file.path}:{one.insertion.after + 1}: {one.place.where}: {one.how}")
    return FilePatch(file.path, digest(text), digest(inserted(text, insertions)), insertions)


def edited(root: Path, paths: Sequence[str]) -> list[str] | None:
    """Those of the files that differ from HEAD. None where git cannot tell."""
    told = _git(root, "diff", "--name-only", "--no-ext-diff", "HEAD", "--", *paths)
    return None if told is None else told.splitlines()


def head(root: Path) -> str | None:
    """The commit that is checked out. None where git cannot tell."""
    told = _git(root, "rev-parse", "HEAD")
    return told and told.strip()


def _git(root: Path, *arguments: str) -> str | None:
    if not (root / ".git").exists():
        return None  # git would go up to a repository that this folder only lies in
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
