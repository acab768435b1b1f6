"""Reports say what the metrics say: numbers are read back out of the HTML."""

import html
import json
import re

import pytest

from nemo_ext.config import ConfigError
from nemo_ext.local.metrics_log import METRICS
from nemo_ext.local.report import (
    finding,
    write_accepted_length_picture,
    write_again,
    write_compare_report,
    write_report,
)
from nemo_ext.local.run_stats import first_quarter, last_quarter, margin, mean, smoothed
from tests.unit.fake_runs import step_metrics, write_run


def rows(page: str, table: str) -> list[list[str]]:
    """Cells of a table's body."""
    body = re.search(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', page, re.S)[1]
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr.*?</tr>", body, re.S)]


def cards(page: str) -> dict[str, str]:
    """Plots by title."""
    return dict(re.findall(r'<section class="card"><h2>(.*?)</h2>(.*?)</section>', page, re.S))


@pytest.fixture
def compared(tmp_path):
    """Eight steps of three modes on two seeds; the co-trained draft ends 1.0 and 0.75 above the frozen one."""
    ends = {("frozen", 1): 1.5, ("frozen", 2): 1.25, ("cotrain", 1): 2.5, ("cotrain", 2): 2.0}
    runs = {"none": {}, "frozen": {}, "cotrain": {}}
    for mode in runs:
        for seed in (1, 2):
            lengths = [9.0] * 6 + [ends.get((mode, seed), 1.0) - 0.125, ends.get((mode, seed), 1.0) + 0.125]
            rewards = [0.0] * 6 + [0.25 * seed] * 2
            runs[mode][seed] = write_run(tmp_path / "cmp" / f"{mode}-seed{seed}", mode, lengths, rewards)
    return tmp_path / "cmp", runs


def test_quarters_are_rounded_up_and_never_empty():
    steps = list(range(1, 11))
    assert (first_quarter(steps), last_quarter(steps)) == ([1, 2, 3], [8, 9, 10])
    assert first_quarter([1]) == last_quarter([1]) == [1]
    assert last_quarter([]) == []


def test_means_leave_out_steps_without_a_value():
    assert mean([{"step": 0, "x": 1.0}, {"step": 1, "x": None}, {"step": 2}, {"step": 3, "x": 4.0}], "x") == 2.5
    assert mean([{"step": 0}], "x") is None


def test_smoothing_looks_back_only():
    assert smoothed([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_a_run_reports_its_quarters(tmp_path):
    folder = write_run(
        tmp_path / "run", "cotrain", [1.5, 1.5, 2.0, 2.0, 2.0, 2.0, 2.5, 3.5], [0.0, 0.5, *[0.6] * 4, 0.75, 1.0]
    )
    page = write_report(folder).read_text()
    summary = {cells[0]: cells[1:] for cells in rows(page, "summary")}
    assert summary["accepted length"] == ["1.50", "3.00", "1.50", "3.50"]
    assert summary["reward"] == ["0.250", "0.875", "0.000", "1.000"]
    assert summary["step seconds"] == ["4.00"] * 4
    tiles = dict(re.findall(r'<div class="label">(.*?)</div><div class="value">(.*?)</div>', page))
    assert tiles["accepted length"] == "3.00" and tiles["reward"] == "0.875"
    assert "run: co-trained draft" in page


def test_a_run_shows_every_plot_once_and_links_to_nothing(tmp_path):
    page = write_report(write_run(tmp_path / "run", "cotrain", [2.0] * 4)).read_text()
    plots = [title for title, body in cards(page).items() if "<svg" in body]
    assert plots == [
        "Reward", "Accepted length", "Acceptance per position", "Draft loss per pass",
        "Time per phase", "Response length", "Policy loss", "Gradient norms",
    ]  # fmt: skip
    assert not re.search(r'(src|href)="(?!#)', page.replace("xlink:href", "href")) and "<script" not in page
    ids = re.findall(r'<clipPath id="(.*?)"', page)
    assert len(ids) == len(set(ids)) >= len(plots)


def test_plots_name_what_they_show(tmp_path):
    plots = cards(write_report(write_run(tmp_path / "run", "cotrain", [2.0] * 4)).read_text())
    for title, words in {
        "Acceptance per position": ["position 1", "position 3"],
        "Draft loss per pass": ["pass 1", "pass 3"],
        "Time per phase": ["rollout", "training", "refresh", "other"],
        "Gradient norms": ["policy", "draft"],
        "Accepted length": ["expected in training"],
    }.items():
        for word in words:
            assert f">{word}</text>" in plots[title], (title, word)


def test_a_block_draft_is_drawn_slot_by_slot_with_its_terms(tmp_path):
    folder = write_run(tmp_path / "run", "cotrain", [2.0] * 4)
    steps = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    for step in steps:
        step["draft_loss_per_slot"] = step.pop("draft_loss_per_pass")
        step["dspark_tv_loss"] = 0.25
    (folder / METRICS).write_text("".join(json.dumps(step) + "\n" for step in steps))
    page = write_report(folder).read_text()
    plots = cards(page)
    assert "Draft loss per pass" not in plots
    assert ">slot 1</text>" in plots["Draft loss per slot"] and ">slot 3</text>" in plots["Draft loss per slot"]
    assert ["draft loss, L1 distance", *["0.250"] * 4] in rows(page, "summary")


def test_a_run_without_a_draft_has_no_plots_of_one(tmp_path):
    page = write_report(write_run(tmp_path / "run", "none", [1.0] * 4)).read_text()
    assert "run: no draft" in page
    assert not {"Accepted length", "Acceptance per position", "Draft loss per pass"} & set(cards(page))
    assert "accepted length" not in [cells[0] for cells in rows(page, "summary")]


def test_a_frozen_run_is_called_so(tmp_path):
    assert "run: frozen draft" in write_report(write_run(tmp_path / "run", "frozen", [2.0] * 4)).read_text()


def test_a_compare_report_has_each_seed_the_means_and_the_margin(compared):
    page = write_compare_report(*compared).read_text()
    assert rows(page, "compared") == [
        ["no draft", "1", "–", "500", "4.00", "0.250"],
        ["no draft", "2", "–", "500", "4.00", "0.500"],
        ["no draft", "mean", "–", "500", "4.00", "0.375"],
        ["frozen draft", "1", "1.50", "500", "4.00", "0.250"],
        ["frozen draft", "2", "1.25", "500", "4.00", "0.500"],
        ["frozen draft", "mean", "1.38", "500", "4.00", "0.375"],
        ["co-trained draft", "1", "2.50", "500", "4.00", "0.250"],
        ["co-trained draft", "2", "2.00", "500", "4.00", "0.500"],
        ["co-trained draft", "mean", "2.25", "500", "4.00", "0.375"],
    ]
    sentence = html.unescape(re.search(r'id="finding">(.*?)</p>', page)[1])
    assert sentence == (
        "Over the last quarter of the steps (7 to 8) the accepted length with the co-trained draft minus that with the "
        "frozen draft is +1.00 (seed 1), +0.75 (seed 2): mean +0.88, smallest +0.75."
    )
    assert finding(compared[0]) == sentence


def test_a_loss_of_the_cotrained_draft_is_told_as_such(tmp_path):
    write_run(tmp_path / "frozen-seed5", "frozen", [3.0] * 4)
    write_run(tmp_path / "cotrain-seed5", "cotrain", [2.5] * 4)
    assert finding(tmp_path).endswith("is -0.50 (seed 5): one seed.")


def test_compare_plots_have_the_curves_that_exist(compared):
    plots = cards(write_compare_report(*compared).read_text())
    assert ">no draft</text>" not in plots["Accepted length"] and ">frozen draft</text>" in plots["Accepted length"]
    for mode in ("no draft", "frozen draft", "co-trained draft"):
        assert f">{mode}</text>" in plots["Reward"]
    bars = plots["Acceptance per position, last quarter"]
    assert ">0.15</text>" in bars and ">0.50</text>" in bars  # first position: frozen, co-trained, over both seeds


def test_a_margin_needs_both_modes_on_one_seed():
    run = [step_metrics(0)]
    assert margin({"cotrain": {1: run}, "frozen": {2: run}}) is None
    assert margin({"cotrain": {1: run}, "frozen": {1: run}}).per_seed == {1: 0.0}


def test_a_report_is_made_again_from_the_folder_alone(compared):
    folder, runs = compared
    assert write_again(folder).read_text() == write_compare_report(folder, runs).read_text()
    assert write_again(runs["none"][1]) == runs["none"][1] / "report.html"


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"^RUN is {tmp_path}, which holds no metrics.jsonl"):
        write_again(tmp_path)
    (tmp_path / METRICS).write_text("")
    with pytest.raises(ConfigError, match="is empty; there is nothing to report before a finished step"):
        write_again(tmp_path)


def test_names_are_text_not_markup(tmp_path):
    page = write_report(write_run(tmp_path / "<b>x", "none", [1.0])).read_text()
    assert "<b>x" not in page and "&lt;b&gt;x" in page


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_readme_picture_is_written(compared, suffix):
    folder, runs = compared
    begin = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert write_accepted_length_picture(folder, folder / f"a.{suffix}").read_bytes().startswith(begin)
    assert write_accepted_length_picture(runs["cotrain"][1], folder / f"b.{suffix}").stat().st_size > 1000
