"""A trunk whose shards are received once and kept, for drafts that attend it in several passes (contract E.4, iii').

Pass 1 gathers every rank's keys and values; passes 2 to P move nothing. The gradient of all shards is summed over the
passes by autograd, in the wide dtype, and goes home once: the gathered trunk stands in the graph as one handle that has
the shape of that gradient and no memory.

Legend: C ranks, T query rows, S rows of a shard, N query heads, M key heads, D head dim.
"""

import torch
import torch.distributed as dist

from nemo_ext.attention.branch import Branch
from nemo_ext.attention.comm import RingComm, ring_comm
from nemo_ext.attention.kernels import Kernel
from nemo_ext.attention.merge import KeyGradient, Merged, Summed, add_partials, wide_dtype
from nemo_ext.attention.plans import Plan
from nemo_ext.layout import PackedLayout


class ResidentTrunk:
    """Keys and values of all ranks; made by `gather_trunk`, read by `ttt_attention`.

    Attributes:
        handle: `[C, 2, S, M, D]` without memory; the gradient of shard `(rank - s) mod C`'s keys and values at `[s]`.
    """

    def __init__(self, k_SMD: torch.Tensor, v_SMD: torch.Tensor, comm: RingComm | None):
        size = comm.size if comm else 1
        own = [k_SMD.detach().contiguous(), v_SMD.detach().contiguous()]
        # All at once, each awaited when it is first attended.
        self._hops = [
            comm.swap(own, (comm.rank + s) % size, (comm.rank - s) % size, s, "keys and values") for s in range(1, size)
        ]
        self._shards: list[list[torch.Tensor] | None] = [own] + [None] * (size - 1)
        self.size = size
        self.handle = _Gather.apply(k_SMD, v_SMD, comm)

    def shard(self, step: int) -> list[torch.Tensor]:
        """`[k_SMD, v_SMD]` of rank `(rank - step) mod C`. Raises RingError if they do not come."""
        if self._shards[step] is None:
            self._shards[step] = self._hops[step - 1].wait()
        return self._shards[step]


def gather_trunk(
    trunk_k_SMD: torch.Tensor, trunk_v_SMD: torch.Tensor, *, layout: PackedLayout, group: dist.ProcessGroup | None
) -> ResidentTrunk:
    """Starts to gather the trunk; pass the result to `ttt_attention(..., resident=...)` in every pass.

    Raises as `causal_attention`.
    """
    return ResidentTrunk(trunk_k_SMD, trunk_v_SMD, ring_comm(layout, group))


def resident_bytes(layout: PackedLayout, key_heads: int, head_dim: int, dtype: torch.dtype, layers: int = 1) -> int:
    """What a resident trunk holds on each rank at its most: all keys and values, and their gradient in the wide dtype."""
    elements = 2 * layout.total_rows * key_heads * head_dim * layers
    return elements * (dtype.itemsize + wide_dtype(dtype).itemsize)


class _Gather(torch.autograd.Function):
    """From own keys and values to the handle; backward sends every shard's gradient to its owner and sums what comes."""

    @staticmethod
    def forward(ctx, k_SMD, v_SMD, comm: RingComm | None):
        ctx.comm, ctx.dtype = comm, k_SMD.dtype
        shape = (comm.size if comm else 1, 2, *k_SMD.shape)
        return k_SMD.new_zeros((), dtype=wide_dtype(k_SMD.dtype)).expand(shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grads_C2SMD):
        comm = ctx.comm
        own_2SMD = grads_C2SMD[0].clone()
        for step in range(1, len(grads_C2SMD)):
            owner, other = (comm.rank - step) % comm.size, (comm.rank + step) % comm.size
            hop = comm.swap([grads_C2SMD[step]], owner, other, step, "gradient of keys and values")
            own_2SMD += hop.wait()[0]
        return own_2SMD[0].to(ctx.dtype), own_2SMD[1].to(ctx.dtype), None


class ResidentAttention(torch.autograd.Function):
    """`apply(q_TND, trunk.handle, branch_k, branch_v, trunk, plan, branch, kernel, scale) -> out_TND`."""

    @staticmethod
    def forward(
        ctx, q_TND, handle, branch_k, branch_v, trunk: ResidentTrunk, plan: Plan, branch: Branch, kernel: Kernel, scale
    ):
        merged = Merged(q_TND)
        for step in range(trunk.size):
            for spans in plan.calls(step):
                merged.add_partials(kernel.forward(q_TND, *trunk.shard(step), spans, scale))
        merged.add_partials(branch.forward(q_TND, branch_k, branch_v, scale))
        out_TND, lse_TN = merged.result()
        ctx.save_for_backward(q_TND, branch_k, branch_v, out_TND, lse_TN)
        ctx.setup = trunk, plan, branch, kernel, scale
        return out_TND

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout_TND):
        q_TND, branch_k, branch_v, out_TND, lse_TN = ctx.saved_tensors
        trunk, plan, branch, kernel, scale = ctx.setup
        dq, of_branch = Summed(q_TND), KeyGradient(branch_k, branch_v)
        grads_C2SMD = torch.zeros_like(trunk.handle, memory_format=torch.contiguous_format)
        for step in range(trunk.size):
            shard = trunk.shard(step)
            gradient = KeyGradient(*shard)
            gradient.start(*grads_C2SMD[step])
            for spans in plan.calls(step):
                partials = kernel.backward(dout_TND, q_TND, *shard, out_TND, lse_TN, spans, scale)
                add_partials(partials, dq, gradient)
        add_partials(branch.backward(dout_TND, q_TND, branch_k, branch_v, out_TND, lse_TN, scale), dq, of_branch)
        dbranch_k, dbranch_v = of_branch.result()
        return (
            dq.result().to(q_TND.dtype),
            grads_C2SMD,
            dbranch_k.to(branch_k.dtype),
            dbranch_v.to(branch_v.dtype),
            *(None,) * 5,
        )
