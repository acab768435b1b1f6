"""What a run leaves on disk while it goes on, and what it shows."""

import io
from pathlib import Path

import pytest

from nemo_ext.config import ConfigError
from nemo_ext.local import metrics_log
from nemo_ext.local.display import Display, sparkline, step_line
from nemo_ext.local.metrics_log import MetricsLog, read_metrics, read_settings, scalars
from nemo_ext.local.settings_checks import checked, load_run
from tests.unit.fake_runs import step_metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_cpu_eagle3.yaml"


@pytest.fixture
def config():
    return load_run(EXAMPLE, ["logger.tensorboard_enabled=false", "grpo.max_num_steps=9"])


def write(folder, config, steps, keep=None):
    with MetricsLog(folder, config) as log:
        if keep is not None:
            log.truncate(keep)
        for step in steps:
            log.write(step_metrics(step))


def test_each_step_is_on_disk_at_once(tmp_path, config):
    with MetricsLog(tmp_path, config) as log:
        log.write(step_metrics(0))
        log.write(step_metrics(1, "none"))
        assert read_metrics(tmp_path) == [step_metrics(0), step_metrics(1, "none")]


def test_settings_lie_beside_and_load_again(tmp_path, config):
    MetricsLog(tmp_path, config)
    assert checked(read_settings(tmp_path)) == config


def test_a_new_run_replaces_the_old_one(tmp_path, config):
    write(tmp_path, config, range(4))
    write(tmp_path, config, range(2))
    assert [m["step"] for m in read_metrics(tmp_path)] == [0, 1]


def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path, config):
    write(tmp_path, config, range(5))
    write(tmp_path, config, range(3, 6), keep=3)
    assert [m["step"] for m in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_a_resumed_run_without_earlier_metrics_starts_them(tmp_path, config):
    write(tmp_path, config, [3], keep=3)
    assert [m["step"] for m in read_metrics(tmp_path)] == [3]


def test_tensorboard_has_nemo_rls_tags(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, load_run(EXAMPLE, ["logger.tensorboard_enabled=true"]), range(3))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/reward_mean")] == [0, 1, 2]
    assert events.Scalars("vllm/spec_acceptance_length")[0].value == 2.0


def test_scalars_leave_out_text_and_what_is_missing():
    tags = dict(scalars(step_metrics(0)))
    assert tags["timing/train/rollout"] == 2.0 and tags["train/draft_loss_per_pass-2"] == 1.2
    assert tags["vllm/spec_acceptance_rate-pos-0"] == pytest.approx(0.4)
    assert not {"train/step", "train/policy_sha256"} & set(tags)
    assert not any(tag.startswith("vllm/") for tag in dict(scalars(step_metrics(0, "none"))))


def test_missing_tensorboard_is_told_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_log, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^logger.tensorboard_enabled is true but .* pip install 'nemo-ext\[cpu\]'"):
        MetricsLog(tmp_path, load_run(EXAMPLE, ["logger.tensorboard_enabled=true"]))


def test_a_folder_without_metrics_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="which has no metrics.jsonl"):
        read_metrics(tmp_path)
    assert read_settings(tmp_path) == {}


def test_outside_a_terminal_each_step_is_a_plain_line(config):
    out = io.StringIO()
    with Display(config, out) as display:
        display.note("warm-up: [cached]")
        display.step(step_metrics(0))
        display.step(step_metrics(1, "none"))
    first, second, third = out.getvalue().splitlines()
    assert first == "warm-up: [cached]"
    assert second.startswith("step 1/9  reward 0.500  accepted length 2.00  draft loss 1.000") and "\x1b" not in second
    assert third == step_line(step_metrics(1, "none"), 9) and "accepted" not in third


def test_in_a_terminal_the_table_shows_the_last_values(config):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    with Display(config, out) as display:
        display.note("a note")
        for step, length in enumerate([1.5, 3.25]):
            display.step(step_metrics(step, accepted_length=length))
    text = out.getvalue()
    assert "a note" in text and "3.25" in text and "2/9" in text and "▁█" in text


def test_sparklines_span_from_lowest_to_highest():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
