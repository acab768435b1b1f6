"""DFlash and DSpark on a pack: the block drafter and its heads (contract B.1 to B.3, B.8, C.1, C.2, C.5).

Legend: T rows of an unpadded pack, C = taps * target hidden size, N blocks, W rows per block, S drafted slots per block
(gamma), H hidden size, A query heads, G key/value heads, D head size, R Markov rank, V target and U draft vocabulary.
"""

import torch

from tests.reference.dense import dense_block_attention
from tests.reference.layers import linear, rms_norm, rope, split_heads, swiglu


def dense_dflash(
    weights, cfg, taps_TC, embeddings_TH, mask_embedding_H, seq_lens, anchor_sequences, anchor_positions, rows
):
    """The backbone shared by DFlash and DSpark: hidden [N, W, H] after the final norm, W = `rows`.

    DFlash has W = gamma + 1 and drops row 0 before the loss; DSpark (sample_from_anchor) has W = gamma and keeps all.
    Row 0 of block n is the embedding of its anchor token, the others are the mask embedding; row j stands at p_n + j.
    weights: Hugging Face names (contract D.1). cfg: num_layers, num_heads, num_kv_heads, head_dim, rope_theta (or
    inv_freq), rms_norm_eps, and per layer `windows` (None or a size) and `causal` (inside the block).
    embeddings: e(x) of every pack row, scaled as the target scales its inputs. Anchors are local to their sequence.
    """
    eps, D = cfg["rms_norm_eps"], cfg["head_dim"]
    starts = [sum(seq_lens[:s]) for s in range(len(seq_lens))]
    context_TH = rms_norm(linear(taps_TC, weights, "fc"), weights["hidden_norm.weight"], eps)
    position_T = torch.cat([torch.arange(length) for length in seq_lens])
    blocks = []
    for s, p in zip(anchor_sequences, anchor_positions, strict=True):
        blocks.append(torch.stack([embeddings_TH[starts[int(s)] + int(p)]] + [mask_embedding_H] * (rows - 1)))
    if not blocks:
        return context_TH[:0].reshape(0, rows, context_TH.shape[1]) * weights["norm.weight"]
    hidden_NWH = torch.stack(blocks)
    position_NW = torch.stack([int(p) + torch.arange(rows) for p in anchor_positions])

    def rotated(x_NWAD):
        return rope(x_NWAD.flatten(0, 1), position_NW.flatten(), cfg).reshape(x_NWAD.shape)

    for index in range(cfg["num_layers"]):
        prefix = f"layers.{index}."
        attention = f"{prefix}self_attn."
        q_norm, k_norm = weights[f"{attention}q_norm.weight"], weights[f"{attention}k_norm.weight"]
        trunk_k_TGD = split_heads(linear(context_TH, weights, f"{attention}k_proj"), D)
        trunk_k_TGD = rope(rms_norm(trunk_k_TGD, k_norm, eps), position_T, cfg)
        trunk_v_TGD = split_heads(linear(context_TH, weights, f"{attention}v_proj"), D)
        u_NWH = rms_norm(hidden_NWH, weights[f"{prefix}input_layernorm.weight"], eps)
        q_NWAD = rotated(rms_norm(split_heads(linear(u_NWH, weights, f"{attention}q_proj"), D), q_norm, eps))
        k_NWGD = rotated(rms_norm(split_heads(linear(u_NWH, weights, f"{attention}k_proj"), D), k_norm, eps))
        v_NWGD = split_heads(linear(u_NWH, weights, f"{attention}v_proj"), D)
        if q_NWAD.shape[2] != cfg["num_heads"] or k_NWGD.shape[2] != cfg["num_kv_heads"]:
            raise ValueError(f"the weights have {q_NWAD.shape[2]} and {k_NWGD.shape[2]} heads; make cfg agree")
        out_NWAD = dense_block_attention(
            q_NWAD, trunk_k_TGD, trunk_v_TGD, k_NWGD, v_NWGD, anchor_sequences, anchor_positions, seq_lens,
            window=cfg["windows"][index], causal_in_block=cfg["causal"][index],
        )  # fmt: skip
        hidden_NWH = hidden_NWH + linear(out_NWAD.flatten(2), weights, f"{attention}o_proj")
        normed_NWH = rms_norm(hidden_NWH, weights[f"{prefix}post_attention_layernorm.weight"], eps)
        hidden_NWH = hidden_NWH + swiglu(normed_NWH, weights, prefix)
    return rms_norm(hidden_NWH, weights["norm.weight"], eps)


def head_logits(hidden_H, lm_head_UH, *, multiplier=1.0, softcap=None):
    """Logits of the target's head (or of a reduced one) with the target's own transforms: cap * tanh(y / cap), then
    the multiplier (the order of vLLM's LogitsProcessor)."""
    y_U = hidden_H @ lm_head_UH.T
    if softcap is not None:
        y_U = softcap * torch.tanh(y_U / softcap)
    return y_U * multiplier


def dense_dspark_heads(weights, hidden_NSH, previous_ids_NS, lm_head_UH, *, confidence_with_markov=True):
    """(logits [N, S, U] with the Markov bias, confidence logits [N, S] or None without such a head).

    previous_ids: the target id before each slot, x_{p + j} when the slot predicts x_{p + 1 + j}.
    """
    markov_NSR = weights["markov_head.markov_w1.weight"][previous_ids_NS]
    logits_NSU = head_logits(hidden_NSH, lm_head_UH) + linear(markov_NSR, weights, "markov_head.markov_w2")
    if "confidence_head.proj.weight" not in weights:
        return logits_NSU, None
    features = torch.cat([hidden_NSH, markov_NSR], dim=-1) if confidence_with_markov else hidden_NSH
    confidence = linear(features, weights, "confidence_head.proj") + weights["confidence_head.proj.bias"]
    return logits_NSU, confidence.squeeze(-1)


def dspark_greedy_draft(weights, hidden_SH, anchor_id, lm_head_UH, d2t_U=None):
    """Left-to-right drafting of one block as served: each slot's Markov bias comes from the token just drafted.

    Returns the S drafted target ids.
    """
    previous, drafted = int(anchor_id), []
    for h in hidden_SH:
        logits, _ = dense_dspark_heads(weights, h[None, None], torch.tensor([[previous]]), lm_head_UH)
        best = int(logits.argmax())
        previous = best if d2t_U is None else best + int(d2t_U[best])
        drafted.append(previous)
    return drafted
