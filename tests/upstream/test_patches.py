"""The patch command on copies of the real checkout. `NEMO_RL_PRISTINE` is the one that was never patched."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nemo_ext import cli
from nemo_ext.nemo_rl import patching
from nemo_ext.nemo_rl.patch_set import PATCHES

PRISTINE = Path(os.environ["NEMO_RL_PRISTINE"])
PATCH_SET = patching.recognise(PRISTINE).patches
TOUCHED = PATCH_SET.files[1].path


def tree(root: Path) -> dict:
    """Every file's bytes and mode."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode)
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "RL"
    shutil.copytree(PRISTINE / "nemo_rl", root / "nemo_rl", symlinks=True)
    return root


def patch(action: str, root: Path) -> int:
    return cli.main(["patch", action, "--upstream", str(root)])


def test_patches_apply_are_idempotent_and_revert_to_the_very_bytes(checkout):
    before = tree(checkout)
    assert patch("apply", checkout) == 0
    once = tree(checkout)
    changed = {path for path in once if once[path] != before.get(path)}
    assert changed == {file.path for file in PATCH_SET.files} and set(once) == set(before)
    assert patch("check", checkout) == 0
    assert patch("apply", checkout) == 0
    assert tree(checkout) == once
    assert patch("revert", checkout) == 0
    assert tree(checkout) == before
    assert patch("revert", checkout) == 0
    assert tree(checkout) == before


def test_git_gives_the_same_files(checkout):
    files = sorted((PATCHES / PATCH_SET.version).glob("*.patch"))
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)
    subprocess.run(["git", "-C", checkout, "apply", "--unidiff-zero", *files], check=True)
    assert patch("check", checkout) == 0


def another_version(root):
    for file in PATCH_SET.files:
        with (root / file.path).open("a") as text:
            text.write("\n")


def dirty(root):
    with (root / TOUCHED).open("a") as text:
        text.write("# a change of the user's\n")


def half_patched(root):
    shutil.copy(PRISTINE / TOUCHED, root / "untouched")
    patching.apply(root)
    shutil.move(root / "untouched", root / TOUCHED)


def read_only(root):
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o555)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            another_version,
            "is none of the supported versions of NeMo-RL; check out one of main-7ea279abf (7ea279abf), v0.7.0",
        ),
        (dirty, f"{TOUCHED} differs from that of {PATCH_SET.version}; save what you need"),
        (half_patched, f"is half patched: {len(PATCH_SET.files) - 1} of {len(PATCH_SET.files)} files"),
        (read_only, "is read-only"),
    ],
)
def test_refusals_are_one_line_and_change_nothing(checkout, capsys, spoil, told):
    spoil(checkout)
    before = tree(checkout)
    code = patch("apply", checkout)
    after = tree(checkout)
    for folder, _, _ in os.walk(checkout):
        os.chmod(folder, 0o755)
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and told in lines[0]
    assert after == before


def test_nothing_of_upstreams_stands_in_this_repository():
    """No line of code of 55 characters or more but imports and the heads of overridden methods."""
    here = Path(__file__).parents[2]
    ours = [path for folder in ("nemo_ext", "tests", "ci", "patches") for path in (here / folder).rglob("*")]
    theirs = {line.strip() for path in PRISTINE.rglob("*.py") for line in path.read_text(errors="ignore").splitlines()}
    assert len(theirs) > 30_000
    same = [
        (path.name, line)
        for path in ours
        if path.suffix in (".py", ".sh", ".patch")
        for line in (text.lstrip("+").strip() for text in path.read_text().splitlines())
        if len(line) >= 55 and line in theirs and not line.startswith(("from ", "import ", "def "))
    ]
    assert same == []
