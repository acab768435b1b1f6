"""Holds a run's settings, files and tasks against each other, whole, before any process starts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_ext.config import ConfigError, show, validated
from nemo_ext.drafts.eagle3_folder import PICKLES, rope_type
from nemo_ext.drafts.folder import CONFIG, WEIGHTS
from nemo_ext.drafts.kinds import Shape, kind_of, sizes_that_divide, uneven_line
from nemo_ext.local.serving_checks import serving_lines, serving_notes
from nemo_ext.local.settings import RunConfig
from nemo_ext.local.task_checks import task_lines
from nemo_ext.local.yaml_config import load_yaml

# What vLLM's CPU attention takes.
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
)
_BATCH = "grpo.num_prompts_per_step * grpo.num_generations_per_prompt"


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked settings of a YAML file with `key=value` overrides. Raises ConfigError."""
    return checked(load_yaml(path, overrides))


def checked(data: Mapping[str, Any]) -> RunConfig:
    """The settings in `data`; what `policy.draft` leaves null is filled in, from the draft checkpoint or by default.

    Raises ConfigError with a line for everything that cannot work.
    """
    config = validated(RunConfig, data)
    lines = [line for check in (_layout, _lengths, _speculation, task_lines) for line in check(config)]
    try:
        policy = policy_hf_config(config)
        shape = _draft_shape(config, policy)
    except ConfigError as error:
        raise ConfigError(*lines, *error.lines) from None
    draft, speculative = config.policy.draft, config.policy.generation.vllm_kwargs.speculative_config
    lines += [*_shapes(config, policy, shape), *_shards(config, policy, shape)]
    lines += serving_lines(draft, shape, speculative)
    if lines:
        raise ConfigError(*lines)
    draft.aux_layer_indices = list(shape.tap_layers)
    for key in kind_of(draft).filled:
        setattr(draft, key, getattr(shape, key))
    return config


def notes(config: RunConfig) -> list[str]:
    """What is allowed but may surprise."""
    draft, speculative = config.policy.draft, config.policy.generation.vllm_kwargs.speculative_config
    return list(serving_notes(draft, speculative))


def policy_hf_config(config: RunConfig) -> dict:
    """The policy's Hugging Face config: from `policy.model_name`'s folder, or of the fresh `policy.model`."""
    name, model = config.policy.model_name, config.policy.model
    if (name is None) == (model is None):
        both = "both are set" if name else "both are null"
        raise ConfigError(f"policy.model_name and policy.model: {both}; give a folder or the shape of a fresh policy")
    if name is None:
        return model.hf_config(eos_token_id=0)
    folder, prefix = Path(name), f"policy.model_name is {name}"
    if not folder.is_dir():
        raise ConfigError(f"{prefix}: no such folder; give a local Hugging Face folder, or null with policy.model")
    missing = [file for file in (CONFIG, WEIGHTS, "tokenizer.json") if not (folder / file).is_file()]
    if WEIGHTS in missing and any(list(folder.glob(pattern)) for pattern in PICKLES):
        raise ConfigError(f"{prefix}: its weights are pickles, which can run code; convert them to {WEIGHTS}")
    if missing:
        raise ConfigError(f"{prefix}: it has no {missing[0]}; give a Hugging Face folder with one {WEIGHTS}")
    try:
        policy = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise ConfigError(f"{prefix}: {CONFIG} is not JSON: {error}") from None
    wrong = [key for key in _NEEDED if not isinstance(policy.get(key), (int, float))]
    if wrong:
        raise ConfigError(
            *(f"{prefix}: {key} is {show(policy.get(key))} in {CONFIG}; it must be a number" for key in wrong)
        )
    return policy


def _draft_shape(config: RunConfig, policy: dict) -> Shape:
    """The draft's whole shape: its checkpoint's, or a fresh one's."""
    draft = config.policy.draft
    kind = kind_of(draft)
    if draft.model_name is not None:
        return kind.folder_shape(draft.model_name, draft, policy, config.policy.generation.vllm_cfg.max_model_len)
    if lines := list(kind.fresh_lines(draft, policy)):
        raise ConfigError(*lines)
    return kind.fresh_shape(draft, policy)


def _layout(config: RunConfig) -> Iterator[str]:
    """Ranks and batches."""
    megatron, ranks = config.policy.megatron_cfg, config.cluster.gpus_per_node
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        yield (
            "policy.megatron_cfg.sequence_parallel is true but tensor_model_parallel_size is 1, whose ranks would share "
            "the sequence; set false or a larger size"
        )
    stages, virtual = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size
    if virtual and stages == 1:
        yield (
            f"policy.megatron_cfg.virtual_pipeline_model_parallel_size is {virtual} but pipeline_model_parallel_size is 1; "
            "set null, or more stages"
        )
    model_ranks = megatron.model_ranks
    if ranks % model_ranks:
        yield (
            f"cluster.gpus_per_node is {ranks}, not a multiple of tensor * pipeline * context parallel size = "
            f"{model_ranks}; set {model_ranks} or a multiple"
        )
        return
    batch = config.policy.train_global_batch_size
    rollouts = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    if batch != rollouts:
        yield (
            f"policy.train_global_batch_size is {batch}, but {_BATCH} = {rollouts}; a step trains once on all of its "
            f"rollouts, so set {rollouts}"
        )
    replicas = ranks // model_ranks
    for key, value in (
        ("policy.train_global_batch_size", batch),
        ("data.warmup.batch_size", config.data.warmup.batch_size),
    ):
        if value % replicas:
            yield f"{key} is {value}, not a multiple of the {replicas} data-parallel replicas; set a multiple"


def _lengths(config: RunConfig) -> Iterator[str]:
    policy = config.policy
    longest, served = policy.max_total_sequence_length, policy.generation.vllm_cfg.max_model_len
    if served > longest:
        yield (
            f"policy.generation.vllm_cfg.max_model_len is {served}, more than policy.max_total_sequence_length "
            f"{longest}; set {longest} or less"
        )
    if policy.generation.max_new_tokens >= served:
        yield (
            f"policy.generation.max_new_tokens is {policy.generation.max_new_tokens}, which leaves no room for a "
            f"prompt in policy.generation.vllm_cfg.max_model_len {served}; set less"
        )
    packing = policy.sequence_packing
    if packing.enabled and packing.train_mb_tokens < longest:
        yield (
            f"policy.sequence_packing.train_mb_tokens is {packing.train_mb_tokens}, less than one sequence of "
            f"policy.max_total_sequence_length {longest}; set {longest} or more"
        )


def _speculation(config: RunConfig) -> Iterator[str]:
    """The served draft and the trained one are one."""
    key = "policy.generation.vllm_kwargs.speculative_config"
    draft, speculative = config.policy.draft, config.policy.generation.vllm_kwargs.speculative_config
    if speculative is None:
        if draft.enabled:
            yield (
                f"policy.draft.enabled is true but {key} is null, so nothing would serve the draft; set "
                f"{key}.method: {draft.speculator_type} and num_speculative_tokens, or enabled: false"
            )
        return
    if speculative.method != draft.speculator_type:
        yield (
            f"{key}.method is {speculative.method} but policy.draft.speculator_type is {draft.speculator_type}; "
            "set both alike"
        )
    if speculative.model is not None and speculative.model != draft.model_name:
        yield (
            f"{key}.model is {speculative.model} but policy.draft.model_name is {show(draft.model_name)}; "
            "leave the former out: the run serves its own draft"
        )


def _shapes(config: RunConfig, policy: dict, draft: Shape) -> Iterator[str]:
    """Shapes that both Megatron here and vLLM's CPU engine take."""
    where = "policy.model" if config.policy.model else f"policy.model_name is {config.policy.model_name}: {CONFIG}"
    plain = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
    for key, value in plain.items():
        if policy.get(key, value) != value:
            yield f"{where}: {key} is {show(policy[key])}; this trainer has {show(value)} only"
    if rope_type(policy) != "default":
        yield f"{where}: rope_type is {rope_type(policy)}; this trainer has default only"
    heads, kv_heads = policy["num_attention_heads"], policy["num_key_value_heads"]
    if heads % kv_heads:
        yield f"{where}: num_attention_heads is {heads}, not a multiple of num_key_value_heads {kv_heads}"
    sizes = ", ".join(map(str, HEAD_SIZES))
    if policy["head_dim"] not in HEAD_SIZES:
        yield f"{where}: head_dim is {policy['head_dim']}; vLLM's CPU attention takes {sizes}"
    elif draft.head_dim not in HEAD_SIZES:
        yield (
            f"policy.draft.model_name is {config.policy.draft.model_name}: head_dim is {draft.head_dim}; "
            f"vLLM's CPU attention takes {sizes}"
        )
    positions, longest = policy["max_position_embeddings"], config.policy.max_total_sequence_length
    if longest > positions:
        yield (
            f"policy.max_total_sequence_length is {longest}, more than the policy's max_position_embeddings "
            f"{positions}; set {positions} or less"
        )


def _shards(config: RunConfig, policy: dict, draft: Shape) -> Iterator[str]:
    """Everything that tensor and pipeline parallelism cut must come out even."""
    megatron = config.policy.megatron_cfg
    chunks = megatron.pipeline_model_parallel_size * (megatron.virtual_pipeline_model_parallel_size or 1)
    layers = policy["num_hidden_layers"]
    if layers % chunks:
        yield (
            f"policy.megatron_cfg.pipeline_model_parallel_size * virtual_pipeline_model_parallel_size is {chunks}, which does "
            f"not divide the policy's num_hidden_layers ({layers}); {sizes_that_divide(layers)}"
        )
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    cut = {f"the policy's {name}": policy[name] for name in names}
    yield from uneven_line(megatron.tensor_model_parallel_size, draft, cut)
