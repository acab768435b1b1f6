"""The Hugging Face folder that the draft starts from: a local one, one from the hub, or a fresh one."""

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nemo_ext.config import ConfigError, DraftConfig, default_taps, show
from nemo_ext.drafts.block_formats import read_alike
from nemo_ext.drafts.block_import import import_block_draft
from nemo_ext.drafts.folder import CONFIG, WEIGHTS
from nemo_ext.drafts.fresh_sizes import fresh_sizes
from nemo_ext.drafts.kinds import Shape, kind_of, uneven_line
from nemo_ext.nemo_rl.config import upstream_version
from nemo_ext.nemo_rl.engines import engine_lines
from nemo_ext.nemo_rl.families import refusal
from nemo_ext.nemo_rl.support import at

START = "draft_start"
_PLAIN_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
_PICKLE = "pytorch_model.bin"
_TAP_IDS = "eagle_aux_hidden_state_layer_ids"


def starting_folder(draft: DraftConfig, policy: Mapping[str, Any], checkpoint_dir: str) -> str:
    """Absolute path of the draft's folder, which fits the policy, in the form that vLLM serves.

    A fresh draft, and one in a form that vLLM or the trainer does not read, is written into `checkpoint_dir`, and found
    there again when the run is resumed.

    Raises:
        ConfigError: a line for everything that does not fit.
    """
    config, version = policy_hf_config(policy), upstream_version()
    if line := refusal(config.get("architectures"), draft.speculator_type, version):
        raise ConfigError(line)
    longest = policy["max_total_sequence_length"]
    own = Path(checkpoint_dir) / START
    was_there = own.exists()
    if draft.model_name is None:
        shape = _fresh_shape(draft, config, longest)
        _write(own, shape.to_hf(), lambda: kind_of(draft).fresh_tensors(shape, 0))
        folder = own
    else:
        folder = Path(draft.model_name)
        if not folder.is_dir():
            folder = Path(_download(draft.model_name))
        if draft.speculator_type == "eagle3":
            folder = _whole_eagle3(folder, draft, config, own)
    try:
        shape = kind_of(draft).folder_shape(folder, draft, config, longest)
        tp = at(policy, "megatron_cfg.tensor_model_parallel_size") or 1
        if lines := [*uneven_line(tp, shape), *engine_lines(shape, version)]:
            raise ConfigError(*lines)
    except ConfigError as error:
        if folder != own or was_there:
            raise
        shutil.rmtree(own)
        raise ConfigError(*(line.replace(str(own), str(draft.model_name)) for line in error.lines)) from None
    found = json.loads((folder / CONFIG).read_text())
    if draft.speculator_type != "eagle3" and not read_alike(found):
        served, tensors = import_block_draft(found, load_file(folder / WEIGHTS))
        _write(own, served, lambda: tensors)
        folder = own
    return str(folder.resolve())


def _whole_eagle3(folder: Path, draft: DraftConfig, policy: dict, own: Path) -> Path:
    """The folder, or `own` with what public EAGLE-3 drafts often lack: safetensors, and the tapped layers in the config.

    Untold layers are those of `policy.draft.aux_layer_indices`, else vLLM's own for such a draft.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        return folder  # told by the check of the folder
    eagle = config.get("eagle_config") or {}
    told = config.get(_TAP_IDS) or eagle.get(_TAP_IDS)
    pickled = not (folder / WEIGHTS).is_file() and (folder / _PICKLE).is_file()
    # vLLM 0.20.0 looks for this flag at the top only.
    nested = bool(eagle.get("norm_before_fc")) and not config.get("norm_before_fc")
    if told and not pickled and not nested:
        return folder
    if nested:
        config["norm_before_fc"] = True
    if not told:
        ids = [layer + 1 for layer in draft.aux_layer_indices or default_taps(policy["num_hidden_layers"])]
        config |= {_TAP_IDS: ids, "eagle_config": {**eagle, _TAP_IDS: ids}}
    _write(own, config, lambda: _unpickled(folder / _PICKLE) if pickled else load_file(folder / WEIGHTS))
    return own


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickle, which can hold nothing else."""
    try:
        found = torch.load(file, weights_only=True, map_location="cpu")
        return {name: tensor.contiguous().clone() for name, tensor in found.items()}
    except (pickle.UnpicklingError, AttributeError, EOFError, RuntimeError) as error:
        raise ConfigError(
            f"policy.draft.model_name: {file} is no pickle of plain tensors ({str(error).splitlines()[0]}); save the draft "
            f"as {WEIGHTS}"
        ) from None


def draft_of_folder(folder: str | Path, draft: DraftConfig, policy: Mapping[str, Any]) -> tuple[Path, Shape]:
    """A folder that `starting_folder` gave, or one of a checkpoint, and the draft's shape. Raises ConfigError."""
    config, longest = policy_hf_config(policy), policy["max_total_sequence_length"]
    shape = kind_of(draft).folder_shape(folder, draft, config, longest)
    return Path(folder), shape


def policy_hf_config(policy: Mapping[str, Any]) -> dict:
    """The policy's Hugging Face config as a dict, with `policy.hf_config_overrides`. Raises ConfigError if it is not of a
    text model with plain logits."""
    import transformers

    overrides = policy.get("hf_config_overrides") or {}
    try:
        config = transformers.AutoConfig.from_pretrained(policy["model_name"], trust_remote_code=True, **overrides)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"policy.model_name is {policy['model_name']}, whose config transformers {transformers.__version__} cannot read "
            f"({str(error).splitlines()[0]}); give a folder that brings its own configuration code, or a transformers that "
            "knows the model"
        ) from None
    if config.get_text_config() is not config:
        raise ConfigError(
            f"policy.model_name is {policy['model_name']}, a multimodal model ({config.model_type}) that lays out its rows by "
            "itself; drafts train beside text models only, so set policy.draft.enabled to false"
        )
    # Nemotron-H's class computes its number of layers, and leaves it out of the dict.
    found = {"num_hidden_layers": getattr(config, "num_hidden_layers", None)} | config.to_dict()
    lines = [
        f"policy.model_name is {policy['model_name']}, whose config has {key} {show(found[key])}; a draft's teacher is the "
        f"plain output layer, so train drafts beside models with {show(plain)} only"
        for key, plain in _PLAIN_LOGITS.items()
        if found.get(key) not in (None, plain)
    ]
    if lines:
        raise ConfigError(*lines)
    return found


def _fresh_shape(draft: DraftConfig, policy: dict, longest: int) -> Shape:
    """Of a draft that starts from random weights, by the rules of `fresh_sizes`. Raises ConfigError.

    Its positions reach as far as the run's sequences, which a policy with scaled positions may outgrow.
    """
    kind = kind_of(draft)
    sizes = fresh_sizes(policy | {"max_position_embeddings": max(policy.get("max_position_embeddings") or 0, longest)})
    lines = list(kind.fresh_lines(draft, sizes))
    if draft.draft_vocab_size is not None:
        lines.append(
            f"policy.draft.draft_vocab_size is {draft.draft_vocab_size}, but a fresh draft knows no token counts to choose "
            "by; set null or give a draft with a reduced vocabulary as policy.draft.model_name"
        )
    if lines:
        raise ConfigError(*lines)
    return kind.fresh_shape(draft, sizes)


def _write(folder: Path, config: dict, tensors: Callable[[], Mapping[str, Any]]) -> None:
    """A draft's folder, whole; one with the same config is left as it is."""
    if (folder / CONFIG).is_file():
        if json.loads((folder / CONFIG).read_text()) != config:
            raise ConfigError(
                f"policy.draft is to start from a draft that {folder} would hold, but there is one of other settings; use "
                "another checkpointing.checkpoint_dir or remove the folder"
            )
        return
    made = dict(tensors())
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{WEIGHTS}.partial"
    save_file(made, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _download(name: str) -> str:
    """A draft of the Hugging Face hub, in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", _PICKLE])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"policy.draft.model_name is {show(name)}, no local folder and not to be had from the hub ({reason}); give a "
            "folder, a hub name, or null for a fresh draft"
        ) from None
