"""Soft cross-entropy of a draft against its policy, without the logits of all rows at once.

Legend: N student rows, E teacher rows, H/h hidden sizes of draft and policy, U this rank's shard of the draft vocabulary,
n rows of a chunk, u distinct teacher rows of a chunk.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from nemo_ext.losses.vocab_parallel import at_argmax, log_softmax_, reducer


class DraftLossRows(NamedTuple):
    """The loss and, detached, what the metrics need of each student row (zeros where the weight is zero)."""

    loss: torch.Tensor  # scalar: sum over rows of weight * cross-entropy
    cross_entropy_N: torch.Tensor
    acceptance_N: torch.Tensor  # sum_v min(student, target), the chance that verification accepts a sampled draft token
    greedy_acceptance_N: torch.Tensor  # target probability of the student's likeliest token (greedy drafting)


def soft_cross_entropy(
    student_NH: torch.Tensor,
    head_UH: torch.Tensor,
    teacher_Eh: torch.Tensor,
    teacher_head_Uh: torch.Tensor,
    teacher_rows_N: torch.Tensor,
    weight_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    teacher_logz_E: torch.Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    chunk_rows: int = 1024,
) -> DraftLossRows:
    """`sum_n weight_n * CE(softmax(teacher / T), softmax(student / T))` over the draft vocabulary (contract A.5, A.6).

    Logits of student and teacher exist for `chunk_rows` rows at a time, and each teacher row is projected once per chunk
    however many passes look at it. The gradient is computed in the same sweep, since the upstream gradient of
    a scalar is one number: nothing is recomputed in the backward. Rows of zero weight cost nothing.

    Args:
        student_NH: draft hidden states after the draft's final norm, replicated over the tensor-parallel group.
        head_UH: this rank's shard of the draft's LM head (full weight when not parallel).
        teacher_Eh: the policy's final hidden rows, already normalised; no gradient.
        teacher_head_Uh: the policy's head rows for the same draft ids as `head_UH` (see `draft_shard_of_target_head`).
        teacher_rows_N: row of `teacher_Eh` that is the target of each student row; ignored where the weight is zero.
        weight_N: mask * pass weight / global denominator, in the loss's own precision.
        temperature: divides both sides, as vLLM does when it samples.
        teacher_logz_E: log-sum-exp of the policy's `logits / T` over its whole vocabulary. With a reduced
            draft vocabulary the acceptance metrics need it, or they would be optimistic; None means the draft
            vocabulary is whole.
        tp_group: group that shards the vocabulary.
        chunk_rows: rows whose logits exist at once.
    """
    result = _SoftCrossEntropy.apply(
        student_NH,
        head_UH,
        teacher_Eh.detach(),
        teacher_head_Uh.detach(),
        teacher_rows_N,
        weight_N,
        temperature,
        teacher_logz_E,
        tp_group,
        chunk_rows,
    )
    return DraftLossRows(*result)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        student_NH,
        head_UH,
        teacher_Eh,
        teacher_head_Uh,
        teacher_rows_N,
        weight_N,
        temperature,
        logz_E,
        group,
        chunk,
    ):
        reduce_ = reducer(group)
        acc = torch.float64 if student_NH.dtype == torch.float64 else torch.float32
        want_student, want_head = ctx.needs_input_grad[:2]
        grad_student_NH = torch.zeros_like(student_NH) if want_student else None
        grad_head_UH = torch.zeros_like(head_UH, dtype=acc) if want_head else None
        ce_N, accept_N, greedy_N = (torch.zeros(weight_N.shape[0], dtype=acc, device=weight_N.device) for _ in range(3))

        for rows_n in torch.nonzero(weight_N).flatten().split(chunk):
            distinct_u, teacher_of_n = torch.unique(teacher_rows_N[rows_n], return_inverse=True)
            log_q_uU, logz_u = log_softmax_(
                (teacher_Eh[distinct_u] @ teacher_head_Uh.T).to(acc).div_(temperature), reduce_
            )
            q_nU = log_q_uU.exp()[teacher_of_n]

            student_nH = student_NH[rows_n]
            log_p_nU, _ = log_softmax_((student_nH @ head_UH.T).to(acc).div_(temperature), reduce_)
            ce_N[rows_n] = reduce_(-torch.einsum("nu,nu->n", q_nU, log_p_nU))
            p_nU = log_p_nU.exp()
            target_nU = q_nU
            if logz_E is not None:  # q is normalised over the draft vocabulary, the target over its own
                target_nU = q_nU * torch.exp(logz_u - logz_E[distinct_u].to(acc))[teacher_of_n, None]
            accept_N[rows_n] = reduce_(torch.minimum(p_nU, target_nU).sum(-1))
            greedy_N[rows_n] = at_argmax(p_nU, target_nU, reduce_, group)

            if want_student or want_head:
                scale_n = weight_N[rows_n].to(acc) / temperature
                dlogits_nU = p_nU.sub_(q_nU).mul_(scale_n[:, None])
                if want_student:
                    grad_student_NH[rows_n] = reduce_(dlogits_nU.to(student_NH.dtype) @ head_UH)
                if want_head:
                    grad_head_UH.addmm_(dlogits_nU.T, student_nH.to(acc))

        ctx.save_for_backward(grad_student_NH, None if grad_head_UH is None else grad_head_UH.to(head_UH.dtype))
        loss = torch.dot(weight_N.to(acc), ce_N)
        ctx.mark_non_differentiable(ce_N, accept_N, greedy_N)
        return loss, ce_N, accept_N, greedy_N

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_student_NH, grad_head_UH = ctx.saved_tensors
        grads = [g if g is None else g * grad_loss.to(g.dtype) for g in (grad_student_NH, grad_head_UH)]
        return *grads, None, None, None, None, None, None, None, None
