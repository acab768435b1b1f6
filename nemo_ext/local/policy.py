"""The policy: a Qwen3-shaped Megatron `GPTModel`, built from a Hugging Face configuration.

Its input is always one pack: tokens `[1, T]` (this context-parallel rank's rows) and a `PackedParams` with the pack's
layout. Its output is `[1, T, V/t]`, the vocabulary-parallel logits, on the last stage.

Shape legend: T rows of the pack on this rank, V vocabulary (padded to a multiple of t), t tensor parallel size.
"""

import torch
import torch.nn.functional as F

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_ext.attention.core_attention import PackedCoreAttention

# The logit of a padding column: its probability is 0 in any softmax, and 0 * it is 0, which -inf would not give.
PADDING_LOGIT = -1e9


class PolicyNorm(torch.nn.RMSNorm):
    """RMSNorm as Megatron builds norms; Megatron's own for torch refuses sequence parallelism.

    Under sequence parallelism each TP rank norms its own rows, so the weight's gradients are to be summed over TP:
    Megatron does so for parameters marked `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def rope_theta(hf_config: dict) -> float:
    """The rotary base, from `rope_parameters` (transformers 5) or `rope_theta` (transformers 4).

    Raises ValueError for scaled rotary embeddings, which the policy does not have.
    """
    parameters = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(f"the policy's rope_type is {rope_type!r}; only 'default' is supported")
    return float(parameters.get("rope_theta") or hf_config["rope_theta"])


def _check_shape(hf_config: dict) -> None:
    """Raises ValueError if the configuration asks for what `policy_config` does not build."""
    wanted = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
    for key, value in wanted.items():
        if hf_config.get(key, value) != value:
            raise ValueError(f"the policy's {key} is {hf_config[key]!r}; only {value!r} is supported")
    rope_theta(hf_config)


def _not_loaded(weight: torch.Tensor) -> torch.Tensor:
    """Megatron's init method for weights that always come from `load_policy`: whoever forgets that gets NaN."""
    return torch.nn.init.constant_(weight, float("nan"))


def padded_vocab_size(hf_config: dict, tp_size: int) -> int:
    """The vocabulary's size, rounded up to a multiple of the TP size."""
    return -(-hf_config["vocab_size"] // tp_size) * tp_size


def policy_config(
    hf_config: dict,
    groups: ProcessGroupCollection,
    *,
    vpp: int | None = None,
    sequence_parallel: bool = False,
    params_dtype: torch.dtype = torch.float32,
    recompute: bool = False,
) -> TransformerConfig:
    """Megatron's configuration of the policy that `hf_config` (a Qwen3 `config.json`) describes.

    The loss is a sum whose normaliser is inside it already, so nothing is averaged over microbatches or ranks
    (`calculate_per_token_loss`). `recompute` recomputes every layer in the backward pass. Raises ValueError for a
    shape that is not supported.
    """
    _check_shape(hf_config)
    recompute_args = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {}
    )
    return TransformerConfig(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        ffn_hidden_size=hf_config["intermediate_size"],
        num_attention_heads=hf_config["num_attention_heads"],
        num_query_groups=hf_config["num_key_value_heads"],
        kv_channels=hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"],
        normalization="RMSNorm",
        layernorm_epsilon=hf_config["rms_norm_eps"],
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        init_method=_not_loaded,
        output_layer_init_method=_not_loaded,
        embedding_init_method=_not_loaded,
        params_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        cuda_graph_scope=[],  # the default is a deprecated spelling, which warns
        tensor_model_parallel_size=groups.tp.size(),
        pipeline_model_parallel_size=groups.pp.size(),
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=groups.cp.size(),
        sequence_parallel=sequence_parallel,
        pipeline_dtype=params_dtype,
        # Packs differ in length, so stages tell each other the shape first.
        variable_seq_lengths=groups.pp.size() > 1,
        # With virtual stages a rank may be its neighbour's previous and next stage at once: Megatron's unbatched
        # messages tell those apart.
        batch_p2p_comm=vpp is None,
        moe_token_dispatcher_type="alltoall",  # Megatron asks for this with variable lengths, experts or not
        **recompute_args,
    )


def _block_spec(
    config: TransformerConfig, groups: ProcessGroupCollection, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """This stage's layers: Megatron's local spec, with our attention and a norm that knows sequence parallelism."""
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer.submodules.input_layernorm = PolicyNorm
    layer.submodules.pre_mlp_layernorm = PolicyNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    attention.q_layernorm = PolicyNorm
    attention.k_layernorm = PolicyNorm
    layers = [layer] * get_num_layers_to_build(config, vp_stage, groups.pp.rank())
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=PolicyNorm)


def _mask_padding_columns(model: GPTModel, vocab_size: int, tp_rank: int) -> None:
    """Makes the output layer give `PADDING_LOGIT` for its columns past the unpadded vocabulary."""
    columns = model.output_layer.output_size_per_partition
    real = min(max(vocab_size - tp_rank * columns, 0), columns)
    if real == columns:
        return

    def pad(_layer, _inputs, output):
        logits_TBV, bias = output
        return F.pad(logits_TBV[..., :real], (0, columns - real), value=PADDING_LOGIT), bias

    model.output_layer.register_forward_hook(pad)


def build_policy(
    hf_config: dict, config: TransformerConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
) -> GPTModel:
    """This rank's part of the policy, one model chunk (`vp_stage` of `vpp`, or the only one).

    Its matrices are NaN until `load_policy` fills them. Call it as
    `model(input_ids=tokens_1T, position_ids=None, attention_mask=None, packed_seq_params=packed_params)`: positions
    come from the pack's padded `cu_seqlens`, so each sequence starts at 0.
    """
    vpp = config.virtual_pipeline_model_parallel_size
    model = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(config, groups, vp_stage),
        vocab_size=padded_vocab_size(hf_config, groups.tp.size()),
        max_sequence_length=hf_config["max_position_embeddings"],
        pre_process=is_pp_first_stage(groups.pp) and is_vp_first_stage(vp_stage, vpp),
        post_process=is_pp_last_stage(groups.pp) and is_vp_last_stage(vp_stage, vpp),
        share_embeddings_and_output_weights=hf_config.get("tie_word_embeddings", False),
        position_embedding_type="rope",
        rotary_base=rope_theta(hf_config),
        pg_collection=groups,
        vp_stage=vp_stage,
    )
    if model.post_process:
        _mask_padding_columns(model, hf_config["vocab_size"], groups.tp.rank())
    return model
