"""Parts that the drafts share: norms, rotary embedding, parallel linears.

Legend: T rows, H hidden size, N heads, D head dimension.
"""

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.utils import get_pg_rank, get_pg_size, get_tensor_model_parallel_group_if_none
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in at least float32 and rounded once, as vLLM's `RMSNorm` does."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self._norm(x_TH, self.weight)

    def _norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        acc = torch.promote_types(x_TH.dtype, torch.float32)
        wide_TH = x_TH.to(acc)
        wide_TH = wide_TH * torch.rsqrt(wide_TH.square().mean(-1, keepdim=True) + self.eps)
        return (wide_TH * weight_H.to(acc)).to(x_TH.dtype)


class HeadNorm(RMSNorm):
    """RMSNorm of each head of `[..., N, D]`, where each tensor-parallel rank has other heads, or reads the same key head
    for other query heads, and all have the same weight: its gradient is summed over the ranks in the backward, so that it
    is whole on each."""

    def __init__(self, size: int, eps: float, tp_group):
        super().__init__(size, eps)
        self.tp_group = tp_group

    def forward(self, x_TND: torch.Tensor) -> torch.Tensor:
        return self._norm(x_TND, copy_to_tensor_model_parallel_region(self.weight, group=self.tp_group))


class Linear(nn.Module):
    """A bias-free Megatron parallel linear whose forward returns the output alone.

    `split` is "column" (output features over ranks) or "row" (input features over ranks, output all-reduced).
    """

    def __init__(self, in_size: int, out_size: int, split: str, config, tp_group):
        super().__init__()
        self.split_dim = 0 if split == "column" else 1
        cls = ColumnParallelLinear if split == "column" else RowParallelLinear
        kind = {"gather_output": False} if split == "column" else {"input_is_parallel": True}
        self.inner = cls(
            in_size,
            out_size,
            config=config,
            init_method=None,  # weights come from `load_hf`, equal for every parallel layout
            bias=False,
            skip_bias_add=False,
            tp_group=tp_group,
            **kind,
        )
        # Its gradient norm reads these to count a shard on every rank. Megatron before 0.17 sets them only while it
        # initialises weights.
        if not hasattr(self.inner.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(self.inner.weight, True, self.split_dim, 1)

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class SharedHeadLinear(nn.Module):
    """A bias-free projection `[T, H]` to `[T, D]`, the one key (or value) head that this rank's query heads read, where
    the heads are fewer than the tensor-parallel ranks and divide their number.

    Every rank holds the whole weight, as it does a norm's, and computes with one head's rows of it. The gradient is summed
    over the ranks in the backward, so that it is whole on each and the copies stay the same bits.
    """

    def __init__(self, in_size: int, heads: int, head_dim: int, tp_group):
        super().__init__()
        self.tp_group = tp_group
        self.weight = nn.Parameter(torch.empty(heads * head_dim, in_size))
        # Query heads are dealt out in order, so those of a rank all read the same head.
        first = get_pg_rank(tp_group) * heads // get_pg_size(tp_group) * head_dim
        self.rows = slice(first, first + head_dim)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        x_TH, weight = (copy_to_tensor_model_parallel_region(t, group=self.tp_group) for t in (x_TH, self.weight))
        return F.linear(x_TH, weight[self.rows])


def local_key_heads(heads: int, tp_group) -> int:
    """Of so many key heads, those of one tensor-parallel rank: its part, or one that it shares with its neighbours."""
    return max(1, heads // get_pg_size(get_tensor_model_parallel_group_if_none(tp_group)))


def key_linear(in_size: int, heads: int, head_dim: int, config, tp_group) -> Linear | SharedHeadLinear:
    """The projection to the key (or value) heads that this rank's query heads read: `local_key_heads` of them."""
    tp_group = get_tensor_model_parallel_group_if_none(tp_group)
    if heads < get_pg_size(tp_group):
        return SharedHeadLinear(in_size, heads, head_dim, tp_group)
    return Linear(in_size, heads * head_dim, "column", config, tp_group)


class Rotary:
    """Rotary position embedding, half rotation (GPT-NeoX style), the form that vLLM serves Llama drafts with.

    Frequencies are float32 (float64 when the input is), whatever the model's dtype: rounded to bfloat16 they dephase
    long positions (contract B.8).
    """

    def __init__(self, head_dim: int, theta: float):
        self.head_dim = head_dim
        self.theta = theta

    def table(self, positions_T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[T, 1, D/2]` of the given positions."""
        acc = torch.promote_types(dtype, torch.float32)
        steps = torch.arange(0, self.head_dim, 2, dtype=acc, device=positions_T.device) / self.head_dim
        angles_TD = positions_T.to(acc)[:, None] * self.theta**-steps
        return angles_TD.cos()[:, None], angles_TD.sin()[:, None]

    @staticmethod
    def rotate(x_TND: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cos, sin = table
        first, second = x_TND.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_TND.dtype)
