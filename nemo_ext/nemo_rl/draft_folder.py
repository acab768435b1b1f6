"""The Hugging Face folder that the draft starts from: a local one, one from the hub, or a fresh one."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from nemo_ext.config import ConfigError, DraftConfig, default_taps, show, taps_outside
from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_folder import check_block_folder
from nemo_ext.drafts.block_formats import vllm_form
from nemo_ext.drafts.block_import import import_block_draft
from nemo_ext.drafts.block_init import init_block
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_folder import CONFIG, WEIGHTS, check_draft_folder
from nemo_ext.drafts.eagle3_init import init_eagle3

Shape = Eagle3Config | BlockConfig
START = "draft_start"


def starting_folder(draft: DraftConfig, policy: Mapping[str, Any], checkpoint_dir: str) -> str:
    """Absolute path of the draft's folder, which fits the policy, in the form that vLLM serves.

    A fresh draft, and one in another form, is written into `checkpoint_dir`, and found there again when the run is resumed.

    Raises:
        ConfigError: a line for everything that does not fit.
    """
    config = policy_hf_config(policy)
    longest = policy["max_total_sequence_length"]
    own = Path(checkpoint_dir) / START
    if draft.model_name is None:
        shape = _fresh_shape(draft, config)
        fresh = init_eagle3 if isinstance(shape, Eagle3Config) else init_block
        _write(own, shape.to_hf(), lambda: fresh(shape, seed=0))
        folder = own
    else:
        folder = Path(draft.model_name)
        if not folder.is_dir():
            folder = Path(_download(draft.model_name))
    _check(folder, draft, config, longest)
    found = json.loads((folder / CONFIG).read_text())
    if draft.speculator_type != "eagle3" and vllm_form(found) != found:
        served, tensors = import_block_draft(found, load_file(folder / WEIGHTS))
        _write(own, served, lambda: tensors)
        folder = own
    return str(folder.resolve())


def draft_of_folder(folder: str | Path, draft: DraftConfig, policy: Mapping[str, Any]) -> tuple[Path, Shape]:
    """A folder that `starting_folder` gave, or one of a checkpoint, and the draft's shape. Raises ConfigError."""
    shape = _check(Path(folder), draft, policy_hf_config(policy), policy["max_total_sequence_length"])
    return Path(folder), shape


def _check(folder: Path, draft: DraftConfig, policy: dict, longest: int) -> Shape:
    check = check_draft_folder if draft.speculator_type == "eagle3" else check_block_folder
    return check(folder, policy, draft, max_length=longest)


def policy_hf_config(policy: Mapping[str, Any]) -> dict:
    """The policy's Hugging Face config as a dict, with `policy.hf_config_overrides`."""
    from transformers import AutoConfig

    overrides = policy.get("hf_config_overrides") or {}
    config = AutoConfig.from_pretrained(policy["model_name"], trust_remote_code=True, **overrides)
    return config.get_text_config().to_dict()


def _fresh_shape(draft: DraftConfig, policy: dict) -> Shape:
    """Of a draft that starts from random weights, shaped like the policy's layers. Raises ConfigError."""
    taps = draft.aux_layer_indices or default_taps(policy["num_hidden_layers"])
    lines = taps_outside(taps, policy["num_hidden_layers"])
    if draft.draft_vocab_size is not None:
        lines.append(
            f"policy.draft.draft_vocab_size is {draft.draft_vocab_size}, but a fresh draft knows no token counts to choose "
            "by; set null or give a draft with a reduced vocabulary as policy.draft.model_name"
        )
    if draft.speculator_type != "eagle3":
        lines += [
            f"policy.draft.{key} is null, and so is policy.draft.model_name, whose draft would tell; set {what}"
            for key, what in (
                ("gamma", "how many tokens a block drafts"),
                ("mask_token_id", "a token id that texts do not have"),
            )
            if getattr(draft, key) is None
        ]
        if (draft.mask_token_id or 0) >= policy["vocab_size"]:
            lines.append(
                f"policy.draft.mask_token_id is {draft.mask_token_id}, outside the policy's vocabulary of "
                f"{policy['vocab_size']}; set a token id below that"
            )
    if lines:
        raise ConfigError(*lines)
    policy = {
        # What the configs of some families leave to be told, or call by another name.
        "head_dim": policy["hidden_size"] // policy["num_attention_heads"],
        "rms_norm_eps": policy.get("layer_norm_epsilon", 1e-6),
        **{key: value for key, value in policy.items() if value is not None},
    }
    layers = draft.num_layers or 1
    if draft.speculator_type == "eagle3":
        return Eagle3Config.for_policy(
            policy,
            taps,
            num_layers=layers,
            norm_output=bool(draft.norm_output),
            norm_before_residual=bool(draft.norm_before_residual),
            fc_norm=bool(draft.fc_norm),
        )
    return BlockConfig.for_policy(
        draft.speculator_type,
        policy,
        taps,
        gamma=draft.gamma,
        mask_token_id=draft.mask_token_id,
        num_layers=layers,
        sliding_window=draft.sliding_window,
        markov_rank=draft.markov_rank or 64,
    )


def _write(folder: Path, config: dict, tensors: Callable[[], Mapping[str, Any]]) -> None:
    """A draft's folder, whole; one with the same config is left as it is."""
    if (folder / CONFIG).is_file():
        if json.loads((folder / CONFIG).read_text()) != config:
            raise ConfigError(
                f"policy.draft is to start from a draft that {folder} would hold, but there is one of other settings; use "
                "another checkpointing.checkpoint_dir or remove the folder"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{WEIGHTS}.partial"
    save_file(dict(tensors()), partial, metadata={"format": "pt"})
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
