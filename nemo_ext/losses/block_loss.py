"""The loss of block drafts against their policy, without the logits of all rows at once (contract B.6, C.3).

Legend: N student rows, E teacher rows, H/h hidden sizes of draft and policy, R Markov rank, U this rank's shard of the
draft vocabulary, n rows of a chunk, u distinct teacher rows of a chunk.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from nemo_ext.losses.logit_transform import UNCHANGED, LogitTransform
from nemo_ext.losses.vocab_parallel import Reduce, at_argmax, log_softmax_, reducer, softmax_


class LossTerms(NamedTuple):
    """`cross_entropy * CE + total_variation * sum_v |p_v - q_v|` per row, with student `p` and target `q`. CE is against
    `q`, or with `hard_labels` against the token that came. The L1 distance is not halved (contract C.3)."""

    cross_entropy: float = 1.0
    total_variation: float = 0.0
    hard_labels: bool = False


class BlockLossRows(NamedTuple):
    """The loss and, detached, what heads and metrics need of each student row (zeros where the weight is zero)."""

    loss: torch.Tensor  # scalar: sum over rows of weight * terms
    cross_entropy_N: torch.Tensor
    total_variation_N: torch.Tensor
    overlap_N: torch.Tensor  # sum_v min(p, q), both over the draft vocabulary: what a confidence head learns
    acceptance_N: torch.Tensor  # the same with the target's own mass: the chance that a sampled token is accepted
    greedy_acceptance_N: torch.Tensor  # target's probability of the student's likeliest token (greedy drafting)


@dataclass(frozen=True)
class Teacher:
    """The policy's side of the loss; nothing here takes a gradient.

    Attributes:
        hidden_Eh: the policy's final hidden rows, already normalised.
        head_Uh: the policy's head rows for the draft ids of this rank (`draft_shard_of_target_head`).
        rows_N: row of `hidden_Eh` that is the target of each student row; ignored where the weight is zero.
        labels_N: draft id of the token that came; -1 where the draft vocabulary lacks it. None without hard labels.
        transform: of the policy's logits.
        logz_E: log-sum-exp of the policy's `logits / temperature` over its whole vocabulary, for the acceptance of a
            reduced draft vocabulary; None means the draft vocabulary is whole.
    """

    hidden_Eh: torch.Tensor
    head_Uh: torch.Tensor
    rows_N: torch.Tensor
    labels_N: torch.Tensor | None = None
    transform: LogitTransform = UNCHANGED
    logz_E: torch.Tensor | None = None


def block_loss(
    student_NH: torch.Tensor,
    head_UH: torch.Tensor,
    teacher: Teacher,
    weight_N: torch.Tensor,
    terms: LossTerms,
    *,
    markov_NR: torch.Tensor | None = None,
    markov_head_UR: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    chunk_rows: int = 256,
) -> BlockLossRows:
    """`sum_n weight_n * terms(p_n, q_n)` over the draft vocabulary.

    Logits of student and teacher exist for `chunk_rows` rows at a time, and a teacher row is projected once per chunk
    however many slots look at it. The gradient is computed in the same sweep, since the upstream gradient of a scalar is one
    number: nothing is recomputed in the backward. Rows of zero weight cost nothing.

    Args:
        student_NH: draft hidden states after the final norm, replicated over the tensor-parallel group; their gradient is
            whole on each rank.
        head_UH: this rank's shard of the head that the draft is served with; takes a gradient if it asks for one.
        weight_N: mask * slot weight / global denominator, in the loss's own precision.
        markov_NR, markov_head_UR: `W1` rows of the token before each slot, replicated, and this rank's shard of `W2`
            (contract C.2); None without a Markov head.
        logit_scale: of the student's logits, the Markov head's summand included, as vLLM serves them.
        temperature: divides both sides, as vLLM does when it samples.
        tp_group: group that shards the vocabulary.
        chunk_rows: rows whose logits exist at once.
    """
    weight_N = weight_N.detach()
    fixed = (teacher, weight_N, terms, logit_scale, temperature, tp_group, chunk_rows)
    return BlockLossRows(*_BlockLoss.apply(student_NH, head_UH, markov_NR, markov_head_UR, fixed))


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student_NH, head_UH, markov_NR, markov_head_UR, fixed):
        teacher, weight_N, terms, logit_scale, temperature, group, chunk = fixed
        reduce_ = reducer(group)
        acc = torch.promote_types(student_NH.dtype, torch.float32)
        weight_N = weight_N.to(acc)
        labels_N = None
        if terms.hard_labels:
            labels_N = teacher.labels_N - (dist.get_rank(group) * len(head_UH) if group is not None else 0)
        # (inputs [N, ...], weight [U, ...]) of each summand of the logits, and the gradients of those that ask for one.
        parts = [(student_NH, head_UH)] + ([] if markov_NR is None else [(markov_NR, markov_head_UR)])
        wanted = [ctx.needs_input_grad[2 * i : 2 * i + 2] for i in range(len(parts))]
        grads = [
            (torch.zeros_like(x) if want_x else None, torch.zeros_like(w, dtype=acc) if want_w else None)
            for (x, w), (want_x, want_w) in zip(parts, wanted, strict=True)
        ]
        rows = [torch.zeros_like(weight_N) for _ in range(5)]

        for rows_n in torch.nonzero(weight_N).flatten().split(chunk):
            q_nU, mass_n = _target(teacher, rows_n, temperature, acc, reduce_)
            logits_nU = (student_NH[rows_n] @ head_UH.T).to(acc)
            for x, w in parts[1:]:
                logits_nU += (x[rows_n] @ w.T).to(acc)
            log_p_nU, _ = log_softmax_(logits_nU.mul_(logit_scale / temperature), reduce_)
            p_nU = log_p_nU.exp()
            if terms.hard_labels:
                inside_n, label_n = _own_labels(labels_N[rows_n], p_nU.shape[-1], acc)
                ce_n = reduce_(-log_p_nU.gather(-1, label_n[:, None]).squeeze(-1) * inside_n)
                whole_n = reduce_(inside_n.clone())
            else:
                ce_n = reduce_(-torch.einsum("nu,nu->n", q_nU, log_p_nU))
            difference_nU = torch.sub(p_nU, q_nU, out=log_p_nU)
            l1_n = reduce_(torch.linalg.vector_norm(difference_nU, ord=1, dim=-1))
            overlap_n = (1.0 - 0.5 * l1_n).clamp_(0.0, 1.0)
            accept_n = overlap_n
            if mass_n is not None:
                q_nU.mul_(mass_n[:, None])
                accept_n = reduce_(torch.minimum(p_nU, q_nU).sum(-1))
            greedy_n = at_argmax(p_nU, q_nU, reduce_, group)
            for total, part in zip(rows, (ce_n, l1_n, overlap_n, accept_n, greedy_n), strict=True):
                total[rows_n] = part
            if not any(map(any, wanted)):
                continue

            dlogits_nU = _soft_gradient(terms, p_nU, difference_nU, reduce_)
            if terms.hard_labels:
                dlogits_nU.addcmul_(p_nU, (terms.cross_entropy * whole_n)[:, None].expand_as(p_nU))
                dlogits_nU.scatter_add_(-1, label_n[:, None], -(terms.cross_entropy * inside_n)[:, None])
            dlogits_nU.mul_((weight_N[rows_n] * (logit_scale / temperature))[:, None])
            for (x, w), (grad_x, grad_w) in zip(parts, grads, strict=True):
                if grad_x is not None:
                    grad_x[rows_n] = reduce_(dlogits_nU.to(x.dtype) @ w)
                if grad_w is not None:
                    grad_w.addmm_(dlogits_nU.T, x[rows_n].to(acc))

        flat = [grad for pair in grads for grad in pair] + [None] * (4 - 2 * len(parts))
        dtypes = [x.dtype for pair in parts for x in pair]
        ctx.save_for_backward(*(g if g is None else g.to(dtypes[i]) for i, g in enumerate(flat)))
        ctx.mark_non_differentiable(*rows)
        loss = torch.dot(weight_N, terms.cross_entropy * rows[0] + terms.total_variation * rows[1])
        return loss, *rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        return *(g if g is None else g * grad_loss.to(g.dtype) for g in ctx.saved_tensors), None


def _target(teacher: Teacher, rows_n, temperature: float, acc: torch.dtype, reduce_: Reduce):
    """The target's distribution over the draft vocabulary, `[n, U]`, and how much of its mass that is, `[n]` (None if the
    vocabulary is whole)."""
    distinct_u, of_n = torch.unique(teacher.rows_N[rows_n], return_inverse=True)
    z_uU = teacher.transform.apply_((teacher.hidden_Eh[distinct_u] @ teacher.head_Uh.T).to(acc))
    q_uU, logz_u = softmax_(z_uU.div_(temperature), reduce_)
    mass_n = None if teacher.logz_E is None else torch.exp(logz_u - teacher.logz_E[distinct_u].to(acc))[of_n]
    in_order = len(of_n) == len(distinct_u) and bool((of_n[1:] > of_n[:-1]).all())
    return (q_uU if in_order else q_uU[of_n]), mass_n


def _own_labels(labels_n, size: int, acc: torch.dtype):
    """Whether each label is in this rank's shard (1.0 or 0.0), and its place there (0 where it is not)."""
    inside_n = (labels_n >= 0) & (labels_n < size)
    return inside_n.to(acc), torch.where(inside_n, labels_n, 0)


def _soft_gradient(terms: LossTerms, p_nU, difference_nU, reduce_: Reduce):
    """Gradient of the terms in the logits but for hard labels. With `s = sign(p - q)`, that of the L1 distance is
    `p * (s - sum_v s_v p_v)`. Overwrites `difference_nU`."""
    soft = 0.0 if terms.hard_labels else terms.cross_entropy
    if not terms.total_variation:
        return difference_nU.mul_(soft)
    sign_nU = difference_nU.sign() if soft else difference_nU.sign_()
    mean_n = reduce_(torch.einsum("nu,nu->n", sign_nU, p_nU))
    gradient_nU = sign_nU.sub_(mean_n[:, None]).mul_(p_nU).mul_(terms.total_variation)
    return gradient_nU.add_(difference_nU, alpha=soft) if soft else gradient_nU
