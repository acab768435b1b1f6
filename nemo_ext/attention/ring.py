"""Branch-aware zigzag ring attention: trunk keys go round the ring, branch keys stay (contract E.2).

Forward, on each of C ranks:

    for step in 0 .. C-1:
        send my shard's keys and values on, receive the next        (in flight)
        merge in the queries' attention over the shard at hand
    merge in the branch

Backward, with the merged out and lse: keys and values go round again, and each shard's gradient follows it one step
behind, in the wide dtype. It starts on the first rank after the owner and ends, C-1 hops later, at the owner, which
adds its own part last: the first hop of the keys hides behind the branch, the last hop of the gradient behind the
owner's own step.

    backward of the branch                                            first shard in flight
    for step in 1 .. C-1:
        send the shard on, receive the next                           in flight
        add to this shard's gradient, which the rank before summed    it arrives during the step's first kernel call
        send the gradient on
    add the own shard's part to the gradient that came home

Legend: T this rank's query rows, S rows of a shard, N query heads, M key heads, D head dim.
"""

import torch

from nemo_ext.attention.branch import Branch
from nemo_ext.attention.comm import Hop
from nemo_ext.attention.kernels import Kernel
from nemo_ext.attention.merge import KeyGradient, Merged, Summed, add_partials
from nemo_ext.attention.plans import Plan


class RingAttention(torch.autograd.Function):
    """`apply(q_TND, k_SMD, v_SMD, branch_k, branch_v, plan, branch, kernel, comm, scale) -> out_TND`.

    `comm` is None for one rank.
    """

    @staticmethod
    def forward(ctx, q_TND, k_SMD, v_SMD, branch_k, branch_v, plan: Plan, branch: Branch, kernel: Kernel, comm, scale):
        merged = Merged(q_TND)
        steps = comm.size if comm else 1
        shard, hop = [k_SMD, v_SMD], None
        for step in range(steps):
            if step + 1 < steps:
                hop = comm.pass_on(shard, step + 1, "keys and values")
            for spans in plan.calls(step):
                merged.add_partials(kernel.forward(q_TND, *shard, spans, scale))
            if step + 1 < steps:
                shard = hop.wait()
        merged.add_partials(branch.forward(q_TND, branch_k, branch_v, scale))
        out_TND, lse_TN = merged.result()
        ctx.save_for_backward(q_TND, k_SMD, v_SMD, branch_k, branch_v, out_TND, lse_TN)
        ctx.setup = plan, branch, kernel, comm, scale
        return out_TND

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout_TND):
        q_TND, k_SMD, v_SMD, branch_k, branch_v, out_TND, lse_TN = ctx.saved_tensors
        plan, branch, kernel, comm, scale = ctx.setup
        steps = comm.size if comm else 1
        dq, of_branch = Summed(q_TND), KeyGradient(branch_k, branch_v)
        hop = comm.pass_on([k_SMD, v_SMD], 1, "keys and values, backward,") if steps > 1 else None

        add_partials(branch.backward(dout_TND, q_TND, branch_k, branch_v, out_TND, lse_TN, scale), dq, of_branch)

        def add_step(step, shard, gradient):
            for spans in plan.calls(step):
                partials = kernel.backward(dout_TND, q_TND, *shard, out_TND, lse_TN, spans, scale)
                add_partials(partials, dq, gradient)

        gradient = _Gradient(k_SMD, v_SMD, None)
        for step in range(1, steps):
            shard = hop.wait()
            if step + 1 < steps:
                hop = comm.pass_on(shard, step + 1, "keys and values, backward,")
            add_step(step, shard, gradient)
            sent = gradient.result()
            gradient = _Gradient(k_SMD, v_SMD, comm.pass_on(sent, step + 1, "gradient of keys and values"))
            del shard, sent
        add_step(0, [k_SMD, v_SMD], gradient)
        gradients = dq.result(), *gradient.result(), *of_branch.result()
        inputs = q_TND, k_SMD, v_SMD, branch_k, branch_v
        return *(grad.to(x.dtype) for grad, x in zip(gradients, inputs, strict=True)), *(None,) * 5


class _Gradient(KeyGradient):
    """A shard's gradient, begun by the ranks before, whose sum may still be on its way."""

    def __init__(self, k_SMD: torch.Tensor, v_SMD: torch.Tensor, hop: Hop | None):
        super().__init__(k_SMD, v_SMD)
        self._hop = hop

    def add(self, rows, dk: torch.Tensor, dv: torch.Tensor) -> None:
        self._arrive()
        super().add(rows, dk, dv)

    def result(self) -> list[torch.Tensor]:
        self._arrive()
        return super().result()

    def _arrive(self) -> None:
        if self._hop is not None:
            self.start(*self._hop.wait())
            self._hop = None
