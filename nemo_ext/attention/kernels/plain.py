"""Attention in plain tensor operations, tile by tile: slow, for any device and dtype, and easy to check.

Legend: T query rows, S key rows, N query heads, M key heads, G query heads per key head, D head dim, Q and K rows of a
tile.
"""

import torch

from nemo_ext.attention.spans import Spans

TILE = 512  # rows of a tile's queries and keys


def forward(q_TND, k_SMD, v_SMD, spans: Spans, scale):
    """See `kernels.Kernel.forward`. The softmax of each query tile over all its keys, with a running maximum."""
    for q_rows, tiles in _tiles(spans):
        q_QND = _wide(q_TND[q_rows])
        out_QND = torch.zeros_like(q_QND)
        lse_QN = q_QND.new_full(q_QND.shape[:2], float("-inf"))
        for k_rows, visible_QK in tiles:
            scores_QNK = _scores(q_QND, _wide(k_SMD[k_rows]), visible_QK, scale)
            total_QN = torch.logaddexp(lse_QN, scores_QNK.logsumexp(-1))
            weights_QNK = (scores_QNK - _finite(total_QN)[..., None]).exp()
            out_QND = out_QND * (lse_QN - _finite(total_QN)).exp()[..., None]
            out_QND += _grouped("qmgk,kmd->qmgd", weights_QNK, _wide(v_SMD[k_rows]))
            lse_QN = total_QN
        yield q_rows, out_QND.to(q_TND.dtype), lse_QN


def backward(dout_TND, q_TND, k_SMD, v_SMD, out_TND, lse_TN, spans: Spans, scale):
    """See `kernels.Kernel.backward`; contract A.4."""
    for q_rows, tiles in _tiles(spans):
        q_QND, dout_QND, lse_QN = _wide(q_TND[q_rows]), _wide(dout_TND[q_rows]), lse_TN[q_rows]
        delta_QN = (dout_QND * _wide(out_TND[q_rows])).sum(-1)
        for k_rows, visible_QK in tiles:
            k_KMD, v_KMD = _wide(k_SMD[k_rows]), _wide(v_SMD[k_rows])
            weights_QNK = (_scores(q_QND, k_KMD, visible_QK, scale) - lse_QN[..., None]).exp()
            dweights_QNK = _grouped("qmgd,kmd->qmgk", dout_QND, v_KMD)
            dscores_QNK = weights_QNK * (dweights_QNK - delta_QN[..., None]) * scale
            dq_QND = _grouped("qmgk,kmd->qmgd", dscores_QNK, k_KMD)
            M = k_KMD.shape[1]
            dk_KMD = torch.einsum("qmgk,qmgd->kmd", dscores_QNK.unflatten(1, (M, -1)), q_QND.unflatten(1, (M, -1)))
            dv_KMD = torch.einsum("qmgk,qmgd->kmd", weights_QNK.unflatten(1, (M, -1)), dout_QND.unflatten(1, (M, -1)))
            yield q_rows, dq_QND, k_rows, dk_KMD, dv_KMD


def _tiles(spans: Spans):
    """Yields the query rows of each tile, and of each of its key tiles the rows and the visible pairs."""
    low = float("-inf") if spans.low is None else spans.low
    high = float("inf") if spans.high is None else spans.high
    for q_start, q_len, k_start, k_len in zip(spans.q_starts, spans.q_lens, spans.k_starts, spans.k_lens, strict=True):
        for q in range(0, q_len, TILE):
            q_end = min(q + TILE, q_len)
            tiles = []
            for k in range(0, k_len, TILE):
                k_end = min(k + TILE, k_len)
                distance_QK = torch.arange(k, k_end) - torch.arange(q, q_end)[:, None]
                visible_QK = (distance_QK >= low) & (distance_QK <= high)
                if visible_QK.any():
                    tiles.append((slice(k_start + k, k_start + k_end), visible_QK))
            yield slice(q_start + q, q_start + q_end), tiles


def _scores(q_QND, k_KMD, visible_QK, scale):
    scores_QNK = _grouped("qmgd,kmd->qmgk", q_QND, k_KMD) * scale
    return scores_QNK.masked_fill(~visible_QK[:, None].to(q_QND.device), float("-inf"))


def _grouped(equation: str, x_QN: torch.Tensor, y_KMD: torch.Tensor) -> torch.Tensor:
    """An einsum whose first argument's heads are in groups of one key head each."""
    return torch.einsum(equation, x_QN.unflatten(1, (y_KMD.shape[1], -1)), y_KMD).flatten(1, 2)


def _finite(lse_QN):
    """0 where nothing has been seen: what is subtracted from -inf must be finite."""
    return lse_QN.masked_fill(lse_QN == float("-inf"), 0.0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
