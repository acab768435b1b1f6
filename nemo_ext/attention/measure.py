"""One rank's part of the ring benchmark: the same attention, forward and backward, done in four ways.

Every measure is of this rank: wall-clock and CPU seconds, bytes counted by the communicator, and the peak of what torch
had allocated, counted by torch's profiler.

Legend: S rows of the whole sequence, T rows of this rank, N query heads, M key heads, D head dim.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F

from nemo_ext.attention.branch import NoBranch
from nemo_ext.attention.comm import RingComm
from nemo_ext.attention.kernels import kernel_for
from nemo_ext.attention.merge import wide_dtype
from nemo_ext.attention.plans import CausalPlan
from nemo_ext.attention.resident import ResidentAttention, ResidentTrunk
from nemo_ext.attention.ring import RingAttention
from nemo_ext.layout import PackedLayout


@dataclass(frozen=True)
class Work:
    """One sequence of causal attention."""

    tokens: int
    heads: int
    key_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def inputs(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`q_TND, k_TMD, v_TMD, dout_TND`, the first three with gradients."""
        generator = torch.Generator().manual_seed(seed)

        def normal(heads):
            return torch.randn(rows, heads, self.head_dim, generator=generator).to(self.dtype)

        q, k, v = (normal(heads).requires_grad_() for heads in (self.heads, self.key_heads, self.key_heads))
        return q, k, v, normal(self.heads)

    def shard_bytes(self, rows: int) -> int:
        """Of one rank's keys and values."""
        return 2 * rows * self.key_heads * self.head_dim * self.dtype.itemsize

    def own_bytes(self, rows: int) -> int:
        """What attention cannot be without: q, k, v, out, their gradients, and the log-sum-exp."""
        queries = 4 * rows * self.heads * self.head_dim * self.dtype.itemsize
        return queries + 2 * self.shard_bytes(rows) + rows * self.heads * wide_dtype(self.dtype).itemsize


@dataclass
class Measure:
    """Of one rank and one way."""

    seconds: float
    cpu_seconds: float
    forward_bytes: int
    backward_bytes: int
    peak_bytes: int


def kernel_alone(work: Work) -> Callable[[], None]:
    """The bare CPU operators on the whole sequence, as a function to time."""
    q, k, v, dout = (x.detach().transpose(0, 1)[None] for x in work.inputs(work.tokens, 0))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def run():
        out, lse = flash(q, k, v, 0.0, True, scale=work.scale)
        flash_backward(dout, q, k, v, out, lse, 0.0, True, scale=work.scale)

    return run


def whole_ring(work: Work) -> Callable[[], None]:
    """Our attention on one rank, as a function to time."""
    q, k, v, dout = work.inputs(work.tokens, 0)
    layout = PackedLayout([work.tokens])

    def run():
        torch.autograd.grad(_ring(q, k, v, work, layout, None), (q, k, v), dout)

    return run


def measure_rank(work: Work, way: str, repeats: int, group: dist.ProcessGroup) -> Measure:
    """The fastest of `repeats` runs of one way on this rank of the group; its peak is the highest."""
    layout = PackedLayout([work.tokens], cp_size=group.size(), cp_rank=group.rank())
    measures = [_measure(work, WAYS[way], layout, group) for _ in range(repeats)]
    fastest = min(measures, key=lambda measure: measure.seconds)
    return Measure(**asdict(fastest) | {"peak_bytes": max(measure.peak_bytes for measure in measures)})


def _measure(work: Work, way, layout: PackedLayout, group) -> Measure:
    comm = RingComm(group)
    layout.agree(group)
    dist.barrier(group)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        inputs = work.inputs(layout.local_total, layout.cp_rank)
        start, cpu_start = time.perf_counter(), time.process_time()
        forward_bytes = way(*inputs, work, layout, comm)
        cpu_seconds = time.process_time() - cpu_start
        dist.barrier(group)
        seconds = time.perf_counter() - start
        del inputs
    return Measure(seconds, cpu_seconds, forward_bytes, comm.bytes_sent - forward_bytes, _peak(profile))


def _peak(profile: torch.profiler.profile) -> int:
    """The most that was allocated at once while the profile ran."""
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        now += change.nbytes()
        peak = max(peak, now)
    return peak


# Each way takes (q, k, v, dout, work, layout, comm), runs forward and backward, and returns the bytes sent in the forward.


def ring(q, k, v, dout, work, layout, comm) -> int:
    """Keys and values go round."""
    out = _ring(q, k, v, work, layout, comm)
    forward_bytes = comm.bytes_sent
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    del gradients
    return forward_bytes


def gather(q, k, v, dout, work, layout, comm) -> int:
    """All keys and values on every rank, the same kernel calls."""
    trunk = ResidentTrunk(k, v, comm)
    none = k[:0].detach()
    plan, kernel = CausalPlan(layout), kernel_for(q)
    out = ResidentAttention.apply(q, trunk.handle, none, none, trunk, plan, NoBranch(), kernel, work.scale)
    forward_bytes = comm.bytes_sent
    torch.autograd.grad(out, (q, k, v), dout)
    return forward_bytes


def dense(q, k, v, dout, work, layout, comm) -> int:
    """All keys and values on every rank, and one mask of T x S."""
    trunk = ResidentTrunk(k, v, comm)
    shards = [trunk.shard(step) for step in range(trunk.size)]
    positions = [layout.positions_of(layout.rows_of((layout.cp_rank - s) % trunk.size)) for s in range(trunk.size)]
    full_k, full_v = (torch.cat([shard[n] for shard in shards]).requires_grad_() for n in range(2))
    mask_TS = layout.local_positions[:, None] >= torch.cat(positions)[None]
    forward_bytes = comm.bytes_sent
    heads_first = (x.transpose(0, 1)[None] for x in (q, full_k, full_v))
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask_TS[None, None], scale=work.scale, enable_gqa=True)
    _, dk, dv = torch.autograd.grad(out[0].transpose(0, 1), (q, full_k, full_v), dout)
    wide = wide_dtype(work.dtype)
    handle_grad = torch.stack([dk.to(wide), dv.to(wide)]).unflatten(1, (trunk.size, -1)).transpose(0, 1).contiguous()
    torch.autograd.grad(trunk.handle, (k, v), handle_grad)
    return forward_bytes


WAYS = {"ring": ring, "gather": gather, "dense": dense}


def _ring(q, k, v, work, layout, comm):
    none = k[:0].detach()
    return RingAttention.apply(q, k, v, none, none, CausalPlan(layout), NoBranch(), kernel_for(q), comm, work.scale)
