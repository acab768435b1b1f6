"""Random cases of the three attentions: drawn by hypothesis, computed by ranks, and by the dense reference.

Legend: T unpadded rows of the pack, R rows of the padded pack, N query heads, G key heads, D head dim, M branch keys,
B blocks, W slots.
"""

import math
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from nemo_ext.attention import block_attention, causal_attention, gather_trunk, ttt_attention
from nemo_ext.layout import PackedLayout
from tests.reference.dense import dense_block_attention, dense_causal_attention, dense_ttt_attention


@dataclass(frozen=True)
class Case:
    """One pack, the shape of its heads, and what its attention sees; tensors follow from `seed`."""

    seq_lens: tuple[int, ...]
    pad_multiple: int
    key_heads: int
    heads_per_key: int
    head_dim: int
    scale: float | None
    seed: int
    window: int | None = None
    passes: int = 1  # of training-time test
    resident: bool = False
    anchors: tuple[tuple[int, int], ...] = ()  # (sequence, position), in any order, also twice
    width: int = 1
    causal_in_block: bool = False
    dtype: torch.dtype = torch.float64

    def layout(self, cp_size: int, cp_rank: int) -> PackedLayout:
        return PackedLayout(self.seq_lens, cp_size=cp_size, cp_rank=cp_rank, pad_multiple=self.pad_multiple)


# Long sequences are rare, so that many packs fit a run; empty and one-token ones are not.
lengths = st.one_of(st.sampled_from([0, 1, 2]), st.integers(1, 40), st.integers(1, 40), st.integers(1, 200))
windows = st.one_of(st.none(), st.integers(1, 8), st.integers(1, 220))


@st.composite
def packs(draw, **fields):
    """A `Case` with what every function has; `fields` are strategies of the others."""
    seq_lens = draw(st.lists(lengths, min_size=1, max_size=8).filter(any).map(tuple))
    return Case(
        seq_lens=seq_lens,
        pad_multiple=draw(st.sampled_from([1, 1, 3, 8])),
        key_heads=draw(st.integers(1, 3)),
        heads_per_key=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 4, 6, 16])),
        scale=draw(st.sampled_from([None, 0.3])),
        seed=draw(st.integers(0, 2**31)),
        **{name: draw(strategy) for name, strategy in fields.items()},
    )


@st.composite
def block_packs(draw):
    """A `Case` with blocks at random anchors, the first and last row of a sequence among them."""
    case = draw(packs(window=windows, width=st.integers(1, 6), causal_in_block=st.booleans()))
    return with_anchors(case, draw(st.integers(0, 40)))


def with_anchors(case: Case, count: int) -> Case:
    """The case with this many anchors anywhere, in no order; every fourth is the first or last row of a sequence."""
    choose = random.Random(case.seed)
    rows = [(number, length) for number, length in enumerate(case.seq_lens) if length]
    anchors = []
    for n in range(count):
        number, length = choose.choice(rows)
        anchors.append((number, choose.choice([0, length - 1]) if n % 4 == 0 else choose.randrange(length)))
    return replace(case, anchors=tuple(anchors))


def tensors_of(case: Case) -> SimpleNamespace:
    """All tensors of a case, unpadded, the same in every process."""
    generator = torch.Generator().manual_seed(case.seed)
    T, B, G, D = sum(case.seq_lens), len(case.anchors), case.key_heads, case.head_dim
    N = G * case.heads_per_key

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    # One tensor cut by heads, as a fused projection gives them: rows are not contiguous.
    fused = normal(T, N + 2 * G, D)
    q_PTND = normal(case.passes, T, N, D)
    q_PTND[0] = fused[:, :N]
    return SimpleNamespace(
        q_PTND=q_PTND, fused=fused, k=fused[:, N : N + G], v=fused[:, N + G :],
        branch_k=normal(T, case.passes - 1, G, D), branch_v=normal(T, case.passes - 1, G, D),
        dout_PTND=normal(case.passes, T, N, D),
        q_BWND=normal(B, case.width, N, D), block_k=normal(B, case.width, G, D), block_v=normal(B, case.width, G, D),
        dout_BWND=normal(B, case.width, N, D),
    )  # fmt: skip


def _padded(case: Case, layout: PackedLayout, x_T: torch.Tensor) -> torch.Tensor:
    """This rank's rows of an unpadded tensor; padding holds large numbers that must not matter."""
    return layout.shard(layout.pack(list(x_T.split(case.seq_lens)), fill=77.0))


def _leaf(x: torch.Tensor) -> torch.Tensor:
    """Requires grad, and keeps the rows of a fused projection apart."""
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_()


def _gradients(outs, douts, leaves) -> list[torch.Tensor]:
    grads = torch.autograd.grad(outs, leaves, douts, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)]


def ring_causal(rank: int, world_size: int, case: Case):
    """`(out, dq, dk, dv)`, this rank's rows."""
    layout, t = case.layout(world_size, rank), tensors_of(case)
    fused = _padded(case, layout, t.fused).requires_grad_()
    N, G = t.q_PTND.shape[2], case.key_heads
    q, k, v = fused[:, :N], fused[:, N : N + G], fused[:, N + G :]
    out = causal_attention(q, k, v, layout=layout, group=_group(), window=case.window, scale=case.scale)
    dfused = _gradients([out], [_padded(case, layout, t.dout_PTND[0])], [fused])[0]
    return [out.detach(), dfused[:, :N], dfused[:, N : N + G], dfused[:, N + G :]]


def dense_causal(case: Case):
    t = tensors_of(case)
    q, k, v = _leaf(t.q_PTND[0]), _leaf(t.k), _leaf(t.v)
    out = dense_causal_attention(q, k, v, case.seq_lens, window=case.window, scale=case.scale)
    return [out.detach(), *_gradients([out], [t.dout_PTND[0]], [q, k, v])]


def ring_ttt(rank: int, world_size: int, case: Case):
    """`(out of all passes, dq of all passes, dk, dv, dbranch_k, dbranch_v)`, this rank's rows first."""
    layout, t = case.layout(world_size, rank), tensors_of(case)
    q = _leaf(torch.stack([_padded(case, layout, x) for x in t.q_PTND]))
    k, v, branch_k, branch_v = (_leaf(_padded(case, layout, x)) for x in (t.k, t.v, t.branch_k, t.branch_v))
    group = _group()
    resident = gather_trunk(k, v, layout=layout, group=group) if case.resident else None
    outs = [
        ttt_attention(
            q[n], k, v, branch_k[:, :n], branch_v[:, :n],
            layout=layout, group=group, scale=case.scale, resident=resident,
        )
        for n in range(case.passes)
    ]  # fmt: skip
    douts = [_padded(case, layout, x) for x in t.dout_PTND]
    out, dq, *rest = torch.stack(outs).detach(), *_gradients(outs, douts, [q, k, v, branch_k, branch_v])
    return [out.movedim(0, 1), dq.movedim(0, 1), *rest]


def dense_ttt(case: Case):
    t = tensors_of(case)
    q, k, v, branch_k, branch_v = map(_leaf, (t.q_PTND, t.k, t.v, t.branch_k, t.branch_v))
    outs = [
        dense_ttt_attention(q[n], k, v, branch_k[:, :n], branch_v[:, :n], case.seq_lens, scale=case.scale)
        for n in range(case.passes)
    ]
    out, dq, *rest = torch.stack(outs).detach(), *_gradients(outs, list(t.dout_PTND), [q, k, v, branch_k, branch_v])
    return [out.movedim(0, 1), dq.movedim(0, 1), *rest]


def ring_block(rank: int, world_size: int, case: Case):
    """`(dk, dv)` of this rank's trunk rows, `(numbers of its blocks, out, dq, dblock_k, dblock_v)`."""
    layout, t = case.layout(world_size, rank), tensors_of(case)
    own = own_blocks(case, layout)
    k, v = (_leaf(_padded(case, layout, x)) for x in (t.k, t.v))
    q, block_k, block_v = (_leaf(x[own]) for x in (t.q_BWND, t.block_k, t.block_v))
    anchors_B2 = torch.tensor(case.anchors, dtype=torch.long).view(-1, 2)[own]
    out = block_attention(
        q, k, v, block_k, block_v, anchor_sequences=anchors_B2[:, 0], anchor_positions=anchors_B2[:, 1],
        layout=layout, group=_group(), window=case.window, causal_in_block=case.causal_in_block, scale=case.scale,
    )  # fmt: skip
    dk, dv, *rest = _gradients([out], [t.dout_BWND[own]], [k, v, q, block_k, block_v])
    return [dk, dv], [own, out.detach(), *rest]


def dense_block(case: Case):
    """`(dk, dv)`, `(out, dq, dblock_k, dblock_v)`."""
    t = tensors_of(case)
    k, v, q, block_k, block_v = map(_leaf, (t.k, t.v, t.q_BWND, t.block_k, t.block_v))
    anchors_B2 = torch.tensor(case.anchors, dtype=torch.long).view(-1, 2)
    out = dense_block_attention(
        q, k, v, block_k, block_v, anchors_B2[:, 0], anchors_B2[:, 1], case.seq_lens,
        window=case.window, causal_in_block=case.causal_in_block, scale=case.scale,
    )  # fmt: skip
    dk, dv, *rest = _gradients([out], [t.dout_BWND], [k, v, q, block_k, block_v])
    return [dk, dv], [out.detach(), *rest]


def own_blocks(case: Case, layout: PackedLayout) -> torch.Tensor:
    """Numbers of the blocks whose anchor row the layout's rank holds."""
    held = set(zip(layout.local_sequences.tolist(), layout.local_positions.tolist(), strict=True))
    return torch.tensor([n for n, anchor in enumerate(case.anchors) if anchor in held], dtype=torch.long)


def _group():
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def joined(case: Case, per_rank: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Unpadded tensors from every rank's rows. Asserts that padding rows are zero."""
    unit = math.lcm(2 * len(per_rank), case.pad_multiple)
    tensors = []
    for shards in zip(*per_rank, strict=True):
        sequences, at = [], 0
        for length in case.seq_lens:
            chunk = -(-length // unit) * unit // (2 * len(per_rank))
            first = [x[at : at + chunk] for x in shards]
            second = [x[at + chunk : at + 2 * chunk] for x in shards]
            padded = torch.cat(first + second[::-1])
            assert not padded[length:].any(), "something flows through padding rows"
            sequences.append(padded[:length])
            at += 2 * chunk
        tensors.append(torch.cat(sequences))
    return tensors


def joined_blocks(case: Case, per_rank: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Tensors of all blocks from `[numbers of the rank's blocks, tensors...]`. Asserts that each block has one owner."""
    numbers = torch.cat([own for own, *_ in per_rank])
    assert sorted(numbers.tolist()) == list(range(len(case.anchors)))
    order = torch.argsort(numbers)
    return [torch.cat(shards)[order] for shards in list(zip(*per_rank, strict=True))[1:]]


def worst_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference of any tensor, over the tensor's largest entry where that is above 1."""
    worst = 0.0
    for ours, reference in zip(found, expected, strict=True):
        assert ours.shape == reference.shape
        if reference.numel():
            size = max(1.0, float(reference.abs().max()))
            worst = max(worst, float((ours.double() - reference.double()).abs().max()) / size)
    return worst
