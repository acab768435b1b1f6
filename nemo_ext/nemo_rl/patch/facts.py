"""What the subclasses and hooks count on in upstream besides signatures, and why: things that would break without a word.

Each fact is looked up in the source; a checkout where one does not hold is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_ext.nemo_rl.patch.fact_kinds import KINDS, WHOLE
from nemo_ext.nemo_rl.patch.signature_lock import EXTENSION, MEGATRON_DATA, WORKER
from nemo_ext.nemo_rl.patch.source import NotFound, Source

POLICY = "nemo_rl.models.policy.lm_policy:Policy"
SETTINGS = "nemo_rl.models.policy"
GRPO = "nemo_rl.algorithms.grpo"
VLLM = "nemo_rl.models.generation.vllm"
VLLM_WORKER = f"{VLLM}.vllm_worker:BaseVllmGenerationWorker"
TRAIN = "nemo_rl.models.megatron.train"
REGISTRY = "nemo_rl.distributed.ray_actor_environment_registry"
# Those of hooks.py, which cannot be imported here: its checks recognise the checkout by way of this module.
MEGATRON_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
UPSTREAM_EXTENSION = "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension"


@dataclass(frozen=True)
class Fact:
    """`what` holds for each of `of` in the definition `name`; `why` ends the message when it does not."""

    name: str
    what: str
    of: tuple
    why: str


FACTS = (
    # The run's settings
    Fact("examples.run_grpo:main", "calls", ("setup",), "runs are prepared in grpo.setup"),
    Fact(f"{GRPO}:MasterConfig", "has the field", ("policy: PolicyConfig",), "prepare_run takes policy for a dict"),
    Fact(
        f"{GRPO}:MasterConfig",
        "has the field",
        ("checkpointing: CheckpointingConfig",),
        "prepare_run reads a key of it",
    ),
    Fact(
        "nemo_rl.utils.checkpoint:CheckpointingConfig", "derives from", ("TypedDict",), "prepare_run reads a key of it"
    ),
    Fact(
        "nemo_rl.utils.checkpoint:CheckpointingConfig", "has the field", ("checkpoint_dir",), "fresh drafts lie there"
    ),
    Fact(f"{SETTINGS}:PolicyConfig", "derives from", ("TypedDict",), "prepare_run writes its items"),
    Fact(
        "nemo_rl.models.generation.interfaces:GenerationConfig",
        "derives from",
        ("TypedDict",),
        "prepare_run writes draft_engine into it, for the generation workers",
    ),
    Fact(
        f"{SETTINGS}:PolicyConfig",
        "has the field",
        (
            "model_name",
            "precision",
            "draft",
            "generation",
            "megatron_cfg",
            "sequence_packing",
            "dynamic_batching",
            "make_sequence_length_divisible_by",
            "max_total_sequence_length",
            "train_global_batch_size",
            "train_micro_batch_size",
            "hf_config_overrides",
            "router_replay",
            "quant_cfg",
        ),
        "the draft's trainer or the support table reads it; under another name it would be taken for not set",
    ),
    Fact(
        f"{SETTINGS}:MegatronConfig",
        "has the field",
        (
            "activation_checkpointing",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "sequence_parallel",
            "peft",
            "fp8_cfg",
            "mtp_num_layers",
            "cuda_graph_impl",
            "distributed_data_parallel_config",
        ),
        "the draft's trainer or the support table reads it; under another name it would be taken for not set",
    ),
    *(
        Fact(
            name,
            "has the field",
            fields,
            "the support table reads it; under another name it would be taken for not set",
        )
        for name, fields in (
            (f"{SETTINGS}:MegatronDDPConfig", ("use_custom_fsdp",)),
            (f"{VLLM}.config:VllmConfig", ("vllm_cfg",)),
            (f"{VLLM}.config:VllmSpecificArgs", ("precision", "kv_cache_dtype", "pipeline_parallel_size")),
            ("nemo_rl.models.generation.interfaces:GenerationConfig", ("backend",)),
        )
    ),
    Fact(
        f"{SETTINGS}:MegatronConfig",
        "has a field of",
        ("use_linear_ce_fusion_loss", "use_fused_linear_logprobs"),
        "the support table refuses the fused loss, which hides the tapped layer, under these names",
    ),
    Fact(
        f"{SETTINGS}:SequencePackingConfig", "has the field", ("train_mb_tokens",), "the channel's slots are that large"
    ),
    Fact(
        f"{SETTINGS}:DynamicBatchingConfig", "has the field", ("train_mb_tokens",), "the channel's slots are that large"
    ),
    Fact(f"{VLLM}.config:VllmConfig", "has the field", ("vllm_kwargs",), "prepare_run names the draft in it"),
    # The policy worker
    Fact(f"{GRPO}:setup", "mentions", ("Policy",), "it is made from what was prepared"),
    Fact(f"{GRPO}:setup", "always passes to", ("_make_policy", "policy_config"), "the prepared settings get there"),
    Fact(
        f"{GRPO}:setup", "always passes to", ("VllmGeneration", "generation_config"), "the prepared settings get there"
    ),
    Fact(
        f"{POLICY}.__init__",
        "passes to",
        ("resolve_policy_worker_cls", MEGATRON_WORKER),
        "so the draft's worker stands in for it",
    ),
    *(
        Fact(f"{POLICY}.__init__", "always passes to", (called, argument), "so the draft's worker is made")
        for called, argument in (
            ("resolve_policy_worker_cls", "config"),
            ("RayWorkerBuilder", "worker_builder_cls_fqn"),
            ("RayWorkerBuilder", "config"),
        )
    ),
    Fact(f"{REGISTRY}:get_actor_python_env", "mentions", ("ACTOR_ENVIRONMENT_REGISTRY",), "it has our entry"),
    Fact(f"{POLICY}.train", "has the string", ("train",), "the worker's train, which is overridden, is what it calls"),
    Fact(f"{POLICY}.train", "has the string", ("all_mb_metrics",), "the draft's metrics travel in it"),
    Fact(f"{POLICY}.save_checkpoint", "has the string", ("save_checkpoint",), "the draft is saved in the override"),
    Fact(
        f"{WORKER}.__init__",
        "sets self.",
        ("model", "optimizer", "sampling_params", "cfg", "dp_size"),
        "the draft's worker reads it",
    ),
    Fact(f"{WORKER}.train", "has the string", ("all_mb_metrics",), "the draft's metrics join it"),
    Fact(
        f"{WORKER}.train",
        "calls",
        ("get_microbatch_iterator", "megatron_forward_backward", "process_global_batch", "self.optimizer.step"),
        "the draft follows its global batches, microbatches and steps",
    ),
    Fact(
        f"{WORKER}.train", "has the string", ("train_global_batch_size", "train_micro_batch_size"), "so are ours read"
    ),
    Fact(f"{MEGATRON_DATA}:process_global_batch", "calls", ("data.get_batch",), "the draft's batches are cut alike"),
    Fact(
        f"{TRAIN}:megatron_forward_backward", "calls", ("get_forward_backward_func",), "Megatron's schedule is followed"
    ),
    Fact(f"{TRAIN}:model_forward", "passes the keyword", ("input_ids",), "the draft checks its rows against them"),
    Fact(
        f"{WORKER}.prepare_refit_info",
        "calls",
        ("self._iter_params_with_optional_kv_scales",),
        "draft tensors are announced",
    ),
    Fact(f"{WORKER}.prepare_refit_info", "makes pairs of", ("shape", "dtype"), "so is the announcement read"),
    Fact(
        f"{WORKER}.stream_weights_via_ipc_zmq",
        "calls",
        ("self._iter_params_with_optional_kv_scales",),
        "draft weights travel in it",
    ),
    Fact(
        f"{WORKER}.broadcast_weights_for_collective",
        "calls",
        ("self._iter_params_with_optional_kv_scales",),
        "draft weights travel in it",
    ),
    Fact(f"{WORKER}.prepare_for_training", "calls", ("self.move_model", "self.move_optimizer"), "the draft comes back"),
    Fact(f"{WORKER}.offload_before_refit", "calls", ("self.move_model", "self.move_optimizer"), "the draft goes too"),
    Fact(f"{WORKER}.offload_after_refit", "calls", ("self.move_model",), "the draft goes too"),
    # The generation worker
    Fact(
        f"{VLLM}.vllm_generation:VllmGeneration.__init__",
        "always passes to",
        ("RayWorkerBuilder", "config"),
        "draft_engine in it gets to the workers",
    ),
    Fact(f"{VLLM_WORKER}._init_config", "sets self.", ("cfg",), "the patch reads draft_engine in it"),
    Fact(f"{VLLM_WORKER}", "calls", ("self._load_model",), "the patch is in it"),
    Fact(f"{VLLM_WORKER}._load_model", "has the string", (UPSTREAM_EXTENSION,), "ours takes the place of this class"),
    Fact(f"{VLLM_WORKER}._load_model", "has the string", ("vllm_kwargs",), "it names the draft's folder"),
    *(
        Fact(
            f"{VLLM}.{module}", "has the string", (method,), f"vLLM's workers are told to {method}, which is overridden"
        )
        for module in ("vllm_worker", "vllm_worker_async")
        for method in ("prepare_refit_info", "update_weights_via_ipc_zmq", "update_weights_from_collective")
    ),
    *(
        Fact(f"{EXTENSION}.{method}", what, of, why)
        for method in ("update_weights_via_ipc_zmq", "update_weights_from_collective")
        for what, of, why in (
            ("mentions", ("self._load_weights",), "draft weights are taken in the override"),
            ("returns nothing but", (True, False), "a refit is whole or reported as broken off"),
        )
    ),
    Fact(EXTENSION, "mentions", ("self.model_runner", "self.device"), "the override reads it of vLLM's worker"),
)


def broken(checkout: Source) -> Iterator[str]:
    """A line for each fact that does not hold."""
    for fact in FACTS:
        for one in (fact.of,) if fact.what in WHOLE else fact.of:
            try:
                good = KINDS[fact.what](checkout, fact.name, one)
            except NotFound as error:
                yield f"{error}; {fact.why}"
                continue
            if not good:
                told = ", ".join(map(str, one)) if isinstance(one, tuple) else one
                yield f"{fact.name} no longer {fact.what} {told}; {fact.why}".replace("self. ", "self.")
