"""`report.html` of a run, and of runs compared: made from the run's folder alone, so it can be made again any time."""

import re
from pathlib import Path

from nemo_ext.config import ConfigError
from nemo_ext.local import figures, report_page
from nemo_ext.local.metrics_log import METRICS, SETTINGS, read_metrics, read_settings
from nemo_ext.local.run_stats import MODE_NAMES, MODES, Metrics, Runs, first_quarter, last_quarter, margin, mean, series

REPORT = "report.html"
_RUN_NAME = re.compile(rf"({'|'.join(MODES)})-seed(\d+)$")

# Key, name and format of the summary tables' rows.
_SUMMARY = (
    ("reward_mean", "reward", ".3f"),
    ("accepted_length", "accepted length", ".2f"),
    ("acceptance_rate", "acceptance rate", ".3f"),
    ("draft_loss", "draft loss", ".3f"),
    ("dspark_tv_loss", "draft loss, L1 distance", ".3f"),
    ("dspark_confidence_loss", "draft loss, confidence", ".3f"),
    ("policy_loss", "policy loss", ".4f"),
    ("grad_norm", "gradient norm, policy", ".3f"),
    ("draft_grad_norm", "gradient norm, draft", ".3f"),
    ("rollout_tokens_per_s", "rollout tokens/s", ",.0f"),
    ("rollout_s", "rollout seconds", ".2f"),
    ("train_s", "training seconds", ".2f"),
    ("refresh_s", "refresh seconds", ".3f"),
    ("step_s", "step seconds", ".2f"),
)
_COMPARED = (
    ("accepted_length", "accepted length", ".2f"),
    ("rollout_tokens_per_s", "rollout tokens/s", ",.0f"),
    ("step_s", "step seconds", ".2f"),
    ("reward_mean", "reward", ".3f"),
)


def write_report(folder: Path) -> Path:
    """Writes a run's `report.html` and returns its path. Raises ConfigError for a run without a finished step."""
    metrics = _finished(folder)
    settings = folder / SETTINGS
    path = folder / REPORT
    path.write_text(
        report_page.page(
            f"{folder.name}: {_mode_name(metrics)}",
            _facts(read_settings(folder), len(metrics)),
            [
                report_page.tiles(_tiles(metrics)),
                report_page.grid(_plots(metrics)),
                report_page.card("Summary", _summary(metrics)),
                *([report_page.details("Settings", settings.read_text())] if settings.is_file() else []),
            ],
        )
    )
    return path


def write_compare_report(folder: Path, runs: dict[str, dict[int, Path]]) -> Path:
    """Writes the report of `{mode: {seed: run's folder}}` into `folder` and returns its path."""
    read = {mode: {seed: _finished(run) for seed, run in sorted(seeds.items())} for mode, seeds in runs.items()}
    *_, one = (run for seeds in runs.values() for run in seeds.values())
    gain = margin(read)
    seeds = sorted({seed for of_mode in read.values() for seed in of_mode})
    steps = max(len(metrics) for of_mode in read.values() for metrics in of_mode.values())
    path = folder / REPORT
    path.write_text(
        report_page.page(
            f"{folder.name}: no draft, frozen draft, co-trained draft",
            f"seeds {', '.join(map(str, seeds))} · {_facts(read_settings(one), steps)}",
            [
                *([report_page.finding(gain.sentence())] if gain else []),
                report_page.grid(_compared_plots(read)),
                report_page.card("Last quarter of the steps", _compared_table(read), _NOTE),
            ],
        )
    )
    return path


def write_again(folder: Path) -> Path:
    """The report of a run's folder, or of a folder with the runs of `compare`. Raises ConfigError for neither."""
    if (folder / METRICS).is_file():
        return write_report(folder)
    runs = compared_runs(folder)
    if not runs:
        raise ConfigError(f"RUN is {folder}, which holds no {METRICS} and no compared runs; name the folder of a run")
    return write_compare_report(folder, runs)


def finding(folder: Path) -> str | None:
    """What a folder of compared runs shows, in a sentence; None for a single run."""
    gain = margin({mode: {s: read_metrics(run) for s, run in of.items()} for mode, of in compared_runs(folder).items()})
    return gain.sentence() if gain else None


def compared_runs(folder: Path) -> dict[str, dict[int, Path]]:
    """Folders `<mode>-seed<n>` below `folder`, by mode and seed."""
    runs: dict[str, dict[int, Path]] = {mode: {} for mode in MODES}
    for path in sorted(folder.glob(f"*/{METRICS}")):
        if match := _RUN_NAME.search(path.parent.name):
            runs[match[1]][int(match[2])] = path.parent
    return {mode: seeds for mode, seeds in runs.items() if seeds}


def write_accepted_length_picture(folder: Path, to: Path) -> Path:
    """Draws the accepted-length curves of compared runs, or of one run, into `to` (`.png`, `.svg`)."""
    runs = compared_runs(folder)
    if runs:
        figure = figures.accepted_length_picture(
            {m: {s: read_metrics(p) for s, p in of.items()} for m, of in runs.items()}
        )
    else:
        figure = figures.accepted_length_curve(_finished(folder))
    figures.save(figure, to)
    return to


def _finished(folder: Path) -> Metrics:
    metrics = read_metrics(folder)
    if not metrics:
        raise ConfigError(
            f"RUN is {folder}, whose {METRICS} is empty; there is nothing to report before a finished step"
        )
    return metrics


def _mode_name(metrics: Metrics) -> str:
    learns = mean(metrics, "draft_loss") is not None
    served = mean(metrics, "accepted_length") is not None
    return MODE_NAMES["cotrain" if learns else "frozen" if served else "none"]


def _facts(settings: dict, steps: int) -> str:
    """One line about what ran."""
    if not settings:
        return f"{steps} steps"
    policy, grpo = settings["policy"], settings["grpo"]
    megatron, model = policy["megatron_cfg"], policy["model"]
    sizes = (("TP", "tensor_model"), ("PP", "pipeline_model"), ("CP", "context"))
    layout = ", ".join(f"{name} {megatron[f'{key}_parallel_size']}" for name, key in sizes)
    shape = f"{model['num_hidden_layers']} layers of {model['hidden_size']}" if model else policy["model_name"]
    speculative = policy["generation"]["vllm_kwargs"]["speculative_config"]
    drafted = (
        f"{speculative['method']}, {speculative['num_speculative_tokens']} drafted tokens"
        if speculative
        else "no draft"
    )
    return " · ".join(
        (
            f"{steps} steps of {grpo['num_prompts_per_step']} prompts x {grpo['num_generations_per_prompt']} samples",
            ", ".join(task["name"] for task in settings["data"]["tasks"]),
            f"policy {shape}",
            drafted,
            f"{settings['cluster']['gpus_per_node']} policy rank(s): {layout}",
        )
    )


def _change(metrics: Metrics, key: str, form: str) -> tuple[str, str] | None:
    """Means of the first and the last quarter as text, if the run has the key."""
    ends = mean(first_quarter(metrics), key), mean(last_quarter(metrics), key)
    return None if None in ends else tuple(f"{end:{form}}" for end in ends)


def _tiles(metrics: Metrics):
    for key, name, form in _SUMMARY:
        if key in ("reward_mean", "accepted_length", "draft_loss", "rollout_tokens_per_s", "step_s"):
            if ends := _change(metrics, key, form):
                yield name, ends[1], f"last quarter; first: {ends[0]}"


def _plots(metrics: Metrics):
    def plot(title: str, figure, note: str = "") -> str:
        return report_page.card(title, figures.svg(figure, title), note)

    yield plot("Reward", figures.curve(metrics, "reward_mean", "mean reward", figures.MODE_COLORS["cotrain"]))
    if series(metrics, "accepted_length")[0]:
        yield plot(
            "Accepted length", figures.accepted_length_curve(metrics), "Tokens per verification, bonus token included."
        )
        yield plot(
            "Acceptance per position",
            figures.places(metrics, "acceptance_per_position", "share accepted", "position", bottom=0),
            "Share of verifications that accepted the token at this position, hence all before it.",
        )
    if series(metrics, "draft_loss_per_pass")[0]:
        yield plot(
            "Draft loss per pass",
            figures.places(metrics, "draft_loss_per_pass", "cross entropy (nats)", "pass"),
            "Pass d learns the d-th token of a drafted chain.",
        )
    if series(metrics, "draft_loss_per_slot")[0]:
        yield plot(
            "Draft loss per slot",
            figures.places(metrics, "draft_loss_per_slot", "cross entropy (nats)", "slot"),
            "Slot s of a block learns the s-th token after its anchor.",
        )
    yield plot("Time per phase", figures.phases(metrics))
    yield plot("Response length", figures.curve(metrics, "response_tokens_mean", "tokens", figures.MODE_COLORS["none"]))
    yield plot("Policy loss", figures.curve(metrics, "policy_loss", "loss", figures.MODE_COLORS["none"]))
    yield plot("Gradient norms", figures.gradient_norms(metrics), "Each before its own clip.")


def _summary(metrics: Metrics) -> str:
    rows = []
    for key, name, form in _SUMMARY:
        if ends := _change(metrics, key, form):
            _, values = series(metrics, key)
            rows.append(([name, *ends, f"{min(values):{form}}", f"{max(values):{form}}"], False))
    return report_page.table(
        "summary", ["mean over", "first quarter", "last quarter", "lowest step", "highest step"], rows
    )


_NOTE = (
    "Accepted length is the measure: tokens per target forward. Wall clock of a target this small is mostly the Python "
    "around it, and is what this machine gave while it ran."
)


def _compared_plots(runs: Runs):
    shown = (
        ("Accepted length", "accepted_length", "tokens per verification", None),
        ("Reward", "reward_mean", "mean reward", None),
        ("Rollout tokens per second", "rollout_tokens_per_s", "tokens/s", 0),
        ("Step time", "step_s", "seconds", 0),
    )
    for title, key, ylabel, bottom in shown:
        yield report_page.card(title, figures.svg(figures.three_ways(runs, key, ylabel, bottom=bottom), title))
    title = "Acceptance per position, last quarter"
    yield report_page.card(title, figures.svg(figures.acceptance_bars(runs, last_quarter), title))
    if any(series(run, "draft_loss")[0] for run in runs.get("cotrain", {}).values()):
        cotrain = {"cotrain": runs["cotrain"]}
        title = "Draft loss"
        yield report_page.card(
            title, figures.svg(figures.three_ways(cotrain, "draft_loss", "cross entropy (nats)"), title)
        )


def _compared_table(runs: Runs) -> str:
    """A row for each mode and seed, and one for each mode's mean."""
    rows = []
    for mode, seeds in runs.items():
        ends = {seed: [mean(last_quarter(run), key) for key, _, _ in _COMPARED] for seed, run in seeds.items()}
        rows += [([MODE_NAMES[mode], str(seed), *_cells(values)], False) for seed, values in ends.items()]
        means = [
            sum(column) / len(column) if None not in column else None for column in zip(*ends.values(), strict=True)
        ]
        rows.append(([MODE_NAMES[mode], "mean", *_cells(means)], True))
    return report_page.table("compared", ["draft", "seed", *(name for _, name, _ in _COMPARED)], rows)


def _cells(values) -> list[str]:
    forms = (form for _, _, form in _COMPARED)
    return ["–" if value is None else f"{value:{form}}" for value, form in zip(values, forms, strict=True)]
