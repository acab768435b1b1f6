"""Hugging Face folders: `config.json`, `model.safetensors` and tokenizer files."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def save_hf_folder(
    path: str | Path, hf_config: dict, tensors: Mapping[str, torch.Tensor], tokenizer_dir: str | Path | None = None
) -> None:
    """Writes a folder that transformers and vLLM load as it is; files that are there are replaced whole.

    `tokenizer_dir`: a folder whose other files (a tokenizer's) are copied along.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if tokenizer_dir is not None:
        for file in Path(tokenizer_dir).iterdir():
            if file.is_file() and file.name != CONFIG and file.suffix != ".safetensors":
                shutil.copy(file, path / file.name)
    # Written aside and renamed, so that a reader never meets half a file.
    partial = path / f".{WEIGHTS}.partial"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"})
    partial.replace(path / WEIGHTS)
    (path / CONFIG).write_text(json.dumps(hf_config, indent=2, sort_keys=True) + "\n")


def read_hf_folder(path: str | Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Reads configuration and tensors of such a folder; raises FileNotFoundError where either file is missing."""
    path = Path(path)
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} is not a Hugging Face folder with safetensors: it has no {name}")
    return json.loads((path / CONFIG).read_text()), load_file(path / WEIGHTS)
