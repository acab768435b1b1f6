"""PyTorch's own flash attention on the CPU, for packed rows.

The operator takes equal sizes, no window, and a mask only as a tensor. So rectangles of one size go into one call;
causal ones are filled up to a few sizes (rows after a sequence's end are seen by nobody before it); and a band is cut
along its edges into parts without a mask and corners whose masks are at most `BAND x 2 BAND`.

Legend: T query rows, S key rows, N query heads, M key heads, D head dim, B rectangles of a call, Q and K their rows.
"""

from collections.abc import Iterator

import torch

from nemo_ext.attention.kernels.rows import RowBatch
from nemo_ext.attention.spans import Spans, collect_bands

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

BAND = 128  # rows of a band's part
TILE = 2048  # rows of queries and of keys of one call: bounds what a call allocates and copies


def forward(q_TND, k_SMD, v_SMD, spans: Spans, scale):
    """See `kernels.Kernel.forward`."""
    for q_rows, k_rows, causal, mask_QK in _calls(spans, q_TND, None):
        q_BNQD, k_BMKD, v_BMKD = _heads_first(q_rows.read(q_TND), k_rows.read(k_SMD), k_rows.read(v_SMD))
        out_BNQD, lse_BNQ = _flash(q_BNQD, k_BMKD, v_BMKD, 0.0, causal, attn_mask=mask_QK, scale=scale)
        yield q_rows.rows, q_rows.real(out_BNQD.transpose(1, 2)), q_rows.real(lse_BNQ.transpose(1, 2))


def backward(dout_TND, q_TND, k_SMD, v_SMD, out_TND, lse_TN, spans: Spans, scale):
    """See `kernels.Kernel.backward`."""
    for q_rows, k_rows, causal, mask_QK in _calls(spans, q_TND, TILE):
        dout_BQND = q_rows.read(dout_TND)
        if q_rows.padded:  # repeated rows count once
            dout_BQND = dout_BQND.masked_fill(~q_rows.real_BS[..., None, None], 0.0)
        tensors = (dout_BQND, q_rows.read(q_TND), k_rows.read(k_SMD), k_rows.read(v_SMD), q_rows.read(out_TND))
        lse_BNQ = q_rows.read(lse_TN).transpose(1, 2)
        grads = _flash_backward(*_heads_first(*tensors), lse_BNQ, 0.0, causal, attn_mask=mask_QK, scale=scale)
        dq_BQND, dk_BKMD, dv_BKMD = (x.transpose(1, 2) for x in grads)
        yield q_rows.rows, q_rows.real(dq_BQND), k_rows.rows, k_rows.real(dk_BKMD), k_rows.real(dv_BKMD)


def _heads_first(*tensors):
    return (x.transpose(1, 2) for x in tensors)


def _calls(spans: Spans, q_TND, k_tile: int | None) -> Iterator[tuple[RowBatch, RowBatch, bool, torch.Tensor | None]]:
    """`(query rows, key rows, causal, mask)` of each call of the operator."""
    if not spans.causal and not spans.full:
        for part in _without_wide_masks(spans):
            yield from _batches(part, q_TND)
    elif spans.full:
        yield from _batches(_tiled(spans, k_tile), q_TND)
    else:
        yield from _batches(spans, q_TND)


def _batches(spans: Spans, q_TND):
    """Rectangles of one size together, as long as no more than a tile of keys is copied at once."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for number, (q_len, k_len) in enumerate(zip(spans.q_lens, spans.k_lens, strict=True)):
        size = (_filled(q_len),) * 2 if spans.causal else (q_len, k_len)
        sizes.setdefault(size, []).append(number)
    for (q_size, k_size), numbers in sizes.items():
        # Alone in its size, or all of equal length: nothing to fill up.
        if len(set(spans.q_lens[n] for n in numbers)) == 1:
            q_size, k_size = spans.q_lens[numbers[0]], spans.k_lens[numbers[0]]
        mask_QK = None if spans.causal or spans.full else _mask(q_size, k_size, spans.low, spans.high, q_TND)
        together = max(TILE // k_size, 1)
        for at in range(0, len(numbers), together):
            some = numbers[at : at + together]
            q_rows, k_rows = (
                RowBatch([starts[n] for n in some], [lens[n] for n in some], size, q_TND.device)
                for starts, lens, size in (
                    (spans.q_starts, spans.q_lens, q_size),
                    (spans.k_starts, spans.k_lens, k_size),
                )
            )
            yield q_rows, k_rows, spans.causal, mask_QK


def _filled(length: int) -> int:
    """The size that a causal rectangle is filled up to: few sizes, little waste."""
    unit = 16 if length <= 64 else 32 if length <= 256 else 1
    return -(-length // unit) * unit


def _tiled(spans: Spans, k_tile: int | None) -> Spans:
    """The same full rectangles, none larger than a tile. Parts of one rectangle share query rows where keys are cut."""
    cut = []
    for q_start, q_len, k_start, k_len in zip(*spans[:4], strict=True):
        for q in range(0, q_len, TILE):
            for k in range(0, k_len, k_tile or k_len):
                cut.append((q_start + q, min(TILE, q_len - q), k_start + k, min(k_tile or k_len, k_len - k)))
    return Spans(*zip(*cut, strict=True))


def _without_wide_masks(spans: Spans) -> list[Spans]:
    """A band as calls whose masked rectangles are narrow: per `BAND` queries the keys that all of them see, and what
    sticks out before and after. Query rows repeat from call to call, not within one."""
    before, common, after = [], [], []
    low, high = spans.low, spans.high
    for q_start, q_len, k_start, k_len in zip(*spans[:4], strict=True):
        for q in range(0, q_len, BAND):
            q_end = min(q + BAND, q_len)
            all_from = 0 if low is None else min(max(q_end - 1 + low, 0), k_len)
            all_to = k_len if high is None else min(max(q + high + 1, 0), k_len)
            if all_from >= all_to:
                parts = [(before, 0, k_len)]
            else:
                parts = [(before, 0, all_from), (common, all_from, all_to), (after, all_to, k_len)]
            for part, k, k_end in parts:
                bounds = (None if low is None else low + q - k, None if high is None else high + q - k)
                part.append((q_start + q, q_end - q, k_start + k, k_end - k, *bounds))
    return [call for part in (before, common, after) for call in collect_bands(part)]


def _mask(q_size: int, k_size: int, low: int | None, high: int | None, like: torch.Tensor) -> torch.Tensor:
    """0 where visible, -inf elsewhere."""
    distance_QK = torch.arange(k_size)[None] - torch.arange(q_size)[:, None]
    hidden_QK = torch.zeros(q_size, k_size, dtype=torch.bool)
    if low is not None:
        hidden_QK |= distance_QK < low
    if high is not None:
        hidden_QK |= distance_QK > high
    return torch.zeros(q_size, k_size, dtype=like.dtype).masked_fill(hidden_QK, float("-inf"))
