"""What the patched lines call, in the driver and in the generation worker. Nothing heavy is imported here.

Every one of them is called only where `policy.draft.engine` is `nemo_ext`.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

from nemo_ext.config import ConfigError
from nemo_ext.nemo_rl.config import check_run, draft_settings

POLICY_WORKER = "nemo_ext.nemo_rl.policy_worker.DraftPolicyWorker"
WORKER_EXTENSION = "nemo_ext.nemo_rl.vllm_backend.DraftWorkerExtension"
MEGATRON_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
UPSTREAM_EXTENSION = "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension"
ENGINE = "draft_engine"  # under policy.generation: the generation workers know no policy.draft


def prepare_run(policy: MutableMapping[str, Any], checkpoint_dir: str) -> None:
    """Called by `grpo.setup` first of all: checks the run and tells the generation workers of the draft.

    `policy.draft.model_name` becomes a local folder, from which trainer and vLLM both start; that of a fresh draft is
    written into `checkpoint_dir`.

    Raises ConfigError.
    """
    draft = check_run(policy)
    if not draft.enabled:
        return
    from nemo_ext.nemo_rl.draft_folder import starting_folder

    folder = starting_folder(draft, policy, checkpoint_dir)
    policy["draft"]["model_name"] = folder
    generation = policy["generation"]
    generation[ENGINE] = "nemo_ext"
    generation["vllm_kwargs"]["speculative_config"]["model"] = folder


def upstream_trains_draft(policy: Mapping[str, Any]) -> bool:
    """Called by `Policy.__init__`: False, because upstream's own draft stays off and its limits do not apply.

    Raises ConfigError for a draft in a run that `prepare_run` has not seen.
    """
    if draft_settings(policy).enabled and (policy.get("generation") or {}).get(ENGINE) != "nemo_ext":
        raise ConfigError(
            "policy.draft.engine is nemo_ext, which trains drafts in GRPO (nemo_rl.algorithms.grpo.setup) only; set "
            "policy.draft.enabled to false in other recipes"
        )
    return False


def policy_worker_cls(default: str, policy: Mapping[str, Any]) -> str:
    """Called by `resolve_policy_worker_cls`: the class path that it goes on with. Raises ConfigError."""
    if not draft_settings(policy).enabled:
        return default
    if default != MEGATRON_WORKER or policy.get("quant_cfg") is not None:
        raise ConfigError("policy.draft.engine is nemo_ext, which trains drafts beside plain Megatron policies only")
    return POLICY_WORKER


def engine_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Called before vLLM's engine is made: its keyword arguments, with our worker extension.

    The weights are read from their folders instead of made up: a made-up draft head would be the policy's own module,
    and no later refresh could part them (contract D.3).
    """
    found = arguments["worker_extension_cls"]
    if found != UPSTREAM_EXTENSION:
        raise ConfigError(
            f"vLLM's worker_extension_cls is {found}; a draft is refreshed beside {UPSTREAM_EXTENSION} only"
        )
    return {**arguments, "worker_extension_cls": WORKER_EXTENSION, "load_format": "auto"}
