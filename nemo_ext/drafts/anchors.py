"""Which rows blocks start from, and what their slots learn (contract B.4, B.5).

Anchors are drawn by hashing (seed, step, sample, position), so that they are the same on every rank of any layout, in any
pack and any order of samples. Everything here is index arithmetic over the whole padded pack, which every rank knows.

Legend: R rows of the full padded pack, T rows of this rank, A anchors of the whole pack, B those of this rank, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_ext.layout import PackedLayout

_WORD = 2**64


@dataclass(frozen=True)
class Blocks:
    """The blocks of one rank, by (sequence, position). Row numbers are of the full padded pack.

    Slot `s` of the block at position `p` predicts the token at `p + 1 + s`. Where `mask_BS` is False, `label_rows_BS` and
    `previous_rows_BS` are valid rows without meaning.
    """

    local_rows_B: torch.Tensor  # place of the anchor among this rank's rows
    sequences_B: torch.Tensor
    positions_B: torch.Tensor
    mask_BS: torch.Tensor  # bool: the slot's token is trained on, and so are those of all slots before it
    label_rows_BS: torch.Tensor  # of the predicted token
    previous_rows_BS: torch.Tensor  # of the token before it


def draw_anchors(
    layout: PackedLayout,
    label_mask_R: torch.Tensor,
    sample_ids: Sequence[int],
    *,
    anchors_per_seq: int,
    seed: int,
    step: int,
) -> torch.Tensor:
    """Rows of the pack, ascending, long `[A]`: of each sequence `anchors_per_seq` of the rows whose next token is trained
    on, or all of them if there are fewer. Every such subset is equally likely.

    Args:
        label_mask_R: 1 on tokens that are trained on.
        sample_ids: one number per sequence, which no other sequence of the step has.
        seed, step: of the run, and the number of its optimizer step.
    """
    if len(sample_ids) != len(layout.seq_lens):
        raise ValueError(f"there are {len(sample_ids)} sample_ids for {len(layout.seq_lens)} sequences; give one each")
    device = label_mask_R.device
    candidates_C = supervised_next(layout, label_mask_R).nonzero().flatten()
    sequences_C = layout.sequences_of(candidates_C)
    keys = [_signed(_mix(_mix(_mix(seed) + step) + sample)) for sample in sample_ids]
    key_N = torch.tensor(keys, dtype=torch.long, device=device)
    key_C = _mix_rows(key_N[sequences_C] + layout.positions_of(candidates_C))
    by_key_C = torch.argsort(key_C, stable=True)
    order_C = by_key_C[torch.argsort(sequences_C[by_key_C], stable=True)]
    # The candidates of a sequence are neighbours now, in random order: take the first ones.
    counts_N = torch.bincount(sequences_C, minlength=len(layout.seq_lens))
    first_N = counts_N.cumsum(0) - counts_N
    place_C = torch.arange(len(order_C), device=device) - first_N[sequences_C[order_C]]
    return candidates_C[order_C[place_C < anchors_per_seq]].sort().values


def supervised_next(layout: PackedLayout, label_mask_R: torch.Tensor) -> torch.Tensor:
    """Bool `[R]`: the row's next token is in its sequence and trained on."""
    rows_R = torch.arange(layout.total_rows, device=label_mask_R.device)
    has_next_R = layout.positions_of((rows_R + 1).clamp(max=max(layout.total_rows - 1, 0))) > 0
    # Position 0 begins another sequence and -1 is padding; the pack's last row was clamped onto itself.
    has_next_R &= rows_R + 1 < layout.total_rows
    return has_next_R & label_mask_R.roll(-1).bool()


def blocks_of(layout: PackedLayout, label_mask_R: torch.Tensor, anchors_A: torch.Tensor, slots: int) -> Blocks:
    """The blocks whose anchor is a row of this rank. A block ends at the first token that is not trained on, and at its
    sequence's end."""
    device = label_mask_R.device
    place_R = torch.full((layout.total_rows,), -1, dtype=torch.long, device=device)
    place_R[layout.local_rows] = torch.arange(layout.local_total, device=device)
    rows_B = anchors_A[place_R[anchors_A] >= 0]
    next_R = supervised_next(layout, label_mask_R)
    previous_BS = rows_B[:, None] + torch.arange(slots, device=device)
    inside_BS = previous_BS < layout.total_rows
    previous_BS = torch.where(inside_BS, previous_BS, rows_B[:, None])
    # A slot's row must supervise its next token; within one prefix the rows are of one sequence, since each has a next.
    mask_BS = (next_R[previous_BS] & inside_BS).cumprod(dim=1).bool()
    previous_BS = torch.where(mask_BS, previous_BS, rows_B[:, None])
    return Blocks(
        local_rows_B=place_R[rows_B],
        sequences_B=layout.sequences_of(rows_B),
        positions_B=layout.positions_of(rows_B),
        mask_BS=mask_BS,
        label_rows_BS=previous_BS + mask_BS.long(),
        previous_rows_BS=previous_BS,
    )


def _mix(value: int) -> int:
    """A 64-bit hash (the finalizer of SplitMix64, Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) % _WORD
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % _WORD
    return value ^ (value >> 31)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def _mix_rows(value_C: torch.Tensor) -> torch.Tensor:
    """`_mix` of each entry, as signed words: torch wraps around as 64-bit words do."""

    def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    value_C = value_C + _signed(0x9E3779B97F4A7C15)
    value_C = (value_C ^ shifted(value_C, 30)) * _signed(0xBF58476D1CE4E5B9)
    value_C = (value_C ^ shifted(value_C, 27)) * _signed(0x94D049BB133111EB)
    return value_C ^ shifted(value_C, 31)
