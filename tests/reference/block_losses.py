"""Labels, weights, losses and metrics of the block drafters (contract B.5, B.6, C.3, C.4).

Legend: T rows of an unpadded pack, N blocks, S drafted slots per block (gamma), V target and U draft vocabulary.
Slot s = 0..S-1 of the block at anchor p predicts x_{p+1+s} from teacher row z_{p+s} after token x_{p+s}. That is row
s + 1 of a DFlash block and row s of a DSpark block, so both drafters share everything here.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tests.reference.vocab import draft_ids, overlap, ratio_of_sums, student_log_probabilities, teacher_probabilities


class BlockTargets(NamedTuple):
    """All [N, S]. Entries of slots outside the mask are valid indices without meaning."""

    mask: torch.Tensor  # bool, prefix-contiguous
    label_ids: torch.Tensor  # target id x_{p+1+s}
    previous_ids: torch.Tensor  # target id x_{p+s}
    teacher_rows: torch.Tensor  # pack row of z_{p+s}


def block_targets(ids_T, label_mask_T, seq_lens, anchor_sequences, anchor_positions, slots, *, anchor_valid=None):
    """Which slots count, and what they learn: a slot counts iff its label exists in the document, is supervised, and so
    are those of all earlier slots of the block (contract B.5)."""
    starts = [sum(seq_lens[:s]) for s in range(len(seq_lens))]
    count = len(anchor_positions)
    mask_NS = torch.zeros(count, slots, dtype=torch.bool)
    label_NS, previous_NS, teacher_NS = (torch.zeros(count, slots, dtype=torch.long) for _ in range(3))
    for n in range(count):
        start, length = starts[int(anchor_sequences[n])], seq_lens[int(anchor_sequences[n])]
        open_prefix = anchor_valid is None or bool(anchor_valid[n])
        for s in range(slots):
            label = int(anchor_positions[n]) + 1 + s
            open_prefix = open_prefix and label <= length - 1 and bool(label_mask_T[start + label])
            mask_NS[n, s] = open_prefix
            label = min(label, length - 1)
            label_NS[n, s] = ids_T[start + label]
            # Only where the label was clamped does the previous row differ from label - 1; such slots are masked.
            previous = min(int(anchor_positions[n]) + s, length - 1)
            previous_NS[n, s], teacher_NS[n, s] = ids_T[start + previous], start + previous
    return BlockTargets(mask_NS, label_NS, previous_NS, teacher_NS)


def decay_gamma(block_size):
    """gamma_d of DFlash's exp weights: 4, 5, 7 at block size 8, 10, 16, linear between and constant outside."""
    points = [(8, 4.0), (10, 5.0), (16, 7.0)]
    if block_size <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if block_size <= x1:
            return y0 + (y1 - y0) * (block_size - x0) / (x1 - x0)
    return points[-1][1]


def slot_weights(slots, gamma_d=None):
    """exp(-s / gamma_d) for s = 0..S-1, or ones without a decay. float64."""
    return torch.tensor([1.0 if gamma_d is None else math.exp(-s / gamma_d) for s in range(slots)], dtype=torch.float64)


def dense_dflash_loss(
    logits_NSU, teacher_TV, targets, *, weights_S=None, d2t_U=None, hard=False, temperature=1.0, denominators_S=None
):  # fmt: skip
    """sum_s w_s sum_n m c / sum_s w_s N_s with soft (or hard) cross-entropy c (contract B.6).

    logits: of the S scored rows. teacher: z of every pack row. Student and teacher are divided by the temperature, for
    hard labels too. A hard label outside the draft vocabulary costs nothing but stays in the counts.
    denominators: the global N [S], default this call's own counts. Returns (loss, numerators [S], counts [S]).
    """
    ce = _hard_ce if hard else _soft_ce
    numerators_S, counts_S = _sum_over_blocks(ce(logits_NSU, teacher_TV, targets, d2t_U, temperature), targets.mask)
    weights_S = torch.ones_like(counts_S) if weights_S is None else torch.as_tensor(weights_S).to(counts_S)
    denominators_S = counts_S if denominators_S is None else torch.as_tensor(denominators_S).to(counts_S)
    return ratio_of_sums(numerators_S, denominators_S, weights_S), numerators_S, counts_S


def dense_dspark_loss(
    logits_NSU, confidence_NS, teacher_TV, targets, *, ce_alpha=0.1, tv_alpha=0.9, confidence_alpha=1.0, gamma_d=4.0,
    d2t_U=None, temperature=1.0, denominators_S=None,
):  # fmt: skip
    """The three-term loss (contract C.3): ce_alpha * CE + tv_alpha * sum|p - q| + confidence_alpha * BCE, all with
    weights exp(-s / gamma_d) over the same denominator. confidence None leaves its term out.

    Returns (loss, {"ce", "tv", "confidence": numerators [S]}, counts [S]).
    """
    p_NSU, q_NSU = _student_and_teacher(logits_NSU, teacher_TV, targets, d2t_U, temperature)
    l1_NS = (p_NSU - q_NSU).abs().sum(dim=-1)
    rows = {"ce": _hard_ce(logits_NSU, teacher_TV, targets, d2t_U, temperature), "tv": l1_NS}
    alphas = {"ce": ce_alpha, "tv": tv_alpha, "confidence": confidence_alpha}
    if confidence_NS is not None:
        acceptance_NS = (1.0 - 0.5 * l1_NS).clamp(0.0, 1.0).detach()
        rows["confidence"] = F.softplus(confidence_NS) - acceptance_NS * confidence_NS
    terms = {name: _sum_over_blocks(values, targets.mask)[0] for name, values in rows.items()}
    total_S = sum(alphas[name] * numerators for name, numerators in terms.items())
    counts_S = targets.mask.sum(dim=0).to(total_S.dtype)
    weights_S = slot_weights(len(counts_S), gamma_d).to(counts_S)
    denominators_S = counts_S if denominators_S is None else torch.as_tensor(denominators_S).to(counts_S)
    return ratio_of_sums(total_S, denominators_S, weights_S), terms, counts_S


@torch.no_grad()
def dspark_metrics(logits_NSU, confidence_NS, teacher_TV, targets, *, gamma_d=4.0, d2t_U=None, temperature=1.0):
    """Contract C.4 on these blocks alone; every entry is a mean (NaN where nothing counts).

    accept_rate a [S]: 1 - TV distance over the draft vocabulary. accept_rate_full_mass [S]: overlap with the target's
    un-renormalised mass. greedy_accept_rate [S]: target mass of the draft's argmax. tau: 1 + mean over blocks with a
    counted slot, of sum_s prod_{i<=s} a_i m_i. The confidence errors are weighted by exp(-s / gamma_d).
    """
    m_NS = targets.mask.to(logits_NSU.dtype)
    p_NSU, q_NSU = _student_and_teacher(logits_NSU, teacher_TV, targets, d2t_U, temperature)
    a_NS = (1.0 - 0.5 * (p_NSU - q_NSU).abs().sum(dim=-1)).clamp(0.0, 1.0)
    z_NSV = teacher_TV[targets.teacher_rows]
    best_NS = p_NSU.argmax(dim=-1)
    best_target_NS = best_NS if d2t_U is None else best_NS + d2t_U[best_NS]
    greedy_NS = torch.softmax(z_NSV / temperature, dim=-1).gather(-1, best_target_NS[..., None]).squeeze(-1)
    prefix_NS = (a_NS * m_NS).cumprod(dim=1)
    counts_S = m_NS.sum(dim=0)
    metrics = {
        "accept_rate": (a_NS * m_NS).sum(dim=0) / counts_S,
        "accept_rate_full_mass": (overlap(logits_NSU, z_NSV, d2t_U, temperature) * m_NS).sum(dim=0) / counts_S,
        "greedy_accept_rate": (greedy_NS * m_NS).sum(dim=0) / counts_S,
        "tau": 1.0 + prefix_NS.sum() / targets.mask.any(dim=1).sum(),
    }
    if confidence_NS is not None:
        weights_NS = m_NS * slot_weights(m_NS.shape[1], gamma_d).to(m_NS)
        error_NS = torch.sigmoid(confidence_NS) - a_NS
        prefix_error_NS = (torch.sigmoid(confidence_NS) * m_NS).cumprod(dim=1) - prefix_NS
        for name, values_NS in (("abs_error", error_NS.abs()), ("bias", error_NS), ("cumprod_bias", prefix_error_NS)):
            metrics[f"confidence_{name}"] = (values_NS * weights_NS).sum() / weights_NS.sum()
    return metrics


def _student_and_teacher(logits_NSU, teacher_TV, targets, d2t_U, temperature):
    p_NSU = student_log_probabilities(logits_NSU, temperature).exp()
    return p_NSU, teacher_probabilities(teacher_TV[targets.teacher_rows], d2t_U, temperature)


def _soft_ce(logits_NSU, teacher_TV, targets, d2t_U, temperature):
    q_NSU = teacher_probabilities(teacher_TV[targets.teacher_rows], d2t_U, temperature)
    return -(q_NSU * student_log_probabilities(logits_NSU, temperature)).sum(dim=-1)


def _hard_ce(logits_NSU, teacher_TV, targets, d2t_U, temperature):
    label_NS = draft_ids(targets.label_ids, d2t_U, teacher_TV.shape[-1])
    log_p_NS = student_log_probabilities(logits_NSU, temperature).gather(-1, label_NS.clamp(min=0)[..., None])
    return torch.where(label_NS >= 0, -log_p_NS.squeeze(-1), 0.0)


def _sum_over_blocks(values_NS, mask_NS):
    return (values_NS * mask_NS).sum(dim=0), mask_NS.sum(dim=0).to(values_NS.dtype)
