"""What the checks of all kinds of draft folders share. Needs no torch."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from nemo_ext.config import MAX_LAYERS, ConfigError, show
from nemo_ext.drafts.safetensors_header import TensorEntry, read_header

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def refused(folder: Path, lines: Iterable[str]) -> ConfigError:
    """The error of a folder that does not fit."""
    return ConfigError(*(f"policy.draft.model_name is {folder}: {line}" for line in lines))


def read_parts(folder: Path) -> tuple[dict, dict[str, TensorEntry]]:
    """The config, and the tensors' headers by name, of a folder that has both files. Raises ConfigError."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise refused(folder, [f"{CONFIG} is not JSON: {error}"]) from None
    if not isinstance(config, dict):
        raise refused(folder, [f"{CONFIG} is {show(config)}; it must hold a section of keys"])
    try:
        return config, read_header(folder / WEIGHTS)
    except ValueError as error:
        raise refused(folder, [f"{WEIGHTS}: {error}"]) from None


def number_lines(config: dict, keys: Iterable[str]) -> Iterator[str]:
    """A line for each of the keys that is no number, and for more layers than a draft has."""
    for key in keys:
        if not isinstance(config.get(key), (int, float)):
            yield f"{key} is {show(config.get(key))} in {CONFIG}; it must be a number"
    if isinstance(config.get("num_hidden_layers"), int) and config["num_hidden_layers"] > MAX_LAYERS:
        yield f"num_hidden_layers is {config['num_hidden_layers']} in {CONFIG}; it must be <= {MAX_LAYERS}"
