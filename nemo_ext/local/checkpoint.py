"""Checkpoints of a run: the two models as Hugging Face folders, and each rank's optimizer state beside them."""

import json
import re
import shutil
from pathlib import Path

from nemo_ext.config import ConfigError
from nemo_ext.local.cluster import PolicyGroup
from nemo_ext.local.warmup import Start

_NAME = re.compile(r"step_(\d+)$")


def save(run_folder: Path, step: int, policy_group: PolicyGroup, start: Start, keep: int) -> Path:
    """Writes `checkpoints/step_N`, whole or not at all, and removes all but the `keep` newest."""
    root = run_folder / "checkpoints"
    final, partial = root / f"step_{step}", root / f".partial_{step}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    policy_group.call("save", str(partial), str(start.policy))
    (partial / "state.json").write_text(json.dumps({"step": step}) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for old in _all(run_folder)[:-keep]:
        shutil.rmtree(old)
    return final


def latest(run_folder: Path) -> Path | None:
    """The newest whole checkpoint of a run, if it has one."""
    found = _all(run_folder)
    return found[-1] if found else None


def step_of(checkpoint: Path) -> int:
    """Number of finished steps. Raises ConfigError if the checkpoint does not tell."""
    try:
        return json.loads((checkpoint / "state.json").read_text())["step"]
    except (OSError, ValueError, TypeError, KeyError):
        raise ConfigError(
            f"{checkpoint}/state.json does not tell the step; remove {checkpoint} to go on from the checkpoint before it"
        ) from None


def _all(run_folder: Path) -> list[Path]:
    found = [(int(m[1]), p) for p in (run_folder / "checkpoints").glob("step_*") if (m := _NAME.search(p.name))]
    return [path for _, path in sorted(found)]
