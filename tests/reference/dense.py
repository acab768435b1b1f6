"""The three attention patterns as one softmax over an explicit boolean mask.

Legend: T rows of an unpadded pack, N blocks, W rows per block, M branch keys per row, Q queries, K keys,
H query heads, G key/value heads (H is a multiple of G; query head h reads key head h // (H // G)), D head size.
Every function works in the dtype of its arguments and is differentiable by autograd.
"""

import torch


def attend(q_QHD, k_KGD, v_KGD, visible_QK, scale=None):
    """softmax(scale * q k^T) v over the visible keys only; every query must see at least one key. Returns [Q, H, D]."""
    H, G = q_QHD.shape[1], k_KGD.shape[1]
    if H % G:
        raise ValueError(f"{H} query heads cannot share {G} key heads; use a multiple")
    if not bool(visible_QK.any(dim=1).all()):
        raise ValueError("a query row sees no key; give each row at least one")
    scale = q_QHD.shape[-1] ** -0.5 if scale is None else scale
    heads = []
    for h in range(H):
        g = h // (H // G)
        scores_QK = q_QHD[:, h] @ k_KGD[:, g].T * scale
        weights_QK = torch.softmax(scores_QK.masked_fill(~visible_QK, float("-inf")), dim=1)
        heads.append(weights_QK @ v_KGD[:, g])
    return torch.stack(heads, dim=1)


def dense_causal_attention(q_THD, k_TGD, v_TGD, seq_lens, *, window=None, scale=None):
    """Causal attention inside each sequence of a pack.

    Row i sees row j of its own sequence iff j <= i, and with a window w iff 0 <= i - j < w.
    Shapes: q [T, H, D], k and v [T, G, D] with T = sum(seq_lens). Returns [T, H, D].
    """
    _check_rows(seq_lens, q_THD, k_TGD, v_TGD)
    outputs = []
    for start, length in _segments(seq_lens):
        rows = slice(start, start + length)
        position = torch.arange(length, device=q_THD.device)
        distance = position[:, None] - position[None, :]
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        outputs.append(attend(q_THD[rows], k_TGD[rows], v_TGD[rows], visible, scale))
    return torch.cat(outputs)


def dense_ttt_attention(q_THD, trunk_k_TGD, trunk_v_TGD, branch_k_TMGD, branch_v_TMGD, seq_lens, *, scale=None):
    """Attention of one pass of training-time test (contract A.2).

    Row i sees trunk rows j <= i of its own sequence and its own M branch keys, in one softmax. M may be 0.
    Shapes: q [T, H, D], trunk k and v [T, G, D], branch k and v [T, M, G, D]. Returns [T, H, D].
    """
    _check_rows(seq_lens, q_THD, trunk_k_TGD, trunk_v_TGD, branch_k_TMGD, branch_v_TMGD)
    outputs = []
    for start, length in _segments(seq_lens):
        for row in range(start, start + length):
            keys = torch.cat([trunk_k_TGD[start : row + 1], branch_k_TMGD[row]])
            values = torch.cat([trunk_v_TGD[start : row + 1], branch_v_TMGD[row]])
            visible = torch.ones(1, len(keys), dtype=torch.bool, device=q_THD.device)
            outputs.append(attend(q_THD[row : row + 1], keys, values, visible, scale))
    return torch.cat(outputs)


def dense_block_attention(
    q_NWHD, trunk_k_TGD, trunk_v_TGD, block_k_NWGD, block_v_NWGD, anchor_sequences, anchor_positions, seq_lens,
    *, window=None, causal_in_block=False, scale=None,
):  # fmt: skip
    """Attention of a block drafter (contract B.2 and B.3).

    Slot j of block n stands at position p_n + j of sequence anchor_sequences[n], p_n = anchor_positions[n] (local to
    the sequence). It sees the trunk rows of that sequence strictly before p_n and the rows of its own block (those at
    or before it if causal_in_block). A window w keeps, of trunk and block alike, the keys with
    0 <= q_pos - k_pos < w (causal_in_block) or |q_pos - k_pos| < w (otherwise).
    Shapes: q [N, W, H, D], block k and v [N, W, G, D], trunk k and v [T, G, D]. Returns [N, W, H, D].
    """
    _check_rows(seq_lens, trunk_k_TGD, trunk_v_TGD)
    segments = _segments(seq_lens)
    outputs = []
    for n in range(len(q_NWHD)):
        start, length = segments[int(anchor_sequences[n])]
        anchor = int(anchor_positions[n])
        if not 0 <= anchor < length:
            raise ValueError(f"anchor position is {anchor} in a sequence of {length} rows; use 0 to {length - 1}")
        trunk = slice(start, start + anchor)
        keys = torch.cat([trunk_k_TGD[trunk], block_k_NWGD[n]])
        values = torch.cat([trunk_v_TGD[trunk], block_v_NWGD[n]])
        q_position = anchor + torch.arange(q_NWHD.shape[1], device=q_NWHD.device)
        k_position = torch.cat([torch.arange(anchor, device=q_NWHD.device), q_position])
        distance = q_position[:, None] - k_position[None, :]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if causal_in_block:
            visible = visible & (distance >= 0)
        if window is not None:
            visible = visible & (distance.abs() < window)
        outputs.append(attend(q_NWHD[n], keys, values, visible, scale))
    return torch.stack(outputs) if outputs else q_NWHD.clone()


def _segments(seq_lens):
    """(first row, number of rows) of each sequence of the pack."""
    segments, start = [], 0
    for length in seq_lens:
        segments.append((start, int(length)))
        start += int(length)
    return segments


def _check_rows(seq_lens, *tensors):
    total = sum(int(length) for length in seq_lens)
    for tensor in tensors:
        if len(tensor) != total:
            raise ValueError(f"a tensor has {len(tensor)} rows but seq_lens sums to {total}; pass unpadded rows")
