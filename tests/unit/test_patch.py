"""The patch tool on a small stand-in for a checkout; the real ones are patched in tests/upstream."""

import ast
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from nemo_ext import cli
from nemo_ext.nemo_rl import hooks, patching
from nemo_ext.nemo_rl.patch_set import PatchError, digest, patch_sets, read_patch_set

FILES = {
    "nemo_rl/one.py": ("a = 1\nb = 2\n", {1: ["hook_one()"]}),
    "nemo_rl/sub/two.py": ("c = 3\nd = 4\ne = 5\n", {0: ["top()"], 3: ["x", "y"]}),
    "nemo_rl/three.py": ("f = 6\n", {1: ["end()"]}),
}


@pytest.fixture
def main(monkeypatch, sets):
    """The command, with the patches of these tests as the package's own."""
    monkeypatch.setattr(patching, "patch_sets", lambda: sets)
    return cli.main


def patched(text, insertions):
    lines = text.splitlines()
    for after in sorted(insertions, reverse=True):
        lines[after:after] = insertions[after]
    return "".join(line + "\n" for line in lines)


def write_patches(folder, files=FILES, version="v1", commit="0123456789abcdef"):
    folder.mkdir(parents=True)
    manifest = [f'version = "{version}"', f'commit = "{commit}"']
    for number, (path, (text, insertions)) in enumerate(files.items()):
        body, shift = f"--- a/{path}\n+++ b/{path}\n", 0
        for after, lines in sorted(insertions.items()):
            body += f"@@ -{after},0 +{after + shift + 1},{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)
            shift += len(lines)
        (folder / f"{number}.patch").write_text(body)
        manifest += [
            "[[patch]]",
            f'file = "{number}.patch"',
            f'path = "{path}"',
            f'before = "{digest(text.encode())}"',
            f'after = "{digest(patched(text, insertions).encode())}"',
        ]
    (folder / "manifest.toml").write_text("\n".join(manifest))


def tree(root):
    """Every file's bytes and mode, and every folder."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode) if path.is_file() else None
        for path in root.rglob("*")
    }


@pytest.fixture
def sets(tmp_path):
    write_patches(tmp_path / "patches" / "v1")
    other = {path: (text + "# of version 2\n", lines) for path, (text, lines) in FILES.items()}
    write_patches(tmp_path / "patches" / "v2", other, version="v2", commit="fedcba9876543210")
    return patch_sets(tmp_path / "patches")


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "RL"
    for path, (text, _) in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "nemo_rl/three.py").chmod(0o750)
    (root / "README.md").write_text("untouched\n")
    return root


def test_apply_inserts_the_lines_and_revert_gives_the_very_bytes_back(checkout, sets):
    before = tree(checkout)
    found, done = patching.apply(checkout, sets)
    assert (found.patches.version, found.state, done) == ("v1", "patched", True)
    for path, (text, insertions) in FILES.items():
        assert (checkout / path).read_text() == patched(text, insertions)
    assert set(tree(checkout)) == set(before)
    assert (checkout / "nemo_rl/three.py").stat().st_mode & 0o777 == 0o750
    assert patching.revert(checkout, sets)[1]
    assert tree(checkout) == before


def test_apply_and_revert_are_idempotent(checkout, sets):
    assert not patching.revert(checkout, sets)[1]
    patching.apply(checkout, sets)
    once = tree(checkout)
    assert not patching.apply(checkout, sets)[1]
    assert tree(checkout) == once


def test_versions_are_told_by_hashes(checkout, sets):
    for path, (text, _) in FILES.items():
        (checkout / path).write_text(text + "# of version 2\n")
    assert patching.recognise(checkout, sets).patches.version == "v2"


def test_git_takes_the_patches_too(checkout, sets, tmp_path):
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)
    files = sorted((tmp_path / "patches" / "v1").glob("*.patch"))
    subprocess.run(["git", "-C", checkout, "apply", "--unidiff-zero", *files], check=True)
    assert patching.recognise(checkout, sets).state == "patched"


def wrong_version(root):
    for path in FILES:
        (root / path).write_text("something else\n")


def dirty_file(root):
    (root / "nemo_rl/sub/two.py").write_text("c = 3\n")


def missing_file(root):
    (root / "nemo_rl/three.py").unlink()


def half_patched(root):
    path = "nemo_rl/one.py"
    text, insertions = FILES[path]
    other = patched(text, insertions) if (root / path).read_text() == text else text
    (root / path).write_text(other)


def symbolic_link(root):
    (root / "nemo_rl/one.py").rename(root / "elsewhere.py")
    (root / "nemo_rl/one.py").symlink_to(root / "elsewhere.py")


def read_only(root):
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o555)


def no_checkout(root):
    (root / "nemo_rl").rename(root / "elsewhere")


@pytest.mark.parametrize("action", ["apply", "revert"])
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (wrong_version, "none of the supported versions of NeMo-RL; check out one of v1 (012345678), v2 (fedcba987)"),
        (dirty_file, "nemo_rl/sub/two.py differs from that of v1"),
        (missing_file, "nemo_rl/three.py is missing"),
        (half_patched, "is half patched: "),
        (symbolic_link, "nemo_rl/one.py is a symbolic link"),
        (read_only, "is read-only"),
        (no_checkout, "has no folder nemo_rl"),
    ],
)
def test_refusals_are_one_line_and_change_nothing(checkout, main, capsys, spoil, told, action):
    if action == "revert":
        patching.apply(checkout)
    spoil(checkout)
    before = tree(checkout)
    assert main(["patch", action, "--upstream", str(checkout)]) == 2
    for folder, _, _ in os.walk(checkout):
        os.chmod(folder, 0o755)
    error = capsys.readouterr().err
    assert told in error and error.startswith("error: ") and error.count("\n") == 1
    assert {path: entry and entry[0] for path, entry in tree(checkout).items()} == {
        path: entry and entry[0] for path, entry in before.items()
    }


@pytest.mark.parametrize("action", ["apply", "revert"])
@pytest.mark.parametrize("fails_at", [1, 2, 3, 4, 5, 6])
def test_a_write_that_fails_half_way_leaves_every_byte_as_it_was(checkout, sets, monkeypatch, action, fails_at):
    if action == "revert":
        patching.apply(checkout, sets)
    before = tree(checkout)
    calls = 0

    def failing(step):
        def wrapped(*args):
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise OSError(28, "No space left on device")
            return step(*args)

        return wrapped

    if fails_at <= 3:
        monkeypatch.setattr(patching.os, "replace", failing(os.replace))
    else:
        fails_at -= 3
        monkeypatch.setattr(patching, "_beside", failing(patching._beside))
    with pytest.raises(PatchError, match="No space left on device"):
        getattr(patching, action)(checkout, sets)
    assert tree(checkout) == before


def test_exit_codes_tell_the_state(checkout, main, capsys):
    at = ["--upstream", str(checkout)]
    actions = {"check": 1, "status": 0, "apply": 0, "apply ": 0, "check ": 0, "revert": 0}
    for action, code in actions.items():
        assert main(["patch", action.strip(), *at]) == code
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in said] == [
        "unpatched",
        "unpatched",
        "patched (3 files)",
        "patched already (3 files)",
        "patched",
        "unpatched (3 files)",
    ]
    assert all("is NeMo-RL v1" in line for line in said)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["aply", "--upstream", "."], "error: aply is not an action of patch; did you mean apply?"),
        (["apply"], "error: the following arguments are required: --upstream; see nemo-ext patch --help"),
    ],
)
def test_a_wrong_command_is_a_line(main, capsys, argv, told):
    assert main(["patch", *argv]) == 2
    assert capsys.readouterr().err.splitlines() == [told]


@pytest.mark.parametrize("line", ["-removed", " context", "@@ -1,1 +1,2 @@"])
def test_patches_that_do_more_than_insert_are_refused(tmp_path, line):
    write_patches(tmp_path / "v1")
    with (tmp_path / "v1" / "0.patch").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(PatchError, match="must only insert lines"):
        read_patch_set(tmp_path / "v1")


def test_a_manifest_that_does_not_fit_its_patches_changes_nothing(checkout, tmp_path):
    write_patches(tmp_path / "bad" / "v1")
    patch = tmp_path / "bad" / "v1" / "2.patch"
    patch.write_text(patch.read_text().replace("end()", "other()"))
    before = tree(checkout)
    with pytest.raises(PatchError, match="does not give the file that its manifest names"):
        patching.apply(checkout, patch_sets(tmp_path / "bad"))
    assert tree(checkout) == before


def test_the_packaged_patches_are_few_lines_that_call_hooks():
    shipped = patch_sets()
    assert [patches.version for patches in shipped] == ["main-7ea279abf", "v0.7.0"]
    for patches in shipped:
        inserted = [one for file in patches.files for one in file.insertions]
        assert sum(len(one.lines) for one in inserted) <= 20
        for one in inserted:
            text = textwrap.dedent("\n".join(one.lines))
            # An entry of a dict, or statements; `return` stands alone here.
            code = ast.parse("{" + text + "}" if text.startswith('"') else f"def f():\n{textwrap.indent(text, '    ')}")
            names = [alias.name for node in ast.walk(code) if isinstance(node, ast.ImportFrom) for alias in node.names]
            assert all(callable(getattr(hooks, name)) for name in names)


def test_the_packaged_patches_stand_where_the_house_map_says():
    assert (Path(__file__).parents[2] / "patches" / "v0.7.0" / "manifest.toml").is_file()
