"""The command: bad input is a line and exit code 2 before anything heavy; good input reaches the right function."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from nemo_ext import cli, local
from nemo_ext.config import ConfigError
from tests.unit.fake_runs import write_run

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "grpo_cpu_eagle3.yaml")
SPECULATIVE = "policy.generation.vllm_kwargs.speculative_config"


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Stands in for the modules that train, compare and export; keeps how they were called."""
    made = []

    def record(name, answer):
        def run(*args):
            made.append((name, *args))
            return answer

        module = types.ModuleType(f"nemo_ext.local.{name}")
        module.run = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(local, name, module, raising=False)

    record("train", tmp_path / "run")
    record("compare", tmp_path / "cmp" / "report.html")
    record("export", [tmp_path / "out" / "policy", tmp_path / "out" / "draft"])
    return made


def errors(capsys, *argv):
    """Lines on standard error of a call that must fail."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "error: the following arguments are required: COMMAND; see nemo-ext --help"),
        (["trian", EXAMPLE], "error: trian is not a command; did you mean train?"),
        (["train"], "error: the following arguments are required: CONFIG; see nemo-ext train --help"),
        (["train", "none.yaml"], "error: CONFIG is none.yaml: no such file"),
        (["train", EXAMPLE, "--seeds", "1"], "error: --seeds is not an argument of train; see nemo-ext train --help"),
        (["train", EXAMPLE, "steps"], "error: override is steps; write key=value, like policy.draft.ttt_steps=2"),
        (["train", EXAMPLE, "policy.draft.ttt_step=2"],
         "error: policy.draft.ttt_step is not a setting; did you mean ttt_steps?"),
        (["compare", EXAMPLE, "--seeds", "1,x"], "error: --seeds is 1,x; give different whole numbers, like 1,2,3"),
        (["compare", EXAMPLE, "--seeds", "1,1"], "error: --seeds is 1,1; give different whole numbers, like 1,2,3"),
        (["compare", EXAMPLE, "policy.draft.enabled=false", f"{SPECULATIVE}=null"],
         f"error: {SPECULATIVE} is null, but compare serves a draft; "
         "set its method: eagle3 and num_speculative_tokens"),
        (["export", "nowhere", "--to", "x"],
         "error: RUN is nowhere: no such folder; name the folder of a run, like runs/NAME"),
        (["export", "."], "error: the following arguments are required: --to; see nemo-ext export --help"),
        (["report", "nowhere"], "error: RUN is nowhere: no such folder; name the folder of a run, like runs/NAME"),
        (["report", ".", "--picture", "x.jpg"], "error: --picture is x.jpg; name a .png or .svg file"),
        (["report", ".", "--picture", "/nosuch/x.png"],
         "error: --picture is /nosuch/x.png: no folder /nosuch; name a file in a folder that is there"),
        (["export", ".", "--to", ""], "error: argument --to: it is empty; name a path; see nemo-ext export --help"),
        (["bench"], "error: NAME is missing; the benchmarks are loss, ring, taps"),
        (["train", EXAMPLE, "logger.run_name=../x"],
         "error: logger.run_name is ../x; name one folder, which will be inside logger.log_dir"),
        (["train", EXAMPLE, "logger.run_name=''"], "error: logger.run_name is empty; give a text"),
        (["report", ".", "a=1"], "error: a=1 is not an argument of report; see nemo-ext report --help"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_starts_nothing(capsys, calls, argv, line):
    assert errors(capsys, *argv) == [line]
    assert calls == []


def test_each_trouble_has_a_line(capsys, calls):
    found = errors(capsys, "train", EXAMPLE, "grpo.sed=1", "policy.draft.ttt_steps=0")
    assert [line.split(" is ")[0] for line in found] == ["error: policy.draft.ttt_steps", "error: grpo.sed"]


def test_bad_input_imports_nothing_heavy():
    code = (
        "import sys; from nemo_ext.cli import main; "
        f"assert main(['train', {EXAMPLE!r}, 'data.tasks[0].name=chain_summ', 'policy.draft.model_name=/no']) == 2; "
        "print(sorted({'torch', 'ray', 'megatron', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
    assert len(ran.stderr.splitlines()) == 2 and "Traceback" not in ran.stderr


def test_train_gets_the_checked_settings(capsys, calls, tmp_path):
    assert cli.main(["train", EXAMPLE, "grpo.max_num_steps=7"]) == 0
    ((name, config),) = calls
    assert (name, config.grpo.max_num_steps, config.policy.draft.num_layers) == ("train", 7, 1)
    assert capsys.readouterr().out == f"report: {tmp_path / 'run' / 'report.html'}\n"


def test_notes_are_told_and_do_not_stop(capsys, calls):
    assert cli.main(["train", EXAMPLE, f"{SPECULATIVE}.num_speculative_tokens=7"]) == 0
    assert capsys.readouterr().err.startswith("note: speculative_config.num_speculative_tokens is 7")


def test_compare_takes_overrides_around_its_seeds_and_ends_with_the_finding(capsys, calls, tmp_path):
    write_run(tmp_path / "cmp" / "frozen-seed4", "frozen", [2.0] * 4)
    write_run(tmp_path / "cmp" / "cotrain-seed4", "cotrain", [2.75] * 4)
    assert cli.main(["compare", EXAMPLE, "grpo.max_num_steps=7", "--seeds", "4,5", "logger.run_name=x"]) == 0
    ((_, config, seeds),) = calls
    assert (config.grpo.max_num_steps, config.logger.run_name, seeds) == (7, "x", [4, 5])
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("is +0.75 (seed 4): one seed.") and out[1] == f"report: {tmp_path / 'cmp' / 'report.html'}"


def test_compare_has_three_seeds_unless_told(calls):
    assert cli.main(["compare", EXAMPLE]) == 0
    assert calls[0][2] == [1, 2, 3]


def test_export_prints_its_folders(capsys, calls, tmp_path):
    assert cli.main(["export", str(tmp_path), "--to", str(tmp_path / "out")]) == 0
    assert calls == [("export", tmp_path, tmp_path / "out")]
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / name) for name in ("policy", "draft")]


def test_what_a_command_finds_wrong_later_is_a_line_too(capsys, calls, monkeypatch):
    def run(config):
        raise ConfigError("policy.model.vocab_size is 8; too small")

    monkeypatch.setattr(sys.modules["nemo_ext.local.train"], "run", run)
    assert errors(capsys, "train", EXAMPLE) == ["error: policy.model.vocab_size is 8; too small"]


def test_report_writes_the_report_and_a_picture(capsys, tmp_path):
    write_run(tmp_path / "run", "cotrain", [2.0] * 4)
    assert cli.main(["report", str(tmp_path / "run"), "--picture", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "run" / "report.html").is_file() and (tmp_path / "a.png").is_file()
    assert "report: " in capsys.readouterr().out


def test_what_an_interrupted_run_left_behind_is_read_or_told(capsys, tmp_path):
    write_run(tmp_path / "run", "cotrain", [2.0] * 4)
    metrics = tmp_path / "run" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 5, "rew')
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    metrics.write_text("[1, 2]\n" + metrics.read_text())
    capsys.readouterr()
    assert errors(capsys, "report", str(tmp_path / "run")) == [
        f"error: {metrics}, line 1: [1, 2] is not a step's metrics; take the line out"
    ]


def test_bench_help_names_the_benchmarks(capsys):
    assert cli.main(["bench", "--help"]) == 0
    assert "loss, ring, taps" in capsys.readouterr().out


def test_version_is_the_packages(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.count(".") >= 2


def test_bench_passes_its_arguments_on(capsys, monkeypatch):
    module = types.ModuleType("a_bench")
    seen = []
    module.main = lambda argv: seen.append(argv) or 0
    monkeypatch.setitem(sys.modules, "a_bench", module)
    monkeypatch.setattr(cli, "BENCHES", {"ring": "a_bench"})
    assert cli.main(["bench", "ring", "--json", "--tokens", "64"]) == 0
    assert seen == [["--json", "--tokens", "64"]]
    assert errors(capsys, "bench", "rnig") == ["error: rnig is not a benchmark; did you mean ring?"]


def test_a_log_folder_that_cannot_be_made_is_a_line_before_anything_starts(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    told = errors(capsys, "train", EXAMPLE, f"logger.log_dir={tmp_path / 'file'}")
    assert len(told) == 1 and "cannot be made (Not a directory)" in told[0]
