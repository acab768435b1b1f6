"""Self-checks of the dense references: hand-computed values and the cases in which two patterns coincide."""

import math

import pytest
import torch

from tests.reference.dense import attend, dense_block_attention, dense_causal_attention, dense_ttt_attention

torch.set_num_threads(1)

SEQ_LENS = [5, 1, 7]
T, H, G, D = sum(SEQ_LENS), 4, 2, 6


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def qkv():
    return normal(T, H, D, seed=1), normal(T, G, D, seed=2), normal(T, G, D, seed=3)


def column(*values):
    """One head of size one."""
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1)


def test_two_tokens_by_hand():
    q, k, v = column(1.0, 2.0), column(0.5, 1.0), column(10.0, 20.0)
    out = dense_causal_attention(q, k, v, [2])
    e1, e2 = math.exp(2.0 * 0.5), math.exp(2.0 * 1.0)
    assert out.flatten().tolist() == pytest.approx([10.0, (10 * e1 + 20 * e2) / (e1 + e2)], abs=1e-12)


def test_ttt_two_tokens_by_hand():
    q, k, v = column(1.0, 2.0), column(0.5, 1.0), column(10.0, 20.0)
    branch_k, branch_v = column(3.0, -1.0).unsqueeze(1), column(30.0, 40.0).unsqueeze(1)
    out = dense_ttt_attention(q, k, v, branch_k, branch_v, [2])
    first = (math.exp(0.5) * 10 + math.exp(3) * 30) / (math.exp(0.5) + math.exp(3))
    second = (math.exp(1) * 10 + math.exp(2) * 20 + math.exp(-2) * 40) / (math.exp(1) + math.exp(2) + math.exp(-2))
    assert out.flatten().tolist() == pytest.approx([first, second], abs=1e-12)


@pytest.mark.parametrize("window", [None, 1, 2, 4])
def test_weights_sum_to_one(qkv, window):
    q, k, v = qkv
    ones = torch.ones_like(v)
    torch.testing.assert_close(dense_causal_attention(q, k, ones, SEQ_LENS, window=window), torch.ones_like(q))
    torch.testing.assert_close(
        dense_block_attention(q[:6].reshape(2, 3, H, D), k, ones, k[:6].reshape(2, 3, G, D),
                              ones[:6].reshape(2, 3, G, D), [0, 2], [4, 3], SEQ_LENS, window=window),
        torch.ones(2, 3, H, D, dtype=torch.float64),
    )  # fmt: skip


def test_window_one_copies_the_own_value(qkv):
    q, k, v = qkv
    out = dense_causal_attention(q, k, v, SEQ_LENS, window=1)
    torch.testing.assert_close(out, v.repeat_interleave(H // G, dim=1))


def test_sequences_do_not_mix(qkv):
    q, k, v = qkv
    packed = dense_causal_attention(q, k, v, SEQ_LENS)
    alone = [
        dense_causal_attention(a, b, c, [len(a)]) for a, b, c in zip(*(x.split(SEQ_LENS) for x in qkv), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone))


def test_ttt_without_branch_is_causal(qkv):
    q, k, v = qkv
    empty = q.new_zeros(T, 0, G, D)
    torch.testing.assert_close(
        dense_ttt_attention(q, k, v, empty, empty, SEQ_LENS), dense_causal_attention(q, k, v, SEQ_LENS)
    )


def test_ttt_equals_the_two_part_form(qkv):
    """Contract A.4: the trunk's output and log-sum-exp merged with the branch scores."""
    q, k, v = qkv
    branch_k, branch_v = normal(T, 3, G, D, seed=4), normal(T, 3, G, D, seed=5)
    out = dense_ttt_attention(q, k, v, branch_k, branch_v, SEQ_LENS)
    trunk = dense_causal_attention(q, k, v, SEQ_LENS)
    row, start, head = 9, 6, 3
    lse = torch.logsumexp(k[start : row + 1, head // 2] @ q[row, head] * D**-0.5, dim=0)
    scores = branch_k[row, :, head // 2] @ q[row, head] * D**-0.5
    joint = torch.logsumexp(torch.cat([lse[None], scores]), dim=0)
    merged = (lse - joint).exp() * trunk[row, head] + (scores - joint).exp() @ branch_v[row, :, head // 2]
    torch.testing.assert_close(out[row, head], merged)


@pytest.mark.parametrize("window", [None, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_block_of_one_row_is_a_row_of_causal_attention(qkv, window, causal):
    q, k, v = qkv
    sequences, positions, rows = [0, 0, 1, 2, 2], [0, 3, 0, 1, 6], [0, 3, 5, 7, 12]
    out = dense_block_attention(
        q[rows, None], k, v, k[rows, None], v[rows, None], sequences, positions, SEQ_LENS,
        window=window, causal_in_block=causal,
    )  # fmt: skip
    torch.testing.assert_close(out[:, 0], dense_causal_attention(q, k, v, SEQ_LENS, window=window)[rows])


@pytest.mark.parametrize("window", [None, 2, 4])
def test_causal_block_of_trunk_rows_is_causal_attention(qkv, window):
    q, k, v = qkv
    rows = torch.tensor([[2, 3, 4], [8, 9, 10]])
    out = dense_block_attention(
        q[rows], k, v, k[rows], v[rows], [0, 2], [2, 2], SEQ_LENS, window=window, causal_in_block=True
    )
    torch.testing.assert_close(out, dense_causal_attention(q, k, v, SEQ_LENS, window=window)[rows])


def test_block_window_by_hand():
    """Equal keys, so that each visible value weighs the same: anchor 3, window 2, three slots, values 1, 2, 4, ..."""
    zeros, trunk_v = torch.zeros(4, 1, 1).double(), column(1.0, 2.0, 4.0, 8.0)
    block_v = column(16.0, 32.0, 64.0).unsqueeze(0)
    arguments = (zeros[None, :3], zeros, trunk_v, zeros[None, :3], block_v, [0], [3], [4])
    symmetric = dense_block_attention(*arguments, window=2).flatten()
    assert symmetric.tolist() == pytest.approx([(4 + 16 + 32) / 3, (16 + 32 + 64) / 3, (32 + 64) / 2])
    causal = dense_block_attention(*arguments, window=2, causal_in_block=True).flatten()
    assert causal.tolist() == pytest.approx([(4 + 16) / 2, (16 + 32) / 2, (32 + 64) / 2])
    full = dense_block_attention(*arguments).flatten()
    assert full.tolist() == pytest.approx([(1 + 2 + 4 + 16 + 32 + 64) / 6] * 3)


def test_a_row_without_keys_is_refused():
    with pytest.raises(ValueError, match="sees no key"):
        attend(column(1.0), column(1.0), column(1.0), torch.zeros(1, 1, dtype=torch.bool))
