"""Gradients and optimizer of one module group (the policy, or the draft): Megatron's DDP, optimizers and schedule.

Every loss is a sum that has its normaliser inside, so gradients are plain sums over microbatches, DP and CP ranks, and
nothing here divides. Policy and draft each have a DDP, an optimizer and a gradient norm of their own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup


def wrap_ddp(module: torch.nn.Module, config: TransformerConfig) -> DistributedDataParallel:
    """Megatron's DDP around `module`: one float32 gradient buffer, summed over DP x CP by `finalize_grads`.

    Parameters that join `module` later (the draft) are not its own. Raises ValueError if `config` would average.
    """
    if not config.calculate_per_token_loss:
        raise ValueError("calculate_per_token_loss is False: Megatron's DDP would average gradients; set it to True")
    return DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
        module=module,
    )


def finalize_grads(ddp_chunks: Sequence[DistributedDataParallel], groups: ProcessGroupCollection) -> None:
    """Completes the gradients after the last backward: sums over DP x CP, TP and the two ends of the pipeline.

    Over TP: norms whose rows (`sequence_parallel`) or heads (query and key norms) are split over ranks. Over the
    pipeline: a tied embedding, which the first and the last stage hold. Collective over the ranks that hold these
    chunks. It does Megatron's `finalize_model_grads` for exactly the parameters of these DDPs: Megatron walks all of a
    stage's children, so it would sum the draft's norms a second time.
    """
    partial_grads = []
    for ddp in ddp_chunks:
        ddp.finish_grad_sync()
        partial_grads += [
            parameter.main_grad
            for name, parameter in ddp.module.named_parameters()
            if parameter in ddp.param_to_bucket_group
            and (getattr(parameter, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name)
        ]
    if groups.tp.size() > 1 and partial_grads:
        _all_reduce_together(partial_grads, groups.tp)

    tied = [p for ddp in ddp_chunks for p in ddp.params_with_grad if getattr(p, "shared_embedding", False)]
    for parameter in tied:
        torch.distributed.all_reduce(parameter.main_grad, group=groups.embd)


def _all_reduce_together(grads: list[torch.Tensor], group: ProcessGroup) -> None:
    """Sums many small tensors over the group in one collective."""
    flat = _flatten_dense_tensors(grads)
    torch.distributed.all_reduce(flat, group=group)
    for grad, total in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(total)


@dataclass
class TrainOptimizer:
    """The optimizer and learning-rate schedule of some DDP chunks."""

    ddp_chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler

    def zero_grad(self) -> None:
        """Clears the gradient buffers; call it before the first microbatch."""
        for ddp in self.ddp_chunks:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> float:
        """One update with the finished gradients; returns their norm before the clip.

        Step n (from 1) of a warm-up over N steps uses `lr * n / N`. Raises FloatingPointError if the norm is not
        finite; the weights are spoilt then.
        """
        self.schedule.step(1)
        _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm is {grad_norm}; lower the optimizer's lr or look at the batch")
        return grad_norm

    def reload_model_params(self) -> None:
        """Takes the module's weights as they are now for the float32 main parameters (bf16 only)."""
        self.optimizer.reload_model_params()

    def state_dict(self) -> dict:
        """Everything that a bitwise resume needs, besides the module's weights."""
        return {"optimizer": self.optimizer.state_dict(), "steps": self.schedule.num_steps}

    def load_state_dict(self, state: dict) -> None:
        """Continues from `state_dict`'s result."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.num_steps = state["steps"]


def build_optimizer(
    ddp_chunks: Sequence[DistributedDataParallel],
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    clip_grad: float | None = 1.0,
    lr_warmup_iters: int = 0,
    tp_group: ProcessGroup,
    norm_group: ProcessGroup,
) -> TrainOptimizer:
    """AdamW over the chunks' parameters, with Megatron's float32 or bf16-with-main-parameters optimizer around it.

    Constant learning rate after a linear warm-up. 1-D parameters (norms) are not decayed. The gradient norm is summed
    over `norm_group`, the ranks that hold the rest of the same module: `groups.mp` for the policy, `groups.tp` for the
    draft, which is whole on the last stage. `clip_grad` None or 0 clips nothing. Not collective.
    """
    parameters = [parameter for ddp in ddp_chunks for parameter in ddp.params_with_grad]
    # Megatron finds a group again, on resume, by these four keys.
    keys = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "wd_mult": 1.0, **keys},
            {"params": [p for p in parameters if p.dim() <= 1], "wd_mult": 0.0, **keys},
        ],
        lr=lr,
        betas=betas,
        eps=eps,
    )
    bf16 = any(parameter.dtype == torch.bfloat16 for parameter in parameters)
    # An infinite clip changes nothing, and Megatron still computes the norm, which it skips for 0.
    config = OptimizerConfig(lr=lr, weight_decay=weight_decay, bf16=bf16, clip_grad=clip_grad or math.inf)
    if bf16:
        optimizer = Float16OptimizerWithFloat16Params(adamw, config, None, None)
    else:
        optimizer = FP32Optimizer(adamw, config, None)
    optimizer.tp_group = tp_group
    optimizer.grad_stats_parallel_group = norm_group
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=0.0,
        lr_warmup_steps=lr_warmup_iters,
        lr_decay_steps=lr_warmup_iters + 1,
        lr_decay_style="constant",
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return TrainOptimizer(ddp_chunks, optimizer, schedule)
