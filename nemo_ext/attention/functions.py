"""The three attentions, as functions of one rank's rows.

All are differentiable in every tensor, in float64, float32 and bfloat16, and exact: the result and every gradient are
those of one softmax over all visible keys, however the pack is sharded. Padding rows give zeros and take no gradient.

Legend: T this rank's rows, N query heads, M key heads (N a multiple of M), D head dim, P branch keys per row,
B this rank's blocks, W slots of a block.
"""

import torch
import torch.distributed as dist

from nemo_ext.attention.branch import Branch, NoBranch, OwnBlock, OwnKeys
from nemo_ext.attention.comm import ring_comm
from nemo_ext.attention.kernels import kernel_for
from nemo_ext.attention.plans import BlockPlan, CausalPlan, Plan, WindowedCausalPlan, in_block_calls
from nemo_ext.attention.resident import ResidentAttention, ResidentTrunk
from nemo_ext.attention.ring import RingAttention
from nemo_ext.layout import PackedLayout


def causal_attention(
    q_TND: torch.Tensor,
    k_TMD: torch.Tensor,
    v_TMD: torch.Tensor,
    *,
    layout: PackedLayout,
    group: dist.ProcessGroup | None,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention within each sequence of a pack; `[T, N, D]`.

    Args:
        window: row `i` sees rows `j` with `0 <= i - j < window`; None is all `j <= i`.
        group: the context-parallel group of the layout; None for one rank.
        scale: of the scores; `D ** -0.5` if None.

    Raises:
        ValueError: for shapes that do not fit the layout or each other.
        LayoutMismatch: if the group's ranks were given different packs.
        RingError: if a neighbour fails, naming rank and step.
    """
    _check_rows(layout, q=q_TND, k=k_TMD, v=v_TMD)
    plan = CausalPlan(layout) if window is None else WindowedCausalPlan(layout, window)
    return _attend(q_TND, k_TMD, v_TMD, None, plan, NoBranch(), layout, group, scale)


def ttt_attention(
    q_TND: torch.Tensor,
    trunk_k_TMD: torch.Tensor,
    trunk_v_TMD: torch.Tensor,
    branch_k_TPMD: torch.Tensor,
    branch_v_TPMD: torch.Tensor,
    *,
    layout: PackedLayout,
    group: dist.ProcessGroup | None,
    scale: float | None = None,
    resident: ResidentTrunk | None = None,
) -> torch.Tensor:
    """One pass of training-time test (contract A.2): row `i` sees trunk rows `j <= i` of its sequence and its own P
    branch keys (of passes 2 to d; P may be 0). `[T, N, D]`.

    Args:
        resident: `gather_trunk` of the same trunk keys and values: they are read from there and nothing moves, and their
            gradient goes home once for all passes. None sends them round the ring in this pass.
        Others, and errors, as `causal_attention`.
    """
    _check_rows(
        layout, q=q_TND, trunk_k=trunk_k_TMD, trunk_v=trunk_v_TMD, branch_k=branch_k_TPMD, branch_v=branch_v_TPMD
    )
    branch = (branch_k_TPMD, branch_v_TPMD)
    out_TND = _attend(
        q_TND, trunk_k_TMD, trunk_v_TMD, branch, CausalPlan(layout), OwnKeys(), layout, group, scale, resident
    )
    # The plan leaves padding rows out, their own keys do not.
    padding_T = layout.local_positions < 0
    return out_TND.masked_fill(padding_T[:, None, None], 0.0) if padding_T.any() else out_TND


def block_attention(
    q_BWND: torch.Tensor,
    trunk_k_TMD: torch.Tensor,
    trunk_v_TMD: torch.Tensor,
    block_k_BWMD: torch.Tensor,
    block_v_BWMD: torch.Tensor,
    *,
    anchor_sequences: torch.Tensor,
    anchor_positions: torch.Tensor,
    layout: PackedLayout,
    group: dist.ProcessGroup | None,
    window: int | None = None,
    causal_in_block: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of a block drafter (contract B.2, B.3): slot `j` of a block at anchor `p` stands at `p + j` and sees
    the trunk rows of its sequence strictly before `p` and the slots of its own block. `[B, W, N, D]`.

    Args:
        anchor_sequences, anchor_positions: long `[B]`, the row that each block starts from; this rank holds it. B may
            be 0 on some ranks.
        window: keys at distance `window` or more from the slot, trunk and block alike, are not seen; None sees all.
        causal_in_block: a slot does not see later slots.
        Others, and errors, as `causal_attention`; ValueError also for an anchor that is no row of this rank.
    """
    _check_rows(layout, trunk_k=trunk_k_TMD, trunk_v=trunk_v_TMD)
    blocks, width = q_BWND.shape[:2]
    if not blocks == len(block_k_BWMD) == len(block_v_BWMD) == len(anchor_sequences) == len(anchor_positions):
        raise ValueError(
            f"q has {blocks} blocks, block_k {len(block_k_BWMD)}, block_v {len(block_v_BWMD)}, anchors "
            f"{len(anchor_sequences)} and {len(anchor_positions)}; they must be as many"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; use 1 or more, or None for no window")
    order_B = _order(anchor_sequences, anchor_positions)
    q_BWND, block_k_BWMD, block_v_BWMD = (
        x if order_B is None else x[order_B] for x in (q_BWND, block_k_BWMD, block_v_BWMD)
    )
    if order_B is not None:
        anchor_sequences, anchor_positions = anchor_sequences[order_B], anchor_positions[order_B]
    plan = BlockPlan(layout, anchor_sequences.tolist(), anchor_positions.tolist(), width, window)
    own = OwnBlock(in_block_calls(blocks, width, window, causal_in_block), kernel_for(q_BWND))
    branch = (block_k_BWMD.flatten(0, 1), block_v_BWMD.flatten(0, 1))
    out = _attend(q_BWND.flatten(0, 1), trunk_k_TMD, trunk_v_TMD, branch, plan, own, layout, group, scale)
    out_BWND = out.unflatten(0, (blocks, width))
    return out_BWND if order_B is None else out_BWND[torch.argsort(order_B)]


def _attend(q, k, v, branch_kv, plan: Plan, branch: Branch, layout, group, scale, resident=None):
    heads, key_heads = q.shape[1], k.shape[1]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"{heads} query heads cannot share {key_heads} key heads; use a multiple")
    branch_k, branch_v = branch_kv if branch_kv is not None else (k[:0], v[:0])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if resident is not None:
        return ResidentAttention.apply(
            q, resident.handle, branch_k, branch_v, resident, plan, branch, kernel_for(q), scale
        )
    comm = ring_comm(layout, group)
    return RingAttention.apply(q, k, v, branch_k, branch_v, plan, branch, kernel_for(q), comm, scale)


def _order(sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
    """The order of blocks by (sequence, position); None if they are in it already."""
    key = torch.stack([sequences, positions])
    by_position = torch.argsort(key[1], stable=True)
    order = by_position[torch.argsort(key[0][by_position], stable=True)]
    return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order


def _check_rows(layout: PackedLayout, **tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        if len(x) != layout.local_total:
            raise ValueError(f"{name} has {len(x)} rows; the layout has {layout.local_total} on this rank")
