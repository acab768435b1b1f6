"""The attention functions on one rank: refusals, recomputation, and Megatron's core attention."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_ext.attention import block_attention, causal_attention, gather_trunk, resident_bytes, ttt_attention
from nemo_ext.attention.core_attention import PackedCoreAttention, PackedParams
from nemo_ext.attention.plans import BlockPlan
from nemo_ext.layout import PackedLayout
from tests.reference.dense import dense_causal_attention

LAYOUT = PackedLayout([5, 0, 2], pad_multiple=4)  # 8 + 0 + 4 rows


def rows(*shape, total=12):
    return torch.randn(total, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def unpadded(x):
    return x[LAYOUT.local_positions >= 0]


def test_padding_gives_zeros_and_takes_nothing():
    q, k, v, branch = (x.requires_grad_() for x in (rows(2, 4), rows(1, 4), rows(1, 4), rows(2, 1, 4)))
    out = ttt_attention(q, k, v, branch, branch, layout=LAYOUT, group=None)
    padding = LAYOUT.local_positions < 0
    assert not out[padding].any()
    out.sum().backward()
    for x in (q, k, v, branch):
        assert not x.grad[padding].any()
        assert x.grad[~padding].abs().sum(dim=tuple(range(1, x.dim()))).gt(0).all()


@pytest.mark.parametrize("name", ["causal", "ttt", "block"])
def test_empty_packs(name):
    layout = PackedLayout([0])
    q, k = (torch.zeros(0, heads, 4, requires_grad=True) for heads in (2, 1))
    none = torch.zeros(0, dtype=torch.long)
    if name == "causal":
        out = causal_attention(q, k, k, layout=layout, group=None)
    elif name == "ttt":
        branch = torch.zeros(0, 2, 1, 4)
        out = ttt_attention(q, k, k, branch, branch, layout=layout, group=None)
    else:
        block_q, block_k = torch.zeros(0, 3, 2, 4), torch.zeros(0, 3, 1, 4)
        anchors = dict(anchor_sequences=none, anchor_positions=none)
        out = block_attention(block_q, k, k, block_k, block_k, **anchors, layout=layout, group=None)
    out.sum().backward()
    assert out.numel() == 0


def test_no_blocks_still_reach_the_trunk():
    """A rank without anchors takes part in the backward: its trunk has a gradient, of zeros."""
    k = rows(1, 4).requires_grad_()
    none, block = torch.zeros(0, dtype=torch.long), torch.zeros(0, 3, 1, 4, dtype=torch.float64)
    out = block_attention(
        block, k, k, block, block, anchor_sequences=none, anchor_positions=none, layout=LAYOUT, group=None
    )
    out.sum().backward()
    assert k.grad.shape == k.shape and not k.grad.any()


@pytest.mark.parametrize("resident", [False, True])
def test_recomputation_changes_nothing(resident):
    """Three passes, each recomputed in the backward, give bitwise the gradients of three that are kept."""

    def passes(recompute):
        q, k, v, branch = (x.requires_grad_() for x in (rows(3, 2, 4), rows(1, 4), rows(1, 4), rows(2, 1, 4)))

        def run(fn, *args):
            return checkpoint(fn, *args, use_reentrant=False) if recompute else fn(*args)

        def first(q_TND, k, v):
            trunk = gather_trunk(k * 2, v, layout=LAYOUT, group=None) if resident else None
            return one(q_TND, k * 2, v, branch[:, :0], trunk), trunk

        def one(q_TND, k, v, branch, trunk):
            return ttt_attention(q_TND, k, v, branch, branch, layout=LAYOUT, group=None, resident=trunk)

        out, trunk = run(first, q[:, 0], k, v)
        outs = [out] + [run(one, q[:, n] + out, k * 2, v, branch[:, :n], trunk) for n in (1, 2)]
        sum(out.square().sum() for out in outs).backward()
        return [x.grad for x in (q, k, v, branch)]

    for kept, recomputed in zip(passes(False), passes(True), strict=True):
        assert torch.equal(kept, recomputed)


def test_resident_and_ring_agree_bitwise_on_one_pass():
    def gradients(resident):
        q, k, v = (x.requires_grad_() for x in (rows(2, 4), rows(1, 4), rows(1, 4)))
        none = rows(0, 1, 4)
        trunk = gather_trunk(k, v, layout=LAYOUT, group=None) if resident else None
        ttt_attention(q, k, v, none, none, layout=LAYOUT, group=None, resident=trunk).square().sum().backward()
        return q.grad, k.grad, v.grad

    for ours, theirs in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(ours, theirs)


def test_resident_gradients_of_bfloat16_are_summed_wide():
    """512 passes of a gradient of 1 + 2^-9 each: bfloat16 sums would stall at a power of two."""
    layout = PackedLayout([1])
    k, v = (torch.ones(2, 1, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    none = torch.zeros(2, 0, 1, 1, dtype=torch.bfloat16)
    trunk = gather_trunk(k, v, layout=layout, group=None)
    q = torch.ones(2, 1, 1, dtype=torch.bfloat16)
    outs = [ttt_attention(q, k, v, none, none, layout=layout, group=None, resident=trunk) for _ in range(515)]
    torch.stack(outs).float().sum().backward()
    assert v.grad[0].item() == torch.tensor(515.0).bfloat16().item()


def test_resident_bytes():
    assert resident_bytes(PackedLayout([6], cp_size=2, cp_rank=0), 2, 16, torch.bfloat16, layers=3) == (
        2 * 8 * 2 * 16 * 3 * (2 + 4)
    )


def blocks(**changes):
    settings = dict(
        q_BWND=torch.zeros(1, 3, 2, 4), trunk_k_TMD=torch.zeros(12, 1, 4), trunk_v_TMD=torch.zeros(12, 1, 4),
        block_k_BWMD=torch.zeros(1, 3, 1, 4), block_v_BWMD=torch.zeros(1, 3, 1, 4),
        anchor_sequences=torch.tensor([0]), anchor_positions=torch.tensor([1]), layout=LAYOUT, group=None,
    )  # fmt: skip
    return block_attention(**settings | changes)


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: causal_attention(rows(2, 4), rows(1, 4), rows(1, 4, total=9), layout=LAYOUT, group=None),
         "v has 9 rows; the layout has 12 on this rank"),
        (lambda: causal_attention(rows(3, 4), rows(2, 4), rows(2, 4), layout=LAYOUT, group=None),
         "3 query heads cannot share 2 key heads; use a multiple"),
        (lambda: causal_attention(rows(2, 4), rows(1, 4), rows(1, 4), layout=LAYOUT, group=None, window=0),
         "window is 0; use 1 or more, or None for no window"),
        (lambda: causal_attention(*[rows(1, 4)] * 3, layout=PackedLayout([24], cp_size=2), group=None),
         "the layout is for 2 context-parallel ranks but group is None; pass the group"),
        (lambda: blocks(window=0), "window is 0; use 1 or more, or None for no window"),
        (lambda: blocks(anchor_positions=torch.tensor([5])),
         "block 0 has its anchor at sequence 0, position 5; the pack's lengths are (5, 0, 2)"),
        (lambda: blocks(anchor_positions=torch.tensor([1, 2])),
         "q has 1 blocks, block_k 1, block_v 1, anchors 1 and 2; they must be as many"),
        (lambda: blocks(trunk_k_TMD=torch.zeros(12, 3, 4)),
         "2 query heads cannot share 3 key heads; use a multiple"),
    ],
)  # fmt: skip
def test_refusals(call, told):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == told


def test_anchor_of_another_rank():
    layout = PackedLayout([8], cp_size=2, cp_rank=0)  # rows 0, 1 and 6, 7
    with pytest.raises(ValueError, match="position 2, a row that rank 0 of 2 does not hold"):
        BlockPlan(layout, [0], [2], 3, None)


@pytest.fixture(scope="module")
def one_rank_groups():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ProcessGroupCollection(tp=dist.group.WORLD, cp=dist.group.WORLD)
    dist.destroy_process_group()


def core_attention(groups, attn_mask_type=AttnMaskType.causal, attention_type="self", **config):
    config = TransformerConfig(
        **dict(num_layers=4, hidden_size=16, num_attention_heads=4, attention_dropout=0.0) | config
    )
    return PackedCoreAttention(config, 2, attn_mask_type, attention_type, pg_collection=groups)


@pytest.mark.parametrize(
    "config, window, scale",
    [
        ({}, None, 0.5),
        ({"window_size": (2, 0)}, 3, 0.5),
        ({"window_size": (2, 0), "window_attn_skip_freq": 2}, None, 0.5),
        ({"apply_query_key_layer_scaling": True}, None, 0.25),
    ],
)
def test_core_attention(one_rank_groups, config, window, scale):
    q, k, v = rows(4, 4), rows(2, 4), rows(2, 4)
    out = core_attention(one_rank_groups, **config)(q, k, v, None, packed_seq_params=PackedParams.of(LAYOUT))
    expected = dense_causal_attention(*map(unpadded, (q, k, v)), LAYOUT.seq_lens, window=window, scale=scale)
    torch.testing.assert_close(unpadded(out), expected.flatten(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; packed attention needs 0"),
        ({"softmax_type": "off-by-one"}, "softmax_type is 'off-by-one'; packed attention needs 'vanilla'"),
        ({"window_size": (2, 2)}, r"window_size is \(2, 2\); packed attention needs \(rows before, 0\)"),
        ({"attention_type": "cross"}, "attention_type is 'cross' and attn_mask_type 'causal'"),
        ({"attn_mask_type": AttnMaskType.padding}, "attention_type is 'self' and attn_mask_type 'padding'"),
    ],
)
def test_core_attention_refuses(one_rank_groups, changes, told):
    with pytest.raises(ValueError, match=told):
        core_attention(one_rank_groups, **changes)


def test_core_attention_needs_the_layout(one_rank_groups):
    attention = core_attention(one_rank_groups)
    with pytest.raises(ValueError, match=r"packed_seq_params is PackedSeqParams; pass PackedParams.of\(layout\)"):
        attention(rows(4, 4), rows(4, 4), rows(4, 4), None, packed_seq_params=PackedSeqParams(qkv_format="thd"))
    with pytest.raises(ValueError, match="attention_mask or attention_bias is given"):
        mask = torch.ones(1)
        attention(rows(4, 4), rows(4, 4), rows(4, 4), mask, packed_seq_params=PackedParams.of(LAYOUT))
