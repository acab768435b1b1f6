"""The same seeds and tasks three ways: no draft, a frozen draft, a co-trained draft."""

from pathlib import Path

from nemo_ext.local import train
from nemo_ext.local.report import write_compare_report
from nemo_ext.local.settings import RunConfig

MODES = ("none", "frozen", "cotrain")


def run(config: RunConfig, seeds: list[int]) -> Path:
    """Runs every mode on every seed and writes one report; its path.

    Frozen and co-trained start from the same warmed-up draft. Runs lie in `<log_dir>/<run_name>/<mode>-seed<seed>`.
    """
    folder = Path(config.logger.log_dir) / config.logger.run_name
    runs = {
        mode: {seed: train.run(mode_config(config, mode, seed, folder), report=False) for seed in seeds}
        for mode in MODES
    }
    return write_compare_report(folder, runs)


def mode_config(config: RunConfig, mode: str, seed: int, folder: Path) -> RunConfig:
    """The run's config with the draft off, served as it is, or co-trained."""
    changed = config.model_copy(deep=True)
    changed.grpo.seed = changed.data.seed = seed
    changed.logger.log_dir, changed.logger.run_name = str(folder), f"{mode}-seed{seed}"
    changed.checkpointing.enabled = False
    changed.policy.draft.enabled = mode == "cotrain"
    if mode == "none":
        changed.policy.generation.vllm_kwargs.speculative_config = None
    return changed
