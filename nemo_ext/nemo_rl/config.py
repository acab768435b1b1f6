"""The check of a NeMo-RL run whose draft this package trains: whole, once, before anything starts."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_ext.config import ConfigError, DraftConfig, show, validated
from nemo_ext.nemo_rl.patch_set import PatchError, PatchSet
from nemo_ext.nemo_rl.patching import recognise
from nemo_ext.nemo_rl.support import at, broken_limits

SPECULATIVE = "policy.generation.vllm_kwargs.speculative_config"


def draft_settings(policy: Mapping[str, Any]) -> DraftConfig:
    """`policy.draft`, checked by itself. Raises ConfigError."""
    return validated(DraftConfig, dict(policy["draft"]), "policy.draft")


def check_run(policy: Mapping[str, Any]) -> DraftConfig:
    """`policy.draft`, checked against everything else under `policy`.

    A draft that is not enabled asks nothing of the rest.

    Raises:
        ConfigError: a line for everything that does not work together.
    """
    draft = draft_settings(policy)
    lines = [*_limits(policy), *_speculation(policy, draft)] if draft.enabled else []
    if lines:
        raise ConfigError(*lines)
    return draft


def upstream_version() -> str | None:
    """The pinned version of the NeMo-RL that is imported, or the one nearest to it if its drift was accepted; None for one
    that was changed since it was patched."""
    patches = _patches()
    return None if patches is None else patches.version


def _patches() -> PatchSet | None:
    found = find_spec("nemo_rl")
    if found is None or not found.submodule_search_locations:
        return None
    try:
        return recognise(Path(found.submodule_search_locations[0]).parent).patches
    except PatchError:
        return None


def _limits(policy: Mapping[str, Any]) -> Iterator[str]:
    """A line for each feature that is on and does not work.

    A drifted version may have the settings of another pinned version already, or still, so it has the limits of all.
    """
    lines = list(broken_limits(policy, upstream_version()))
    patches = _patches()
    if patches is not None and patches.drifted:
        lines += broken_limits(policy, None)
    yield from dict.fromkeys(lines)


def _speculation(policy: Mapping[str, Any], draft: DraftConfig) -> Iterator[str]:
    speculative = at(policy, "generation.vllm_kwargs.speculative_config")
    if not speculative:
        yield (
            f"policy.draft.enabled is true but {SPECULATIVE} is {show(speculative)}, so nothing would serve the draft; "
            f"set its method: {draft.speculator_type} and num_speculative_tokens"
        )
        return
    method, tokens = speculative.get("method"), speculative.get("num_speculative_tokens")
    if method != draft.speculator_type:
        yield (
            f"{SPECULATIVE}.method is {show(method)} but policy.draft.speculator_type is {draft.speculator_type}; "
            "set both alike"
        )
    if not isinstance(tokens, int) or tokens < 1:
        yield f"{SPECULATIVE}.num_speculative_tokens is {show(tokens)}; set how many tokens to draft, 1 or more"
    model = speculative.get("model")
    if model != draft.model_name and model is not None:
        yield (
            f"{SPECULATIVE}.model is {show(model)} but policy.draft.model_name is {show(draft.model_name)}; vLLM must "
            "start from the draft that trains, so set both alike or leave model out"
        )
