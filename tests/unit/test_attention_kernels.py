"""Every kernel against one softmax over the same visible pairs, with the merged out and lse of a larger softmax.

Legend: T query rows, S key rows, N query heads, M key heads, D head dim.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_ext.attention.kernels import cpu, cuda, plain
from nemo_ext.attention.merge import Merged, Summed
from nemo_ext.attention.spans import Spans, collect_bands, visible_pairs

T, S, N, M, D = 90, 120, 4, 2, 8
TRUNK = 100  # the keys that rectangles are drawn from; every query sees the rest as its branch
SETTINGS = settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@st.composite
def rectangles(draw):
    """Rectangles with disjoint query rows, as `collect_bands` takes them: bounds may cut off everything."""
    low = draw(st.one_of(st.none(), st.integers(-80, 30)))
    high = draw(st.one_of(st.none(), st.integers(-30, 80)))
    if low is not None and high is not None and low > high:
        low, high = high, low
    edges = sorted(draw(st.lists(st.integers(0, T), min_size=2, max_size=8, unique=True)))
    found = []
    for q_start, q_end in zip(edges, edges[1:], strict=False):
        k_start = draw(st.integers(0, TRUNK - 1))
        square = draw(st.booleans())
        k_len = min(q_end - q_start, TRUNK - k_start) if square else draw(st.integers(0, TRUNK - k_start))
        found.append((q_start, q_end - q_start, k_start, k_len, low, high))
    return found


def visible(found) -> torch.Tensor:
    seen_TS = torch.zeros(T, S, dtype=torch.bool)
    for q_start, q_len, k_start, k_len, low, high in found:
        for i in range(q_len):
            first = 0 if low is None else max(i + low, 0)
            last = k_len if high is None else min(i + high + 1, k_len)
            seen_TS[q_start + i, k_start + first : k_start + max(last, first)] = True
    return seen_TS


def inputs():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return normal(T, N, D), normal(S, M, D), normal(S, M, D), normal(T, N, D)


def softmax_attention(q_TND, k_SMD, v_SMD, seen_TS):
    k_SND, v_SND = k_SMD.repeat_interleave(N // M, 1), v_SMD.repeat_interleave(N // M, 1)
    scores_TNS = torch.einsum("tnd,snd->tns", q_TND, k_SND) * 0.4
    scores_TNS = scores_TNS.masked_fill(~seen_TS[:, None], float("-inf"))
    return torch.einsum("tns,snd->tnd", scores_TNS.softmax(-1), v_SND), scores_TNS.logsumexp(-1)


def emulate_forward(q_RND, k_RMD, v_RMD, call, scale):
    """A varlen flash kernel's contract: windows count from the bottom right corner; lse is heads x rows."""
    out_RND, lse_NR = torch.zeros_like(q_RND), q_RND.new_zeros(N, len(q_RND))
    for q_rows, k_rows, low, high in _rectangles_of(call):
        spans = Spans((0,), (q_rows.stop - q_rows.start,), (0,), (k_rows.stop - k_rows.start,), low, high)
        for rows, out, lse in plain.forward(q_RND[q_rows], k_RMD[k_rows], v_RMD[k_rows], spans, scale):
            out_RND[q_rows][rows], lse_NR.T[q_rows][rows] = out, lse
    return out_RND, lse_NR


def emulate_backward(dout_RND, q_RND, k_RMD, v_RMD, out_RND, lse_NR, call, scale):
    assert lse_NR.is_contiguous()
    dq, dk, dv = torch.zeros_like(q_RND), torch.zeros_like(k_RMD), torch.zeros_like(v_RMD)
    for q_rows, k_rows, low, high in _rectangles_of(call):
        spans = Spans((0,), (q_rows.stop - q_rows.start,), (0,), (k_rows.stop - k_rows.start,), low, high)
        tensors = dout_RND[q_rows], q_RND[q_rows], k_RMD[k_rows], v_RMD[k_rows], out_RND[q_rows], lse_NR.T[q_rows]
        for q_part, dq_part, k_part, dk_part, dv_part in plain.backward(*tensors, spans, scale):
            dq[q_rows][q_part] += dq_part
            dk[k_rows][k_part] += dk_part
            dv[k_rows][k_part] += dv_part
    return dq, dk, dv


def _rectangles_of(call):
    q_starts, k_starts = call.q_starts.tolist(), call.k_starts.tolist()
    for q, q_end, k, k_end in zip(q_starts, q_starts[1:], k_starts, k_starts[1:], strict=False):
        assert q_end - q <= call.q_longest and k_end - k <= call.k_longest
        corner = (k_end - k) - (q_end - q)
        right = 0 if call.causal else call.right
        # A flash kernel takes a negative window for none at all.
        assert call.left is None or call.left >= 0
        assert right is None or right >= 0
        low = None if call.left is None else corner - call.left
        yield slice(q, q_end), slice(k, k_end), low, None if right is None else corner + right


@pytest.fixture(params=["cpu", "cuda", "plain"])
def kernel(request, monkeypatch):
    monkeypatch.setattr(cuda, "_aten_forward", emulate_forward)
    monkeypatch.setattr(cuda, "_aten_backward", emulate_backward)
    # So small that every way of cutting a call is taken.
    for module, name, rows in ((plain, "TILE", 25), (cpu, "TILE", 40), (cpu, "BAND", 8), (cuda, "RECTANGLES", 2)):
        monkeypatch.setattr(module, name, rows)
    return {"cpu": cpu, "cuda": cuda, "plain": plain}[request.param]


def test_kernel_is_the_exact_part_of_a_softmax(kernel):
    q, k, v, dout = inputs()

    @SETTINGS
    @given(rectangles())
    def check(found):
        trunk_TS = visible(found)
        both_TS = trunk_TS.clone()
        both_TS[:, TRUNK:] = True
        rows = trunk_TS.any(1)
        calls = collect_bands(found)
        assert sum(spans.pairs() for spans in calls) == int(trunk_TS.sum())

        merged = Merged(q)
        for spans in calls:
            for partial in kernel.forward(q, k, v, spans, 0.4):
                merged.add(*partial)
        out, lse = merged.result()
        expected_out, expected_lse = softmax_attention(q, k, v, trunk_TS)
        torch.testing.assert_close(out[rows], expected_out[rows], rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)
        assert not out[~rows].any()

        # Gradients of the softmax over trunk and branch: the trunk's part from this kernel, the branch's from `plain`.
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = softmax_attention(*leaves, both_TS)
        full = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        sums = [Summed(x) for x in (q, k, v)]

        def add(kernel, calls):
            for spans in calls:
                for q_rows, dq, k_rows, dk, dv in kernel.backward(
                    dout, q, k, v, out.detach(), lse.detach(), spans, 0.4
                ):
                    sums[0].add(q_rows, dq)
                    sums[1].add(k_rows, dk)
                    sums[2].add(k_rows, dv)

        add(kernel, calls)
        add(plain, [Spans((0,), (T,), (TRUNK,), (S - TRUNK,))])
        for ours, expected in zip(sums, full, strict=True):
            torch.testing.assert_close(ours.result(), expected, rtol=0, atol=1e-10)

    check()


@SETTINGS
@given(st.integers(0, 12), st.integers(0, 12), *[st.one_of(st.none(), st.integers(-15, 15))] * 2)
def test_visible_pairs_are_counted(q_len, k_len, low, high):
    if low is not None and high is not None and low > high:
        low, high = high, low
    expected = sum(
        (low is None or i + low <= j) and (high is None or j <= i + high) for i in range(q_len) for j in range(k_len)
    )
    assert visible_pairs(q_len, k_len, low, high) == expected


def test_cuda_refuses_odd_head_dims():
    x = torch.zeros(4, 1, 12)
    with pytest.raises(ValueError, match="the head dim is 12; flash attention on CUDA takes multiples of 8"):
        next(cuda.forward(x, x, x, Spans((0,), (4,), (0,), (4,), high=0), 1.0))


def test_cuda_refuses_another_lse_layout(monkeypatch):
    monkeypatch.setattr(cuda, "_aten_forward", lambda q, *_: (q, q.new_zeros(1, q.shape[1], len(q))))
    x = torch.zeros(4, 1, 8)
    with pytest.raises(RuntimeError, match=r"returned an lse of shape \(1, 1, 4\), not heads x rows \(1, 4\)"):
        next(cuda.forward(x, x, x, Spans((0,), (4,), (0,), (4,), high=0), 1.0))


def test_a_cuda_call_copies_no_more_keys_than_there_are():
    """Windows of neighbouring blocks share most of their keys."""
    blocks, window = 400, 64
    spans = Spans(range(0, 4 * blocks, 4), [4] * blocks, range(blocks), [window] * blocks)
    calls = list(cuda._calls(spans, torch.zeros(blocks + window, 1, 8)))
    assert sum(len(call.k_starts) - 1 for call in calls) == blocks
    assert max(int(call.k_starts[-1]) for call in calls) <= blocks + window
    many = Spans(range(3000), [1] * 3000, range(3000), [1] * 3000)
    assert [len(call.k_starts) - 1 for call in cuda._calls(many, torch.zeros(3000, 1, 8))] == [1024, 1024, 952]
