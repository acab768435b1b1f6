"""EAGLE-3 with training-time test on one document, row-fixed convention (contract A.1 to A.6).

Legend: L rows of the document, C = taps * target hidden size, E embedding size (= H), H hidden size, A query heads,
G key/value heads, D head size, M earlier branch keys, P passes, V target vocabulary, U draft vocabulary.
"""

import torch

from tests.reference.dense import dense_ttt_attention
from tests.reference.layers import linear, rms_norm, rope, split_heads, swiglu
from tests.reference.vocab import draft_ids, ratio_of_sums, student_log_probabilities, teacher_probabilities


def dense_eagle3_ttt(weights, cfg, taps_LC, embeddings_LE, passes):
    """All passes of one document.

    weights: Hugging Face names (contract D.1; layer 0 as `midlayer.*` or `layers.0.*`).
    cfg: num_layers, num_heads, num_kv_heads, head_dim, rope_theta (or inv_freq), rms_norm_eps, and optionally the
    flags norm_output, norm_before_residual, norm_before_fc (one norm over all taps), fc_norm (one norm per tap).
    embeddings: e(x_i) of row i, not shifted.
    Returns a list over d = 1..P of (g^d [L, H] before the final norm, y^d [L, U]). Rows i > L - 2 - d are not valid: a
    token past the end of the document counts as a zero embedding there.
    """
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
    L, eps = len(taps_LC), cfg["rms_norm_eps"]
    feedback_LH = linear(_normed_taps(weights, cfg, taps_LC), weights, "fc")
    # Of each layer, (k, v) of every pass so far: the first is the trunk, the others are the rows' branches.
    cache = [[] for _ in range(cfg["num_layers"])]
    results = []
    for d in range(1, passes + 1):
        shifted_LE = torch.zeros_like(embeddings_LE)
        shifted_LE[: max(L - d, 0)] = embeddings_LE[d:]
        position_L = torch.arange(L, device=taps_LC.device) + d - 1
        hidden_LH = feedback_LH
        for index in range(cfg["num_layers"]):
            hidden_LH = _layer(weights, cfg, index, hidden_LH, shifted_LE, position_L, cache[index])
        normed_LH = rms_norm(hidden_LH, weights["norm.weight"], eps)
        results.append((hidden_LH, linear(normed_LH, weights, "lm_head")))
        feedback_LH = normed_LH if cfg.get("norm_output", False) else hidden_LH
    return results


def supervised_rows(label_mask_L, passes, *, teacher_LV=None, d2t_U=None, mask_out_of_draft_vocab=False):
    """m [P, L]: row i is supervised in pass d iff i + d + 1 <= L - 1 and M[i + d + 1], and, if asked for, the draft
    vocabulary holds argmax z[i + d]. Sum it over rows, documents and ranks for the denominators N [P]."""
    L = len(label_mask_L)
    supervised_PL = torch.zeros(passes, L, dtype=torch.bool)
    for d in range(1, passes + 1):
        for i in range(L):
            if i + d + 1 > L - 1 or not bool(label_mask_L[i + d + 1]):
                continue
            if mask_out_of_draft_vocab:
                best = teacher_LV[i + d].argmax()
                if int(draft_ids(best, d2t_U, teacher_LV.shape[-1])) < 0:
                    continue
            supervised_PL[d - 1, i] = True
    return supervised_PL


def dense_soft_ce_loss(
    logits_per_pass, teacher_LV, d2t_U, label_mask_L, pass_weights=None, temperature=1.0, denominators=None,
    *, mask_out_of_draft_vocab=False,
):  # fmt: skip
    """One document's share of sum_d a_d sum_i m^d_i c^d_i / sum_d a_d N_d (contract A.5 and A.6).

    logits_per_pass: P tensors y^d [L, U]. teacher: z [L, V], unscaled and unshifted; row i of pass d learns from
    z[i + d]. Both are divided by the temperature. d2t None means the full vocabulary. pass_weights a [P], default ones.
    denominators: the global N [P], default this document's own counts.
    Returns (loss, numerators [P] = sum_i m c, counts [P] = sum_i m).
    """
    passes = len(logits_per_pass)
    supervised_PL = supervised_rows(
        label_mask_L, passes, teacher_LV=teacher_LV, d2t_U=d2t_U, mask_out_of_draft_vocab=mask_out_of_draft_vocab
    )
    numerators = []
    for d, y_LU in enumerate(logits_per_pass, start=1):
        # Starting from the logits keeps the sum connected to them when no row is supervised.
        total = y_LU[:0].sum()
        for i in supervised_PL[d - 1].nonzero().flatten().tolist():
            q_U = teacher_probabilities(teacher_LV[i + d], d2t_U, temperature)
            total = total - (q_U * student_log_probabilities(y_LU[i], temperature)).sum()
        numerators.append(total)
    numerators_P = torch.stack(numerators)
    counts_P = supervised_PL.sum(dim=1).to(numerators_P.dtype)
    weights_P = torch.ones_like(counts_P) if pass_weights is None else torch.as_tensor(pass_weights).to(counts_P)
    denominators_P = counts_P if denominators is None else torch.as_tensor(denominators).to(counts_P)
    return ratio_of_sums(numerators_P, denominators_P, weights_P), numerators_P, counts_P


def _normed_taps(weights, cfg, taps_LC):
    eps = cfg["rms_norm_eps"]
    if cfg.get("norm_before_fc", False):
        taps_LC = rms_norm(taps_LC, weights["input_norm.weight"], eps)
    if cfg.get("fc_norm", False):
        norms = []
        while f"fc_norm.{len(norms)}.weight" in weights:
            norms.append(weights[f"fc_norm.{len(norms)}.weight"])
        parts = taps_LC.chunk(len(norms), dim=-1)
        taps_LC = torch.cat([rms_norm(part, norm, eps) for part, norm in zip(parts, norms, strict=True)], dim=-1)
    return taps_LC


def _layer(weights, cfg, index, hidden_LH, embedding_LE, position_L, cache):
    """One decoder layer of one pass; appends this pass's (k, v) to the layer's cache."""
    prefix, eps, D = f"layers.{index}.", cfg["rms_norm_eps"], cfg["head_dim"]
    residual_LH = hidden_LH
    if index == 0:
        normed_LH = rms_norm(hidden_LH, weights[f"{prefix}hidden_norm.weight"], eps)
        if cfg.get("norm_before_residual", False):
            residual_LH = normed_LH
        token_LE = rms_norm(embedding_LE, weights[f"{prefix}input_layernorm.weight"], eps)
        u = torch.cat([token_LE, normed_LH], dim=-1)
    else:
        u = rms_norm(hidden_LH, weights[f"{prefix}input_layernorm.weight"], eps)
    q_LAD = rope(split_heads(linear(u, weights, f"{prefix}self_attn.q_proj"), D), position_L, cfg)
    k_LGD = rope(split_heads(linear(u, weights, f"{prefix}self_attn.k_proj"), D), position_L, cfg)
    v_LGD = split_heads(linear(u, weights, f"{prefix}self_attn.v_proj"), D)
    if q_LAD.shape[1] != cfg["num_heads"] or k_LGD.shape[1] != cfg["num_kv_heads"]:
        raise ValueError(
            f"the weights have {q_LAD.shape[1]} and {k_LGD.shape[1]} heads; make num_heads, num_kv_heads so"
        )
    cache.append((k_LGD, v_LGD))
    trunk_k, trunk_v = cache[0]
    if len(cache) == 1:
        branch_k = branch_v = k_LGD.new_zeros(len(k_LGD), 0, *k_LGD.shape[1:])
    else:
        branch_k, branch_v = (torch.stack(parts, dim=1) for parts in zip(*cache[1:], strict=True))
    out_LAD = dense_ttt_attention(q_LAD, trunk_k, trunk_v, branch_k, branch_v, [len(q_LAD)])
    residual_LH = residual_LH + linear(out_LAD.flatten(1), weights, f"{prefix}self_attn.o_proj")
    normed_LH = rms_norm(residual_LH, weights[f"{prefix}post_attention_layernorm.weight"], eps)
    return residual_LH + swiglu(normed_LH, weights, prefix)
