"""A run's numbers on disk: `metrics.jsonl`, one object a step, its settings beside it, and TensorBoard scalars."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_ext.config import ConfigError, show
from nemo_ext.local.settings import RunConfig

METRICS, SETTINGS = "metrics.jsonl", "config.yaml"
# NeMo-RL's names of what vLLM reports about speculation.
_VLLM_TAGS = {
    "accepted_length": "vllm/spec_acceptance_length",
    "acceptance_rate": "vllm/spec_acceptance_rate",
    "acceptance_per_position": "vllm/spec_acceptance_rate-pos",
}


class MetricsLog:
    """Writes each step as it comes. A context manager: TensorBoard's file is closed at the end.

    Args:
        folder: of the run.
        config: written to `config.yaml` as it was checked.

    A run's first `write` replaces the metrics of an earlier run in the folder, unless `truncate` kept some.
    Raises ConfigError if TensorBoard is asked for and not installed.
    """

    def __init__(self, folder: Path, config: RunConfig):
        self._path = folder / METRICS
        self._tensorboard_folder = folder / "tensorboard" if config.logger.tensorboard_enabled else None
        if self._tensorboard_folder and find_spec("tensorboard") is None:
            raise ConfigError(
                "logger.tensorboard_enabled is true but tensorboard is not installed; "
                "install the extra: pip install 'nemo-ext[cpu]', or set false"
            )
        (folder / SETTINGS).write_text(OmegaConf.to_yaml(OmegaConf.create(config.model_dump())))
        self._first_step = 0
        self._file = None
        self._tensorboard = None

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exc) -> None:
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def truncate(self, first_step: int) -> None:
        """Keeps the earlier metrics of steps before `first_step`, the next to be written: a resumed run."""
        kept = [m for m in read_metrics(self._path.parent) if m["step"] < first_step] if self._path.exists() else []
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(m) + "\n" for m in kept))
        partial.replace(self._path)
        self._first_step = first_step

    def write(self, metrics: dict[str, Any]) -> None:
        """Appends one step. Values: numbers, lists of numbers, texts, or None for what the step has not."""
        if self._file is None:
            self._open()
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for tag, value in scalars(metrics):
                self._tensorboard.add_scalar(tag, value, metrics["step"])
            self._tensorboard.flush()

    def _open(self) -> None:
        self._file = self._path.open("a" if self._first_step else "w")
        if self._tensorboard_folder:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self._tensorboard_folder), purge_step=self._first_step)


def scalars(metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """TensorBoard tags and values of one step: `train/`, `timing/train/` and `vllm/`, as NeMo-RL's logger has them.
    A list's entries are numbered from 0."""
    for key, value in metrics.items():
        tag = _VLLM_TAGS.get(key) or (f"timing/train/{key[:-2]}" if key.endswith("_s") else f"train/{key}")
        if isinstance(value, list):
            yield from ((f"{tag}-{index}", item) for index, item in enumerate(value))
        elif isinstance(value, (int, float)) and key != "step":
            yield tag, value


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All steps of a run, in order, but for a last line that was not finished. Raises ConfigError for a folder that holds
    no run, and for a line that is no step."""
    path = folder / METRICS
    if not path.is_file():
        raise ConfigError(f"RUN is {folder}, which has no {METRICS}; name the folder of a run")
    *lines, _unfinished = path.read_text().split("\n")
    return [_step(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _step(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
        if isinstance(found["step"], int):
            return found
    except (ValueError, TypeError, KeyError):
        pass
    raise ConfigError(f"{where}: {show(line)} is not a step's metrics; take the line out")


def read_settings(folder: Path) -> dict[str, Any]:
    """The run's settings as plain data; {} if it has none."""
    path = folder / SETTINGS
    try:
        return OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}; remove it to go without") from None
