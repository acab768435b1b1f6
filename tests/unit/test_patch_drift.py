"""Patches on checkouts at no pinned commit, on a small stand-in for NeMo-RL; the real ones are in tests/upstream."""

import json
import subprocess
import textwrap

import pytest

from nemo_ext import cli
from nemo_ext.nemo_rl import config, hooks, patching
from nemo_ext.nemo_rl.config import check_run
from nemo_ext.nemo_rl.patch import facts, signature_lock
from nemo_ext.nemo_rl.patch.engine import vllm_version
from nemo_ext.nemo_rl.patch.facts import Fact
from nemo_ext.nemo_rl.patch.pin import lock_text, place_lines
from nemo_ext.nemo_rl.patch.places import Place, locate
from nemo_ext.nemo_rl.patch.record import RECORD
from nemo_ext.nemo_rl.patch.source import NotFound, Source, parse, tree_digest
from nemo_ext.nemo_rl.patch_set import PatchError, digest, inserted, patch_sets

TEXTS = {
    "nemo_rl/run.py": '''
        """Runs."""


        def setup(master, tokenizer):
            """Makes everything."""
            started = now()

            # The parts.
            policy = master.policy
            generation = policy["generation"]
            loss = master.loss
            if loss is None:
                raise ValueError("no loss")
            return Policy(policy), Engine(generation), master


        def train(policy):
            return policy.train()
        ''',
    "nemo_rl/policy.py": """
        class Policy:
            def __init__(self, cluster, config, name="policy"):
                size = 1
                enabled = bool(config.get("draft"))
                if enabled and config["packing"]:
                    raise ValueError("not both")
                self.worker = choose("plain", config)

            def train(self):
                return self.worker.call("train")
        """,
    "nemo_rl/choose.py": '''
        OTHERS = {"plain": "quantised"}


        def choose(default, config):
            """The worker's name."""
            if config.get("quantised") is None:
                return default
            return OTHERS.get(default, default)
        ''',
    "nemo_rl/table.py": """
        BIG = "big"
        PLAIN = "plain"

        TABLE: dict[str, str] = {
            "one": PLAIN,
            "two": BIG,  # with a comment
            "three": PLAIN,
        }
        """,
    "nemo_rl/engine.py": """
        class Base:
            def load(self, seed):
                weights = dict(self.settings)
                arguments = dict(
                    model=self.name,
                    extension="Extension",
                    **weights,
                )
                if seed is not None:
                    arguments["seed"] = seed

                self.start(arguments)
                self.ready = True


        class Engine(Base):
            def start(self, arguments):
                self.engine = arguments
        """,
    "nemo_rl/worker.py": """
        class Worker:
            def __init__(self, config, *, rank, **kwargs):
                self.config = config

            @wrap_with_nvtx_name("train")
            def train(self, data, gbs=None):
                return {"metrics": [data.take(gbs)]}

            def stream(self):
                yield from self.parameters()
        """,
    "pyproject.toml": """
        [project]
        name = "nemo-rl"
        dependencies = ["vllm==1.2.3 ; sys_platform != 'linux'", "vllm @ https://x/vllm-1.2.3-cp38.whl", "vllm-metrics==9"]
        """,
}
TEXTS = {path: textwrap.dedent(text).lstrip() for path, text in TEXTS.items()}

# File -> the place, its name in the manifest, and the inserted lines.
PATCHED = {
    "nemo_rl/run.py": (
        Place("setup", "after assignment", "generation"),
        [
            '    if policy.get("draft"):',
            "        from nemo_ext.hooks import prepare",
            "        prepare(policy, master)",
        ],
    ),
    "nemo_rl/policy.py": (
        Place("Policy.__init__", "after assignment", "enabled"),
        ['        if config.get("draft") == "ours":', "            enabled = False  # of nemo_ext"],
    ),
    "nemo_rl/choose.py": (
        Place("choose", "start"),
        ['    if config.get("draft"):', "        default = default + config.nemo_ext"],
    ),
    "nemo_rl/table.py": (Place("TABLE", "after key", "two"), ['    "nemo_ext": BIG,']),
    "nemo_rl/engine.py": (
        Place("Base.load", "before call", "self.start", made={"arguments": ["extension"]}),
        ["        if self.ours:", "            arguments = nemo_ext(arguments)".replace("nemo_ext", "dict")],
    ),
}
WORKER = "nemo_rl.worker:Worker"
FACTS = (
    Fact("nemo_rl.policy:Policy.train", "has the string", ("train",), "the override is what it calls"),
    Fact(f"{WORKER}.__init__", "sets self.", ("config",), "the override reads it"),
    Fact(f"{WORKER}.train", "has the string", ("metrics",), "ours join them"),
)


@pytest.fixture(autouse=True)
def small_tables(monkeypatch):
    """The lock and the facts of the stand-in."""
    monkeypatch.setattr(signature_lock, "NAMES", (f"{WORKER}.__init__", f"{WORKER}.train", "nemo_rl.run:setup"))
    monkeypatch.setattr(signature_lock, "BODIES", (f"{WORKER}.stream",))
    monkeypatch.setattr(signature_lock, "SETTINGS", ())
    monkeypatch.setattr(facts, "FACTS", FACTS)


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "RL"
    for path, text in TEXTS.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.fixture
def sets(tmp_path, checkout):
    """One pinned version, v1, which is the stand-in as it stands."""
    folder = tmp_path / "patches" / "v1"
    folder.mkdir(parents=True)
    manifest = ['version = "v1"', 'commit = "0123456789abcdef"', 'vllm = "1.2.3"']
    for number, (path, (place, lines)) in enumerate(PATCHED.items()):
        text = TEXTS[path].encode()
        found = locate(text, path, place, lines, relock=True)
        one = found.insertion
        (folder / f"{number}.patch").write_text(
            f"--- a/{path}\n+++ b/{path}\n@@ -{one.after},0 +{one.after + 1},{len(lines)} @@\n"
            + "".join(f"+{line}\n" for line in lines)
        )
        manifest += ["[[patch]]", f'file = "{number}.patch"', f'path = "{path}"', f'before = "{digest(text)}"']
        manifest += [f'after = "{digest(inserted(text, [one]))}"', "[[patch.place]]", *place_lines(found.place)]
    (folder / "manifest.toml").write_text("\n".join(manifest))
    (folder / "lock.json").write_text(lock_text(signature_lock.lock_of(Source(checkout))))
    return patch_sets(tmp_path / "patches")


@pytest.fixture
def main(monkeypatch, sets):
    """The command, with these patches as the package's own."""
    monkeypatch.setattr(patching, "patch_sets", lambda: sets)

    def run(*argv):
        return cli.main(["patch", *map(str, argv)])

    return run


def edit(root, path, old, new):
    text = (root / path).read_text()
    assert text.count(old) == 1, (old, text.count(old))
    (root / path).write_text(text.replace(old, new))


def tree(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def commit(root):
    git = ["git", "-C", root, "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "init", "-q", root], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "upstream"], check=True)


HARMLESS = [
    ("nemo_rl/run.py", "    # The parts.\n", "\n    # All\n    # parts.\n"),
    ("nemo_rl/run.py", '    """Makes everything."""\n', '    """Makes\n\n    everything."""\n'),
    ("nemo_rl/run.py", 'policy["generation"]\n', "(\n        policy['generation']\n    )\n"),
    ("nemo_rl/run.py", "    loss = master.loss\n", "    loss = master.loss_fn\n    other = 1\n"),
    ("nemo_rl/run.py", "    started = now()\n", "    started = clock()\n    print(started)\n"),
    ("nemo_rl/run.py", "def train(policy):\n", "def generation(x):\n    return x\n\n\ndef train(policy):\n"),
    ("nemo_rl/run.py", "    loss = master.loss\n", "    loss = master.loss\n    generation = copy(generation)\n"),
    ("nemo_rl/policy.py", "size = 1", "size = 2"),
    ("nemo_rl/policy.py", "class Policy:", "class Other:\n    def __init__(self):\n        pass\n\n\nclass Policy:"),
    ("nemo_rl/choose.py", 'OTHERS = {"plain": "quantised"}', 'OTHERS = {"plain": "quantised", "big": "small"}'),
    ("nemo_rl/table.py", '    "one": PLAIN,\n', '    "zero": BIG,\n    "one": PLAIN,\n'),
    ("nemo_rl/table.py", '"three": PLAIN', '"three": BIG'),
    ("nemo_rl/engine.py", "model=self.name,", "model=self.name,\n            seed=seed,"),
    ("nemo_rl/engine.py", 'arguments["seed"] = seed', 'arguments["seed"] = seed\n            arguments.update(a=1)'),
    ("nemo_rl/worker.py", 'return {"metrics": [data.take(gbs)]}', 'return {"metrics": [1], "more": data.take(gbs)}'),
    ("nemo_rl/worker.py", "gbs=None", "gbs: int | None = 8"),
]


@pytest.mark.parametrize(("path", "old", "new"), HARMLESS)
def test_a_checkout_that_drifted_harmlessly_is_patched_and_reverted(checkout, main, capsys, path, old, new):
    edit(checkout, path, old, new)
    with (checkout / "nemo_rl/table.py").open("a") as file:  # what pinned checkouts are recognised by, changes too
        file.write("# later\n")
    before = tree(checkout)
    assert main("check", "--upstream", checkout) == 1
    assert tree(checkout) == before
    assert main("apply", "--upstream", checkout) == 2
    assert "--accept-drift" in capsys.readouterr().err
    assert tree(checkout) == before
    assert main("apply", "--upstream", checkout, "--accept-drift") == 0
    after = tree(checkout)
    assert {name for name in after if after[name] != before.get(name)} == {*PATCHED, RECORD}
    for name in PATCHED:
        compile(after[name], name, "exec")
    assert [main(action, "--upstream", checkout) for action in ("check", "status", "apply")] == [0, 0, 0]
    assert main("revert", "--upstream", checkout) == 0
    assert tree(checkout) == before


SETUP = '    policy = master.policy\n    generation = policy["generation"]\n'
START = "        self.start(arguments)\n"
REFUSED = [
    # The place is gone, or there is another one.
    ("nemo_rl/run.py", "def setup(", "def set_up(", "there is no setup"),
    ("nemo_rl/run.py", "def setup(", "async def setup(", "setup is no plain function"),
    ("nemo_rl/run.py", "def train(policy):", "def setup(master, tokenizer):", "setup is bound 2 times"),
    ("nemo_rl/run.py", "def train(policy):", "setup = timed(setup)\n\n\ndef train(policy):", "setup is bound 2 times"),
    ("nemo_rl/run.py", "def setup(", "class Run:\n  @staticmethod\n  def setup(", "there is no setup"),
    ("nemo_rl/run.py", '    generation = policy["generation"]\n', "", "no assignment to generation at its top level"),
    (
        "nemo_rl/run.py",
        "generation = policy",
        "if master:\n        generation = policy",
        "no assignment to generation at its top level",
    ),
    (
        "nemo_rl/run.py",
        '    generation = policy["generation"]\n',
        '    generation = policy["generation"]\n' * 2,
        "has 2 assignments",
    ),
    ("nemo_rl/run.py", 'policy["generation"]\n', 'copy(policy["generation"])\n', "the anchor is not"),
    ("nemo_rl/run.py", 'policy["generation"]\n', 'policy["generation"]; loss = 1\n', "in the same line"),
    ("nemo_rl/engine.py", START, START + START, "has 2 calls of self.start"),
    ("nemo_rl/engine.py", START, "        if self.ours:\n            self.start(arguments)\n", "top-level statement"),
    ("nemo_rl/engine.py", START, "        self.engine = self.start(arguments)\n", "top-level statement"),
    ("nemo_rl/engine.py", START, "        start = self.start\n        start(arguments)\n", "no call of self.start"),
    ("nemo_rl/engine.py", START, "        self.start(**arguments)\n", "the anchor is not"),
    ("nemo_rl/engine.py", "    def load(", "    @cached\n    def load(", "no plain method"),
    ("nemo_rl/engine.py", "class Base:", "class Engine0:", "there is no Base.load"),
    ("nemo_rl/table.py", '"two": BIG', '"two": PLAIN', "the anchor is not"),
    ("nemo_rl/table.py", '"two"', '"2"', "no key two"),
    ("nemo_rl/table.py", '    "one": PLAIN,\n', '    "two": BIG,\n', "2 keys two"),
    ("nemo_rl/table.py", '    "three": PLAIN,\n', "", "no entry in the next line"),
    ("nemo_rl/table.py", "TABLE: dict[str, str] = {", "TABLE = dict(**{", "cannot be parsed"),
    ("nemo_rl/table.py", 'BIG = "big"\n', 'BIG = "big"\nTABLE = None\n', "TABLE is bound 2 times"),
    ("nemo_rl/table.py", 'BIG = "big"\n', 'BIG = "bigger"\n', "in another way"),
    ("nemo_rl/table.py", 'BIG = "big"\n', "from nemo_rl.sizes import BIG\n", "BIG is not bound above"),
    ("nemo_rl/table.py", '"three"', '"nemo_ext"', "lines of nemo_ext already"),
    ("nemo_rl/choose.py", "OTHERS.get(default, default)", "OTHERS.get(default)", "choose is not the pinned version's"),
    ("nemo_rl/choose.py", "def choose(default, config)", "def choose(config, default)", "choose is not the pinned"),
    # What the lines read and write means something else.
    ("nemo_rl/run.py", "setup(master, tokenizer)", "setup(main, tokenizer)", "master is not bound there"),
    ("nemo_rl/run.py", SETUP, SETUP.replace("policy", "settings"), "policy is not bound there"),
    ("nemo_rl/run.py", "policy = master.policy", "policy = copy(master.policy)", "in another way"),
    ("nemo_rl/run.py", "started = now()", "started = check(master)", "in another way"),
    ("nemo_rl/run.py", "loss = master.loss", "policy = master.loss", "setup binds policy 2 times"),
    ("nemo_rl/run.py", "loss = master.loss", "master = master.loss", "binds its parameter master anew"),
    ("nemo_rl/run.py", "loss = master.loss", "loss = None\n    del policy", "setup binds policy 2 times"),
    ("nemo_rl/run.py", "    started = now()", "    if not master:\n        return None", "setup may end in line"),
    ("nemo_rl/run.py", "    started = now()", "    yield now()", "setup is a generator"),
    (
        "nemo_rl/run.py",
        "    return Policy(policy), Engine",
        "    return Policy(loss), Engine",
        "does not use policy after",
    ),
    ("nemo_rl/policy.py", "if enabled and", "if", "does not use enabled after the place"),
    ("nemo_rl/policy.py", "size = 1", "if config.get('draft'):\n            raise ValueError", "in another way"),
    ("nemo_rl/policy.py", 'config.get("draft"))', 'config["draft"])', "the anchor is not"),
    ("nemo_rl/policy.py", "cluster, config,", "cluster, settings,", "config is not bound there"),
    (
        "nemo_rl/policy.py",
        "if enabled and",
        "enabled = enabled or size\n        if enabled and",
        "binds enabled 2 times",
    ),
    ("nemo_rl/policy.py", 'config["packing"]', 'config["packing"] and config["draft"]', "has the key draft 2 times"),
    ("nemo_rl/engine.py", "arguments = dict(\n", "arguments = Arguments(\n", "does not make arguments by dict"),
    ("nemo_rl/engine.py", 'extension="Extension",', "", "makes arguments without extension"),
    ("nemo_rl/engine.py", 'arguments["seed"] = seed', "self.keep(arguments)", "hands arguments on"),
    ("nemo_rl/engine.py", "if seed is not None:", "self.kept = arguments\n        if seed:", "hands arguments on"),
    ("nemo_rl/engine.py", "if seed is not None:", "if seed is None:\n            return\n        if seed:", "may end"),
    # What is overridden or called.
    ("nemo_rl/worker.py", "def train(self, data", "def train_step(self, data", "nemo_rl.worker has no Worker.train"),
    ("nemo_rl/worker.py", "gbs=None", "gbs", "it has gained gbs and has lost gbs="),
    ("nemo_rl/worker.py", "gbs=None", "gbs=None, mbs=None", "it has gained mbs="),
    ("nemo_rl/worker.py", "*, rank, ", "*, rank, device, ", "it has gained device"),
    ("nemo_rl/worker.py", "wrap_with_nvtx_name", "batched", "is decorated with batched"),
    ("nemo_rl/worker.py", "self.parameters()", "self.parameters().items()", "its code is none that a pinned"),
    (
        "nemo_rl/worker.py",
        "    def stream(self):",
        "    def train(self):\n        pass\n\n    def stream(self):",
        "train is bound 2",
    ),
    ("nemo_rl/worker.py", "self.config = config", "self.settings = config", "no longer sets self.config"),
    ("nemo_rl/worker.py", '"metrics"', '"numbers"', "no longer has the string metrics"),
    ("nemo_rl/policy.py", 'call("train")', 'call("train_step")', "no longer has the string train"),
    ("pyproject.toml", '"vllm==1.2.3 ;', '"vllm==1.3 ;', "pins 1.2.3 and 1.3 of vLLM"),
]


@pytest.mark.parametrize(("path", "old", "new", "told"), REFUSED)
def test_a_checkout_that_drifted_otherwise_is_refused_and_stays_as_it_is(checkout, main, capsys, path, old, new, told):
    edit(checkout, path, old, new)
    with (checkout / "nemo_rl/run.py").open("a") as file:
        file.write("\n")
    before = tree(checkout)
    assert main("check", "--upstream", checkout) == 2
    assert told in capsys.readouterr().out
    assert main("apply", "--upstream", checkout, "--accept-drift") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nor do the patches fit it as it is" in error
    assert tree(checkout) == before


def test_another_engine_is_refused(checkout, main, capsys):
    text = (checkout / "pyproject.toml").read_text()
    (checkout / "pyproject.toml").write_text(text.replace("1.2.3", "2.0"))
    (checkout / "nemo_rl/table.py").write_text(TEXTS["nemo_rl/table.py"] + "\n")
    assert main("check", "--upstream", checkout) == 2
    assert "pins vLLM 2.0; drafts were tried with 1.2.3 (v1)" in capsys.readouterr().out
    (checkout / "pyproject.toml").unlink()
    assert main("check", "--upstream", checkout) == 2
    assert "cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("vllm==0.1.2", "0.1.2"),
        ("vllm[audio] == 0.25", "0.25"),
        ("vllm @ https://host/vllm-3.4.5-cp38.whl ; x", "3.4.5"),
    ],
)
def test_the_engine_is_read_off_pyproject(tmp_path, line, version):
    (tmp_path / "pyproject.toml").write_text(f'[project.optional-dependencies]\nvllm = ["{line}", "vllm-x==7"]\n')
    assert vllm_version(tmp_path) == version


def drifted(root):
    for path in ("nemo_rl/run.py", "nemo_rl/table.py", "nemo_rl/choose.py"):
        (root / path).write_text("# moved down\n\n\n" + TEXTS[path])


def test_changes_that_are_not_committed_are_refused(checkout, main, capsys):
    drifted(checkout)
    commit(checkout)
    assert main("check", "--upstream", checkout) == 1
    assert "without git" not in capsys.readouterr().out
    with (checkout / "nemo_rl/table.py").open("a") as file:
        file.write("# mine\n")
    assert main("check", "--upstream", checkout) == 2
    assert "nemo_rl/table.py: not committed" in capsys.readouterr().out
    assert main("apply", "--upstream", checkout, "--accept-drift") == 2
    assert "nemo_rl/table.py has changes that are not committed" in capsys.readouterr().err


def test_without_git_the_output_says_what_nobody_can_tell(checkout, main, capsys):
    drifted(checkout)
    assert main("check", "--upstream", checkout) == 1
    assert "without git nobody can tell upstream's changes from yours" in capsys.readouterr().out
    assert main("apply", "--upstream", checkout) == 2
    error = capsys.readouterr().err
    assert "is none of the supported versions" in error and "nearest: v1, which has its vLLM 1.2.3" in error


def test_check_tells_each_place_and_how_it_was_found(checkout, main, capsys):
    drifted(checkout)
    edit(checkout, "nemo_rl/run.py", "loss = master.loss", "loss = master.loss_fn")
    main("check", "--upstream", checkout)
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("is no pinned version of NeMo-RL; nearest: v1 (vLLM 1.2.3)")
    assert [line.partition(": ")[0] for line in said[2:7]] == [
        "nemo_rl/run.py:14",
        "nemo_rl/policy.py:5",
        "nemo_rl/choose.py:9",
        "nemo_rl/table.py:10",
        "nemo_rl/engine.py:12",
    ]
    assert "its surroundings changed" in said[2] and "the same code as in the pinned version" in said[4]
    assert said[7:] == [
        "signatures, and all else that is counted on: as written for",
        f"the patches fit: nemo-ext patch apply --upstream {checkout} --accept-drift",
    ]


def test_lines_are_indented_for_their_place(checkout, main):
    drifted(checkout)
    text = TEXTS["nemo_rl/engine.py"].replace("        ", "\t\t").replace("    def", "\tdef")
    (checkout / "nemo_rl/engine.py").write_text(text)
    assert main("apply", "--upstream", checkout, "--accept-drift") == 0
    assert (
        "\t\tif self.ours:\n\t\t    arguments = dict(arguments)\n\t\tself.start"
        in (checkout / "nemo_rl/engine.py").read_text()
    )


def test_a_file_with_carriage_returns_is_refused(checkout, main, capsys):
    drifted(checkout)
    (checkout / "nemo_rl/run.py").write_bytes(TEXTS["nemo_rl/run.py"].replace("\n", "\r\n").encode())
    assert main("check", "--upstream", checkout) == 2
    assert "carriage returns" in capsys.readouterr().out


def test_a_patched_file_that_was_changed_is_refused(checkout, main, capsys):
    drifted(checkout)
    main("apply", "--upstream", checkout, "--accept-drift")
    with (checkout / "nemo_rl/run.py").open("a") as file:
        file.write("# mine\n")
    before = tree(checkout)
    capsys.readouterr()
    for action in ("revert", "check", "apply"):
        assert main(action, "--upstream", checkout) == 2
        assert "nemo_rl/run.py was changed since it was patched" in capsys.readouterr().err
    assert tree(checkout) == before


def test_half_of_a_drifted_checkout_is_refused(checkout, main, capsys):
    drifted(checkout)
    text = (checkout / "nemo_rl/run.py").read_text()
    main("apply", "--upstream", checkout, "--accept-drift")
    (checkout / "nemo_rl/run.py").write_text(text)
    assert main("revert", "--upstream", checkout) == 2
    assert "is half patched: 4 of 5 files" in capsys.readouterr().err


def test_a_record_is_forgotten_when_the_files_are_checked_out_anew(checkout, main, capsys):
    drifted(checkout)
    commit(checkout)
    main("apply", "--upstream", checkout, "--accept-drift")
    subprocess.run(["git", "-C", checkout, "checkout", "-q", "."], check=True)
    assert main("apply", "--upstream", checkout) == 2
    assert main("apply", "--upstream", checkout, "--accept-drift") == 0
    for path in PATCHED:
        (checkout / path).write_text(TEXTS[path])
    assert (checkout / RECORD).exists()
    assert main("apply", "--upstream", checkout) == 0
    assert not (checkout / RECORD).exists()
    assert "is NeMo-RL v1: patched" in capsys.readouterr().out


def test_check_of_a_patched_checkout_sees_what_moved_on_since(checkout, main, capsys):
    drifted(checkout)
    main("apply", "--upstream", checkout, "--accept-drift")
    assert main("check", "--upstream", checkout) == 0
    edit(checkout, "nemo_rl/worker.py", "gbs=None", "gbs")
    assert main("check", "--upstream", checkout) == 2
    assert "CHANGED Worker.train: it has gained gbs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "spoil", [lambda text: text + "x", lambda text: text.replace("nemo_rl/run.py", "../run.py"), lambda text: ""]
)
def test_a_spoilt_record_is_a_line(checkout, main, capsys, spoil):
    drifted(checkout)
    main("apply", "--upstream", checkout, "--accept-drift")
    (checkout / RECORD).write_text(spoil((checkout / RECORD).read_text()))
    before = tree(checkout)
    capsys.readouterr()
    assert main("revert", "--upstream", checkout) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "anew and remove" in error
    assert tree(checkout) == before


@pytest.mark.parametrize("action", ["apply", "revert"])
@pytest.mark.parametrize("fails_at", range(1, 7))
def test_a_write_that_fails_leaves_a_drifted_checkout_as_it_was(checkout, sets, monkeypatch, action, fails_at):
    drifted(checkout)
    if action == "revert":
        patching.apply(checkout, sets, accept_drift=True)
    before, calls = tree(checkout), 0

    def failing(step):
        def wrapped(*args):
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise OSError(28, "No space left on device")
            return step(*args)

        return wrapped

    exchange = failing(lambda step, *args: step(*args))
    replace, unlink = patching.os.replace, patching.os.unlink
    monkeypatch.setattr(patching.os, "replace", lambda *args: exchange(replace, *args))
    monkeypatch.setattr(patching.os, "unlink", lambda *args, **kwargs: exchange(unlink, *args, **kwargs))
    with pytest.raises(PatchError, match="No space left on device"):
        if action == "apply":
            patching.apply(checkout, sets, accept_drift=True)
        else:
            patching.revert(checkout, sets)
    assert tree(checkout) == before


def test_a_pin_makes_the_drifted_commit_a_version(checkout, main, capsys, sets, monkeypatch):
    drifted(checkout)
    assert main("pin", "--upstream", checkout, "--version", "v2") == 2
    assert "git cannot tell the commit" in capsys.readouterr().err
    commit(checkout)
    assert main("pin", "--upstream", checkout, "--version", "v1") == 2
    assert "there is" in capsys.readouterr().err
    assert main("pin", "--upstream", checkout, "--version", "../v2") == 2
    assert main("pin", "--upstream", checkout, "--version", "v2") == 0
    both = patch_sets(sets[0].folder.parent)
    monkeypatch.setattr(patching, "patch_sets", lambda: both)
    assert [one.version for one in both] == ["v1", "v2"]
    head = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert both[1].commit == head
    before = tree(checkout)
    assert main("pin", "--upstream", checkout, "--version", "v3") == 2
    assert main("apply", "--upstream", checkout) == 0
    assert "is NeMo-RL v2: patched" in capsys.readouterr().out
    assert not (checkout / RECORD).exists()
    assert main("revert", "--upstream", checkout) == 0
    assert tree(checkout) == before


def test_a_pin_locks_what_changed_only_when_told_to(checkout, main, capsys, sets):
    drifted(checkout)
    edit(checkout, "nemo_rl/worker.py", "gbs=None", "gbs=None, mbs=None")
    commit(checkout)
    assert main("pin", "--upstream", checkout, "--version", "v2") == 2
    assert "Worker.train: it has gained mbs=; adapt the package" in capsys.readouterr().err
    assert main("pin", "--upstream", checkout, "--version", "v2", "--accept-drift") == 0
    assert "accepted: Worker.train: it has gained mbs=" in capsys.readouterr().out
    lock = json.loads((sets[0].folder.parent / "v2" / "lock.json").read_text())
    assert lock["signatures"][f"{WORKER}.train"] == "self, data, gbs=, mbs="


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["check", "--accept-drift"], "--accept-drift is not for check; it goes with apply, and with pin"),
        (["pin"], "--version is not set; name the new version, like main-0123abcd"),
        (["apply", "--version", "v1"], "--version is not for apply; the version is recognised"),
    ],
)
def test_options_of_other_actions_are_a_line(checkout, main, capsys, argv, told):
    assert main(*argv, "--upstream", checkout) == 2
    assert capsys.readouterr().err == f"error: {told}\n"


def test_digests_do_not_see_comments_docstrings_and_formatting():
    one = parse(b'def f(a):\n    """Says."""\n    return {"x": a}\n', "one")
    two = parse(b"def f(\n    a,\n):\n    # more\n    return {'x': (a)}\n", "two")
    other = parse(b"def f(a):\n    return {'y': a}\n", "other")
    assert tree_digest(one) == tree_digest(two) != tree_digest(other)


@pytest.mark.parametrize(
    "told",
    ["self, a, b=, *, c, d=, **kwargs", "a, /, b, *args, c", "", "*args, **kwargs", "a=, /, b=", "*, a"],
)
def test_signatures_are_read_off_the_source(told):
    text = f"def f({told.replace('=', '=1')}): pass"
    assert signature_lock.signature(parse(text.encode(), "f").body[0]) == told


def test_methods_of_base_classes_are_found(tmp_path):
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl/base.py").write_text("class A:\n    def f(self, x): pass\n    def g(self): pass\n")
    (tmp_path / "nemo_rl/one.py").write_text(
        "from nemo_rl.base import A as Base\nfrom torch import nn\n\n\nclass B(nn.Module, Base):\n    def g(self, y): pass\n"
    )
    checkout = Source(tmp_path)
    assert signature_lock.signature(checkout.find("nemo_rl.one:B.f")) == "self, x"
    assert signature_lock.signature(checkout.find("nemo_rl.one:B.g")) == "self, y"
    with pytest.raises(NotFound, match="has no B.h"):
        checkout.find("nemo_rl.one:B.h")


def test_the_facts_name_what_the_hooks_name():
    assert (facts.MEGATRON_WORKER, facts.UPSTREAM_EXTENSION) == (hooks.MEGATRON_WORKER, hooks.UPSTREAM_EXTENSION)


@pytest.mark.parametrize(
    ("what", "holds", "fails"),
    [
        ("calls", "self.f", "f"),
        ("derives from", "Base", "Derived"),
        ("has the field", "a: int", "a: str"),
        ("has the field", "b", "c"),
        ("has a field of", ("a", "c"), ("c", "d")),
        ("has the string", "said", "docstring"),
        ("makes pairs of", ("x", "y"), ("y", "x")),
        ("mentions", "self.g", "self.i"),
        ("passes the keyword", "k", "l"),
        ("sets self.", "c", "b"),
        ("passes to", ("self.f", "self.g"), ("self.f", "k")),
        ("always passes to", ("self.h", "k"), ("self.f", "self.g")),
    ],
)
def test_a_fact_that_does_not_hold_is_a_line_with_its_reason(tmp_path, monkeypatch, what, holds, fails):
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl/one.py").write_text(
        "class Base:\n    def __init__(self):\n        self.a = self.f(k=1)\n\n\n"
        "class A(Base):\n    'docstring'\n    a: int\n    b: str = 'said'\n\n"
        "    def f(self, k):\n        self.c = self.f(k=self.g)\n        self.f(self.h(1, k))\n        return (k.x, k.y)\n"
    )
    monkeypatch.setattr(facts, "FACTS", [Fact("nemo_rl.one:A", what, (holds,), "why")])
    if what in facts.WHOLE:
        monkeypatch.setattr(facts, "FACTS", [Fact("nemo_rl.one:A", what, holds, "why")])
    assert list(facts.broken(Source(tmp_path))) == []
    told = fails if what in facts.WHOLE else (fails,)
    monkeypatch.setattr(facts, "FACTS", [Fact("nemo_rl.one:A", what, told, "why")])
    (line,) = facts.broken(Source(tmp_path))
    assert line.startswith("nemo_rl.one:A no longer ") and line.endswith("; why")


def test_what_a_function_returns_is_a_fact(tmp_path, monkeypatch):
    (tmp_path / "nemo_rl").mkdir()
    fact = Fact("nemo_rl.one:f", "returns nothing but", (True, False), "why")
    monkeypatch.setattr(facts, "FACTS", [fact])
    bodies = {"return True": 0, "return None": 0, "return g(x)": 0, "if x: return True\n    return False": 1}
    for body, good in bodies.items():
        (tmp_path / "nemo_rl/one.py").write_text(f"def f(x):\n    {body}\n")
        assert len(list(facts.broken(Source(tmp_path)))) == 1 - good


def test_a_drifted_version_has_the_limits_of_all_versions(checkout, main, monkeypatch):
    """Its settings may have the name that they have in one version already, and the engine of another still."""
    policy = {
        "draft": {"enabled": True, "engine": "nemo_ext", "speculator_type": "dspark"},
        "megatron_cfg": {"enabled": True, "use_fused_linear_logprobs": True, "use_linear_ce_fusion_loss": True},
    }
    drifted(checkout)
    main("apply", "--upstream", checkout, "--accept-drift")
    patches = patching.recognise(checkout).patches
    monkeypatch.setattr(config, "_patches", lambda: patches)
    with pytest.raises(config.ConfigError) as raised:
        check_run(policy)
    said = "\n".join(raised.value.lines)
    assert "use_fused_linear_logprobs is true" in said and "use_linear_ce_fusion_loss is true" in said
    assert config.upstream_version() == "v1"
