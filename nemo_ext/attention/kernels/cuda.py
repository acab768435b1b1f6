"""Flash attention on CUDA for packed rows: the `flash-attn` package where installed, else PyTorch's own operators.

Both take a pack of rectangles (`varlen`), grouped-query heads, and a window counted from the bottom right corner of
each rectangle. Only bfloat16 and float16, head dims that are multiples of 8.

Legend: T query rows, S key rows, N query heads, M key heads, D head dim, R rows of one call.
"""

import importlib.util
from typing import NamedTuple

import torch

from nemo_ext.attention.spans import Spans

RECTANGLES = 1024  # of one call: the kernels' backward takes scratch for 128 rows of each


class _Call(NamedTuple):
    """What a varlen kernel is told about one call."""

    q_rows: slice | torch.Tensor
    k_rows: slice | torch.Tensor
    q_starts: torch.Tensor  # int32, first row of each rectangle in the call, and the end
    k_starts: torch.Tensor
    q_longest: int
    k_longest: int
    causal: bool
    left: int | None  # keys visible before and after a query's own column, counted from the bottom right corner
    right: int | None


def forward(q_TND, k_SMD, v_SMD, spans: Spans, scale):
    """See `kernels.Kernel.forward`."""
    _check(q_TND)
    run = _flash_attn_forward if importlib.util.find_spec("flash_attn") else _aten_forward
    for call in _calls(spans, k_SMD):
        q_RND, k_RMD, v_RMD = q_TND[call.q_rows], k_SMD[call.k_rows], v_SMD[call.k_rows]
        out_RND, lse_NR = run(q_RND, k_RMD, v_RMD, call, scale)
        if lse_NR.shape != (q_RND.shape[1], q_RND.shape[0]):
            raise RuntimeError(
                f"the CUDA flash attention kernel returned an lse of shape {tuple(lse_NR.shape)}, not heads x rows "
                f"{(q_RND.shape[1], q_RND.shape[0])}; install flash-attn >= 2.7 or torch >= 2.9"
            )
        yield call.q_rows, out_RND, lse_NR.T


def backward(dout_TND, q_TND, k_SMD, v_SMD, out_TND, lse_TN, spans: Spans, scale):
    """See `kernels.Kernel.backward`."""
    _check(q_TND)
    run = _flash_attn_backward if importlib.util.find_spec("flash_attn") else _aten_backward
    for call in _calls(spans, k_SMD):
        # The kernels want the last dimension contiguous, and the gradient of `out` may be an expanded scalar.
        dout_RND, q_RND, out_RND = dout_TND[call.q_rows].contiguous(), q_TND[call.q_rows], out_TND[call.q_rows]
        k_RMD, v_RMD = k_SMD[call.k_rows], v_SMD[call.k_rows]
        lse_NR = lse_TN[call.q_rows].T.contiguous()
        dq_RND, dk_RMD, dv_RMD = run(dout_RND, q_RND, k_RMD, v_RMD, out_RND, lse_NR, call, scale)
        yield call.q_rows, dq_RND, call.k_rows, dk_RMD, dv_RMD


def _calls(spans: Spans, k_SMD: torch.Tensor):
    """Rectangles that share a window, counted from their bottom right corner, share a call: at most `RECTANGLES`, and with
    copies of no more key rows than there are, unless one alone has more."""
    if spans.causal or spans.full:
        for part in _parts(zip(*spans[:4], strict=True), len(k_SMD)):
            yield _call(part, k_SMD.device, spans.causal, None, None)
        return
    corners: dict[int, list[tuple[int, int, int, int]]] = {}
    for rectangle in zip(*spans[:4], strict=True):
        corners.setdefault(rectangle[3] - rectangle[1], []).append(rectangle)
    for corner, rectangles in corners.items():
        left = None if spans.low is None else corner - spans.low
        right = None if spans.high is None else spans.high - corner
        for part in _parts(rectangles, len(k_SMD)):
            yield _call(part, k_SMD.device, False, left, right)


def _parts(rectangles, key_rows: int):
    part, rows = [], 0
    for rectangle in rectangles:
        if part and (len(part) == RECTANGLES or rows + rectangle[3] > key_rows):
            yield Spans(*zip(*part, strict=True))
            part, rows = [], 0
        part.append(rectangle)
        rows += rectangle[3]
    yield Spans(*zip(*part, strict=True))


def _call(spans: Spans, device, causal, left, right) -> _Call:
    q_rows, q_starts = _packed(spans.q_starts, spans.q_lens, device)
    k_rows, k_starts = _packed(spans.k_starts, spans.k_lens, device)
    return _Call(q_rows, k_rows, q_starts, k_starts, max(spans.q_lens), max(spans.k_lens), causal, left, right)


def _packed(starts, lens, device) -> tuple[slice | torch.Tensor, torch.Tensor]:
    """The rows of all rectangles one after another, a slice where they lie so, and where each begins."""
    lens_B = torch.tensor(lens)
    ends_B = lens_B.cumsum(0)
    begins = torch.cat([ends_B.new_zeros(1), ends_B]).to(torch.int32).to(device)
    if all(b == a + length for a, length, b in zip(starts, lens, starts[1:], strict=False)):
        return slice(starts[0], starts[-1] + lens[-1]), begins
    shift_B = torch.tensor(starts) - (ends_B - lens_B)
    rows = torch.arange(int(ends_B[-1])) + torch.repeat_interleave(shift_B, lens_B)
    return rows.to(device), begins


def _flash_attn_forward(q_RND, k_RMD, v_RMD, call: _Call, scale):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    out_RND, lse_NR, *_ = _flash_attn_varlen_forward(
        q_RND, k_RMD, v_RMD, call.q_starts, call.k_starts, call.q_longest, call.k_longest,
        dropout_p=0.0, softmax_scale=scale, causal=call.causal,
        window_size_left=_or_unbounded(call.left), window_size_right=_or_unbounded(call.right),
    )  # fmt: skip
    return out_RND, lse_NR


def _flash_attn_backward(dout_RND, q_RND, k_RMD, v_RMD, out_RND, lse_NR, call: _Call, scale):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    grads = torch.empty_like(q_RND), torch.empty_like(k_RMD), torch.empty_like(v_RMD)
    _flash_attn_varlen_backward(
        dout_RND, q_RND, k_RMD, v_RMD, out_RND, lse_NR, *grads,
        call.q_starts, call.k_starts, call.q_longest, call.k_longest,
        dropout_p=0.0, softmax_scale=scale, causal=call.causal,
        window_size_left=_or_unbounded(call.left), window_size_right=_or_unbounded(call.right),
        softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return grads


def _aten_forward(q_RND, k_RMD, v_RMD, call: _Call, scale):
    out_RND, lse_NR, *_ = torch.ops.aten._flash_attention_forward(
        q_RND, k_RMD, v_RMD, call.q_starts, call.k_starts, call.q_longest, call.k_longest, 0.0, call.causal, False,
        scale=scale, window_size_left=call.left, window_size_right=call.right,
    )  # fmt: skip
    return out_RND, lse_NR


def _aten_backward(dout_RND, q_RND, k_RMD, v_RMD, out_RND, lse_NR, call: _Call, scale):
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_RND.device)  # the random state, read with dropout only
    return torch.ops.aten._flash_attention_backward(
        dout_RND, q_RND, k_RMD, v_RMD, out_RND, lse_NR, call.q_starts, call.k_starts, call.q_longest, call.k_longest,
        0.0, call.causal, no_dropout, no_dropout,
        scale=scale, window_size_left=call.left, window_size_right=call.right,
    )  # fmt: skip


def _or_unbounded(window: int | None) -> int:
    return -1 if window is None else window


def _check(q_TND: torch.Tensor) -> None:
    if q_TND.shape[-1] % 8:
        raise ValueError(f"the head dim is {q_TND.shape[-1]}; flash attention on CUDA takes multiples of 8")
