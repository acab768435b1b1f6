"""What of NeMo-RL works together with `policy.draft.engine: nemo_ext`, by name. The documentation's table is made from it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_ext.config import show

# Features that work, with the setting that turns them on.
SUPPORTED = (
    ("GRPO, synchronous", "`examples/run_grpo.py`"),
    ("GRPO, asynchronous", "`grpo.async_grpo.enabled`"),
    ("colocated generation (IPC refit)", "`policy.generation.colocated.enabled: true`"),
    ("generation on GPUs of its own (collective refit)", "`policy.generation.colocated.enabled: false`"),
    ("tensor, data and expert parallelism", "`policy.megatron_cfg.*_parallel_size`"),
    ("sequence parallelism", "`policy.megatron_cfg.sequence_parallel`"),
    ("context parallelism, with packing", "`policy.megatron_cfg.context_parallel_size`"),
    ("pipeline parallelism", "`policy.megatron_cfg.pipeline_model_parallel_size`"),
    ("sequence packing", "`policy.sequence_packing.enabled`"),
    ("dynamic batching", "`policy.dynamic_batching.enabled`"),
    ("activation recompute", "`policy.megatron_cfg.activation_checkpointing`"),
    ("checkpoint save and resume", "`checkpointing.enabled`"),
)


@dataclass(frozen=True)
class Limit:
    """One feature that does not work yet.

    Attributes:
        feature: its name.
        setting: path under `policy`.
        works: the values with which the draft trains; None stands for null and for a missing key.
        why: ends the error message, with what would work where that is not plain from `works`.
    """

    feature: str
    setting: str
    works: tuple[Any, ...]
    why: str

    def broken(self, policy: Mapping[str, Any]) -> str | None:
        """The error's line, or None."""
        value = at(policy, self.setting)
        if value in self.works:
            return None
        return f"policy.{self.setting} is {show(value)}; {self.why}, so set {show(self.works[-1])}"


LIMITS = (
    Limit(
        "DFlash and DSpark drafts", "draft.speculator_type", (None, "eagle3"), "block drafts train in the CPU run only"
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
        "fused linear cross-entropy (v0.7.0)",
        "megatron_cfg.use_linear_ce_fusion_loss",
        (None, False),
        "the output layer, which is tapped, is never called",
    ),
    Limit(
        "fused linear log-probabilities (main)",
        "megatron_cfg.use_fused_linear_logprobs",
        (None, False),
        "the output layer, which is tapped, is never called",
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
    Limit("CUDA graphs in training", "megatron_cfg.cuda_graph_impl", (None, "none"), "graphs hide the tapped layers"),
    Limit("engines other than vLLM", "generation.backend", ("vllm",), "only vLLM takes draft weights"),
    Limit(
        "vLLM pipeline parallelism",
        "generation.vllm_cfg.pipeline_parallel_size",
        (None, 1),
        "its draft is on the last stage alone",
    ),
    Limit(
        "other refit transports (main)",
        "generation.refit_transport",
        (None,),
        "draft weights travel with the IPC and the collective refit",
    ),
)


def broken_limits(policy: Mapping[str, Any]) -> Iterator[str]:
    """A line for each feature that is on and does not work."""
    for limit in LIMITS:
        line = limit.broken(policy)
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
    works = [f"| {feature} | {setting} | yes |" for feature, setting in SUPPORTED]
    fails = [f"| {one.feature} | `policy.{one.setting}` | no: {one.why} |" for one in LIMITS]
    return "\n".join(["| feature | setting | v0.7.0 and main 7ea279abf |", "|---|---|---|", *works, *fails])
