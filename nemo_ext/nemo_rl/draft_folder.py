"""The Hugging Face folder that the draft starts from: a local one, one from the hub, or a fresh one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from nemo_ext.config import ConfigError, DraftConfig, default_taps, show, taps_outside
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_folder import CONFIG, WEIGHTS, check_draft_folder
from nemo_ext.drafts.eagle3_init import init_eagle3

FRESH = "draft_start"


def starting_folder(draft: DraftConfig, policy: Mapping[str, Any], checkpoint_dir: str) -> str:
    """Absolute path of the draft's folder, which fits the policy.

    A fresh one is written into `checkpoint_dir`, and found there again when the run is resumed.

    Raises:
        ConfigError: a line for everything that does not fit.
    """
    config = policy_hf_config(policy)
    if draft.model_name is None:
        folder = Path(checkpoint_dir) / FRESH
        _write_fresh(folder, draft, config)
    elif Path(draft.model_name).is_dir():
        folder = Path(draft.model_name)
    else:
        folder = Path(_download(draft.model_name))
    check_draft_folder(folder, config, draft, max_length=policy["max_total_sequence_length"])
    return str(folder.resolve())


def draft_of_folder(folder: str | Path, draft: DraftConfig, policy: Mapping[str, Any]) -> tuple[Path, Eagle3Config]:
    """A folder that `starting_folder` gave, or one of a checkpoint, and the draft's shape. Raises ConfigError."""
    longest = policy["max_total_sequence_length"]
    return Path(folder), check_draft_folder(folder, policy_hf_config(policy), draft, max_length=longest)


def policy_hf_config(policy: Mapping[str, Any]) -> dict:
    """The policy's Hugging Face config as a dict, with `policy.hf_config_overrides`."""
    from transformers import AutoConfig

    overrides = policy.get("hf_config_overrides") or {}
    config = AutoConfig.from_pretrained(policy["model_name"], trust_remote_code=True, **overrides)
    return config.get_text_config().to_dict()


def _write_fresh(folder: Path, draft: DraftConfig, policy: dict) -> None:
    taps = draft.aux_layer_indices or default_taps(policy["num_hidden_layers"])
    lines = taps_outside(taps, policy["num_hidden_layers"])
    if draft.draft_vocab_size is not None:
        lines.append(
            f"policy.draft.draft_vocab_size is {draft.draft_vocab_size}, but a fresh draft knows no token counts to choose "
            "by; set null or give a draft with a reduced vocabulary as policy.draft.model_name"
        )
    if lines:
        raise ConfigError(*lines)
    if "head_dim" not in policy:
        policy = {**policy, "head_dim": policy["hidden_size"] // policy["num_attention_heads"]}
    shape = Eagle3Config.for_policy(
        policy,
        taps,
        num_layers=draft.num_layers or 1,
        norm_output=bool(draft.norm_output),
        norm_before_residual=bool(draft.norm_before_residual),
        fc_norm=bool(draft.fc_norm),
    )
    config = shape.to_hf()
    if (folder / CONFIG).is_file():
        if json.loads((folder / CONFIG).read_text()) != config:
            raise ConfigError(
                f"policy.draft.model_name is null, but {folder} has a fresh draft of other settings; use another "
                "checkpointing.checkpoint_dir or remove the folder"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{WEIGHTS}.partial"
    save_file(init_eagle3(shape, seed=0), partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _download(name: str) -> str:
    """A draft of the Hugging Face hub, in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"policy.draft.model_name is {show(name)}, no local folder and not to be had from the hub ({reason}); give a "
            "folder, a hub name, or null for a fresh draft"
        ) from None
