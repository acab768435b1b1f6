"""A tiny Qwen3 policy as upstream's worker holds it: Megatron's model, DDP, optimizer and schedule, on CPU ranks."""

import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from nemo_ext.attention import causal_attention
from nemo_ext.attention.core_attention import PackedCoreAttention
from nemo_ext.layout import PackedLayout
from nemo_ext.local import policy as local_policy
from nemo_ext.local.hf_policy import export_policy, load_policy


class UpstreamAttention(PackedCoreAttention):
    """Causal attention over upstream's packs (padded `cu_seqlens`, no layout) and over its `[S, B]` batches."""

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, packed_seq_params=None, **kwargs):
        if packed_seq_params is None:
            swapped = [x.transpose(0, 1).transpose(1, 2) for x in (query, key, value)]  # [B, N, S, D]
            out = torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=True, enable_gqa=True)
            return out.permute(2, 0, 1, 3).flatten(2)
        starts = packed_seq_params.cu_seqlens_q_padded.tolist()
        lengths = [b - a for a, b in zip(starts, starts[1:], strict=False)]
        if self.cp_group.size() == 1:
            parts = [
                torch.nn.functional.scaled_dot_product_attention(
                    *(x[a:b].transpose(0, 1) for x in (query, key, value)), is_causal=True, enable_gqa=True
                ).transpose(0, 1)
                for a, b in zip(starts, starts[1:], strict=False)
            ]
            return torch.cat(parts).flatten(1)
        layout = PackedLayout(lengths, cp_size=self.cp_group.size(), cp_rank=self.cp_group.rank())
        return causal_attention(query, key, value, layout=layout, group=self.cp_group, scale=self.scale).flatten(1)


def build(
    hf_config: dict,
    tensors: dict,
    groups,
    *,
    sequence_parallel: bool,
    recompute: bool,
    lr: float,
    distributed: bool = False,
):
    """(DDP-wrapped model, optimizer, schedule), with `finalize_model_grads_func` set as Megatron-Bridge sets it."""
    config = local_policy.policy_config(hf_config, groups, sequence_parallel=sequence_parallel, recompute=recompute)
    config.variable_seq_lengths = False  # upstream gives all stages one length
    local_policy.PackedCoreAttention = UpstreamAttention
    gpt = local_policy.build_policy(hf_config, config, groups)
    load_policy([gpt], hf_config, tensors, groups)
    model = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=distributed,
            overlap_param_gather=distributed,
            bucket_size=20_000 if distributed else None,  # several buckets
        ),
        module=gpt,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            clip_grad=1.0,
            use_distributed_optimizer=distributed,
            overlap_param_gather=distributed,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=lr,
        lr_warmup_steps=0,
        lr_decay_steps=1000,
        lr_decay_style="constant",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = functools.partial(finalize_model_grads, pg_collection=groups)
    return model, optimizer, schedule


class LocalBridge:
    """Stands in for Megatron-Bridge's export, with this package's own."""

    def __init__(self, hf_config: dict, groups):
        self._hf_config, self._groups = hf_config, groups
        self.transformer_config = SimpleNamespace(num_layers=hf_config["num_hidden_layers"])

    def export_hf_weights(self, models, **kwargs):
        return export_policy([models[0].module], self._hf_config, self._groups)

    def get_conversion_tasks(self, models):
        return []


def dp_rank_and_size() -> tuple[int, int]:
    """Of the data-parallel group without context parallelism."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    return dist.get_rank(group), dist.get_world_size(group)
