"""The reduced draft vocabulary, and the distributions over it.

Legend: ... any leading axes, V target vocabulary, U draft vocabulary.
d2t is an offset: draft id u is target id u + d2t[u]; None stands for the full vocabulary (U = V).
"""

import torch


def target_ids(d2t_U, vocab_size):
    """Target id of each draft id."""
    if d2t_U is None:
        return torch.arange(vocab_size)
    return torch.arange(len(d2t_U), device=d2t_U.device) + d2t_U


def draft_ids(ids, d2t_U, vocab_size):
    """Draft id of each target id, -1 where the draft vocabulary lacks it."""
    inverse_V = torch.full((vocab_size,), -1, dtype=torch.long)
    inverse_V[target_ids(d2t_U, vocab_size)] = torch.arange(vocab_size if d2t_U is None else len(d2t_U))
    return inverse_V[ids]


def teacher_probabilities(z_V, d2t_U, temperature=1.0):
    """Detached softmax(z / T) renormalised over the draft vocabulary: [..., V] -> [..., U]."""
    return torch.softmax(z_V.detach()[..., target_ids(d2t_U, z_V.shape[-1])] / temperature, dim=-1)


def student_log_probabilities(y_U, temperature=1.0):
    """log softmax(y / T): [..., U]."""
    return torch.log_softmax(y_U / temperature, dim=-1)


def overlap(y_U, z_V, d2t_U=None, temperature=1.0):
    """Acceptance probability sum_u min(p_u, q_u) with the target's mass q not renormalised over U (contract A.5)."""
    p_U = student_log_probabilities(y_U, temperature).exp()
    q_V = torch.softmax(z_V / temperature, dim=-1)
    return torch.minimum(p_U, q_V[..., target_ids(d2t_U, z_V.shape[-1])]).sum(dim=-1).detach()


def ratio_of_sums(numerators, counts, weights):
    """sum(weights * numerators) / sum(weights * counts), and a connected zero where nothing is counted."""
    numerator, denominator = (weights * numerators).sum(), (weights * counts).sum()
    return numerator * 0.0 if float(denominator) == 0.0 else numerator / denominator
