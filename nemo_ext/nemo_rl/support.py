"""What of NeMo-RL works together with `policy.draft.engine: nemo_ext`, by name. The documentation's table is made from it:

python -m nemo_ext.nemo_rl.support
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_ext.config import show

V070, MAIN = "v0.7.0", "main-7ea279abf"
VERSIONS = (V070, MAIN)

_WORKER = "`test_policy_worker.py`: upstream's own `train` on CPU ranks, Megatron-core 0.19.2"
_SERVED = "`test_train_is_serve.py` and `test_backend.py`: vLLM 0.20.0 (V1 runner) and 0.25.1 (V1 and V2) on a CPU"
_REFIT = (
    "`test_backend.py`: vLLM 0.20.0 and 0.25.1 on a CPU, both ends in one process; CUDA IPC, NCCL and sleep by reading"
)

# Features that work, with the setting that turns them on, and what shows it.
SUPPORTED = (
    (
        "GRPO, synchronous",
        "`examples/run_grpo.py`",
        "`test_hooks.py` as far as the first need of a GPU; the rest by reading",
    ),
    ("GRPO, asynchronous", "`grpo.async_grpo.enabled`", "by reading"),
    ("EAGLE-3, training-time test", "`policy.draft.speculator_type: eagle3`", f"{_WORKER}; {_SERVED}"),
    ("DFlash", "`policy.draft.speculator_type: dflash`", f"{_WORKER}; {_SERVED}"),
    ("colocated generation (IPC refit)", "`policy.generation.colocated.enabled: true`", _REFIT),
    ("generation on GPUs of its own (collective refit)", "`policy.generation.colocated.enabled: false`", _REFIT),
    (
        "tensor, data and expert parallelism",
        "`policy.megatron_cfg.*_parallel_size`",
        f"tensor and data: {_WORKER}; expert by reading",
    ),
    ("sequence parallelism", "`policy.megatron_cfg.sequence_parallel`", _WORKER),
    ("context parallelism, with packing", "`policy.megatron_cfg.context_parallel_size`", _WORKER),
    ("pipeline parallelism", "`policy.megatron_cfg.pipeline_model_parallel_size`", _WORKER),
    ("sequence packing", "`policy.sequence_packing.enabled`", _WORKER),
    ("dynamic batching", "`policy.dynamic_batching.enabled`", _WORKER),
    ("activation recompute", "`policy.megatron_cfg.activation_checkpointing`", _WORKER),
    ("checkpoint save and resume", "`checkpointing.enabled`", _WORKER),
    (
        "a draft from a folder or the hub",
        "`policy.draft.model_name`",
        "`test_recipes.py`; the download from the hub by reading",
    ),
)

# Refused where they are found out, which is not in the settings alone.
REFUSED = (
    ("recipes other than GRPO, single controller", "`examples/run_*.py`", "drafts train in `grpo.setup` only"),
    ("multimodal policies", "`policy.model_name`", "they lay out their rows by themselves"),
    ("policies that cap or scale their logits", "`policy.model_name`", "the draft's teacher is the plain output layer"),
    (
        "context parallelism without packing",
        "`policy.sequence_packing.enabled: false`",
        "a rank's rows come from packs",
    ),
)


@dataclass(frozen=True)
class Limit:
    """One feature that does not work yet.

    Attributes:
        feature: its name.
        setting: path under `policy`.
        works: the values with which the draft trains; None stands for null and for a missing key.
        why: ends the error message, with what would work where that is not plain from `works`.
        versions: of upstream, in which it does not work.
        elsewhere: what the table says of the other versions.
        shown: what shows that it works there.
    """

    feature: str
    setting: str
    works: tuple[Any, ...]
    why: str
    versions: tuple[str, ...] = VERSIONS
    elsewhere: str = "not in it"
    shown: str = ""

    def broken(self, policy: Mapping[str, Any], version: str | None) -> str | None:
        """The error's line, or None. `version`: of upstream; None if it is not known, which is not held against a run."""
        value = at(policy, self.setting)
        if value in self.works or (version is not None and version not in self.versions):
            return None
        if version is None and self.elsewhere == "yes":
            return None
        return f"policy.{self.setting} is {show(value)}; {self.why}, so set {show(self.works[-1])}"


LIMITS = (
    Limit(
        "DSpark",
        "draft.speculator_type",
        (None, "dflash", "eagle3"),
        "the vLLM of v0.7.0 does not serve it",
        versions=(V070,),
        elsewhere="yes",
        shown=f"{_WORKER}; `test_train_is_serve.py`: vLLM 0.25.1, V2 runner with its own speculator, on a CPU",
    ),
    Limit("DTensor policies", "megatron_cfg.enabled", (True,), "the draft trains beside a Megatron policy"),
    Limit("half-precision (float16) policies", "precision", ("float32", "bfloat16"), "the draft has no loss scaler"),
    Limit("quantised policies", "quant_cfg", (None,), "the draft reads unquantised hidden states"),
    Limit("LoRA", "megatron_cfg.peft.enabled", (None, False), "refreshes with adapters were never tried"),
    Limit("FP8 training", "megatron_cfg.fp8_cfg.enabled", (None, False), "the draft has no FP8 layers"),
    Limit(
        "FP8 generation", "generation.vllm_cfg.precision", (None, "float32", "bfloat16"), "drafts are served in 16 bit"
    ),
    Limit("FP8 KV cache", "generation.vllm_cfg.kv_cache_dtype", (None, "auto"), "the draft brings no scales"),
    Limit("router replay", "router_replay.enabled", (None, False), "replayed experts were never tried with taps"),
    Limit(
        "multi-token prediction", "megatron_cfg.mtp_num_layers", (None, 0), "it reads the output layer a second time"
    ),
    Limit(
        "fused linear cross-entropy",
        "megatron_cfg.use_linear_ce_fusion_loss",
        (None, False),
        "the output layer, which is tapped, is never called",
        versions=(V070,),
    ),
    Limit(
        "fused linear log-probabilities",
        "megatron_cfg.use_fused_linear_logprobs",
        (None, False),
        "the output layer, which is tapped, is never called",
        versions=(MAIN,),
    ),
    Limit(
        "Megatron FSDP",
        "megatron_cfg.distributed_data_parallel_config.use_custom_fsdp",
        (None, False),
        "the policy's head is needed whole",
    ),
    Limit(
        "virtual pipeline stages",
        "megatron_cfg.virtual_pipeline_model_parallel_size",
        (None, 1),
        "NeMo-RL steps the first chunk alone",
    ),
    Limit(
        "CUDA graphs in training",
        "megatron_cfg.cuda_graph_impl",
        (None, "none"),
        "graphs hide the tapped layers",
    ),
    Limit("engines other than vLLM", "generation.backend", ("vllm",), "only vLLM takes draft weights"),
    Limit(
        "vLLM pipeline parallelism",
        "generation.vllm_cfg.pipeline_parallel_size",
        (None, 1),
        "its draft is on the last stage alone",
    ),
    Limit(
        "other refit transports",
        "generation.refit_transport",
        (None,),
        "draft weights travel with the IPC and the collective refit",
        versions=(MAIN,),
    ),
)


def broken_limits(policy: Mapping[str, Any], version: str | None = None) -> Iterator[str]:
    """A line for each feature that is on and does not work with this version of upstream."""
    for limit in LIMITS:
        line = limit.broken(policy, version)
        if line:
            yield line
    megatron = policy.get("megatron_cfg") or {}
    if (megatron.get("context_parallel_size") or 1) > 1 and not at(policy, "sequence_packing.enabled"):
        yield (
            f"policy.megatron_cfg.context_parallel_size is {megatron['context_parallel_size']} but "
            "policy.sequence_packing.enabled is false; context parallelism needs packs, so set true"
        )


def at(section: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where any part is missing."""
    value: Any = section
    for part in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def table() -> str:
    """The support table, in Markdown."""
    works = [f"| {feature} | {setting} | yes | yes | {shown} |" for feature, setting, shown in SUPPORTED]
    fails = [f"| {feature} | {setting} | no: {why} | no | |" for feature, setting, why in REFUSED]
    for one in LIMITS:
        told = [one.elsewhere if version not in one.versions else f"no: {one.why}" for version in VERSIONS]
        if told[0] == told[1]:
            told[1] = "no"
        fails.append(f"| {one.feature} | `policy.{one.setting}` | {told[0]} | {told[1]} | {one.shown} |")
    head = ["| feature | setting | v0.7.0 | main 7ea279abf | a yes is shown by |", "|---|---|---|---|---|"]
    return "\n".join([*head, *works, *fails])


if __name__ == "__main__":
    print(table())
