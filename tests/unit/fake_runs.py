"""Metrics of runs that never were, with known numbers: what reports and logs are tested on."""

import json
from pathlib import Path

from nemo_ext.local.metrics_log import METRICS


def step_metrics(step: int, mode: str = "cotrain", *, accepted_length: float = 2.0, reward: float = 0.5) -> dict:
    """One step of a run in `mode`, as the trainer writes it."""
    metrics = {
        "step": step,
        "reward_mean": reward,
        "response_tokens_mean": 5.0,
        "accepted_length": None,
        "acceptance_rate": None,
        "acceptance_per_position": None,
        "policy_loss": -0.01 * step,
        "grad_norm": 0.5,
        "rollout_s": 2.0,
        "rollout_tokens": 1000,
        "rollout_tokens_per_s": 500.0,
        "train_s": 1.5,
        "refresh_s": 0.25,
        "step_s": 4.0,
        "weights_version": step + 1,
        "policy_sha256": "0" * 64,
    }
    if mode != "none":
        rate = (accepted_length - 1) / 3
        metrics |= {
            "accepted_length": accepted_length,
            "acceptance_rate": rate,
            "acceptance_per_position": [rate * 1.2, rate, rate * 0.8],
        }
    if mode == "cotrain":
        metrics |= {"draft_loss": 1.0, "draft_loss_per_pass": [0.8, 1.0, 1.2], "draft_grad_norm": 0.7}
        metrics |= {"draft_expected_accepted_length": accepted_length + 0.1}
    return metrics


def write_run(folder: Path, mode: str, accepted_lengths: list[float], rewards: list[float] | None = None) -> Path:
    """A run's folder with one step for each accepted length; returns it."""
    rewards = rewards or [0.5] * len(accepted_lengths)
    steps = [
        step_metrics(step, mode, accepted_length=length, reward=reward)
        for step, (length, reward) in enumerate(zip(accepted_lengths, rewards, strict=True))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).write_text("".join(json.dumps(metrics) + "\n" for metrics in steps))
    return folder
