"""Which rows blocks start from, and what their slots learn: by hand, against the reference, and the same for any layout."""

import itertools

import pytest
import torch

from nemo_ext.drafts.anchors import Blocks, blocks_of, draw_anchors, supervised_next
from nemo_ext.layout import PackedLayout
from tests.reference.block_losses import block_targets

LENGTHS = [7, 1, 0, 13, 5, 2]
IDS = [40, 41, 7, 9, 2**63 + 5, 3]


def masks(lengths, seed=0, trained=0.7):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(n, generator=generator) < trained).double() for n in lengths]


def draw(layout, mask_R, ids=IDS, *, anchors_per_seq=3, seed=1, step=2):
    return draw_anchors(layout, mask_R, ids, anchors_per_seq=anchors_per_seq, seed=seed, step=step)


def anchors(layout, mask_R, ids=IDS, **options):
    """(sample, position) of each anchor."""
    rows_A = draw(layout, mask_R, ids, **options)
    pairs = zip(layout.sequences_of(rows_A).tolist(), layout.positions_of(rows_A).tolist(), strict=True)
    return [(ids[sequence], position) for sequence, position in pairs]


def test_anchors_are_rows_whose_next_token_is_trained_on():
    layout, mask = PackedLayout(LENGTHS, pad_multiple=4), masks(LENGTHS)
    every = anchors(layout, layout.pack(mask), anchors_per_seq=100)
    by_hand = [(IDS[i], p) for i, m in enumerate(mask) for p in range(len(m) - 1) if m[p + 1]]
    assert every == by_hand
    assert supervised_next(layout, layout.pack(mask)).sum() == len(by_hand)


def test_as_many_are_drawn_as_asked_for_without_repeats():
    layout, mask_R = PackedLayout(LENGTHS), PackedLayout(LENGTHS).pack(masks(LENGTHS))
    every = anchors(layout, mask_R, anchors_per_seq=100)
    for wanted in (1, 3):
        some = anchors(layout, mask_R, anchors_per_seq=wanted)
        assert len(set(some)) == len(some) and set(some) <= set(every)
        for sample in IDS:
            have = sum(1 for s, _ in every if s == sample)
            assert sum(1 for s, _ in some if s == sample) == min(wanted, have)


def test_a_draw_hangs_on_seed_step_sample_and_position_alone():
    """Another pack, order, padding or context-parallel shard draws the same; seed, step or sample id draws others."""
    layout = PackedLayout(LENGTHS)
    mask = masks(LENGTHS, trained=1.0)
    drawn = set(anchors(layout, layout.pack(mask)))
    order = [3, 0, 5, 4, 2, 1]
    other = PackedLayout([LENGTHS[i] for i in order], pad_multiple=8)
    assert set(anchors(other, other.pack([mask[i] for i in order]), [IDS[i] for i in order])) == drawn
    parts = set()
    for i, length in enumerate(LENGTHS):
        alone = PackedLayout([length])
        parts |= set(anchors(alone, alone.pack([mask[i]]), [IDS[i]]))
    assert parts == drawn
    for change in ({"seed": 2}, {"step": 3}, {"ids": [i + 1 for i in IDS]}):
        changed = anchors(layout, layout.pack(mask), **change)
        positions = {p for _, p in changed if p > 4}, {p for _, p in drawn if p > 4}
        assert positions[0] != positions[1] or [p for _, p in changed] != [p for _, p in sorted(drawn)]


def test_all_subsets_are_equally_likely():
    """Two of four rows over 6000 steps: each of the six pairs 1000 times, within five standard deviations."""
    layout = PackedLayout([5])
    mask_R, counts = torch.ones(6), {}
    for step in range(6000):
        pair = tuple(p for _, p in anchors(layout, mask_R, [17], anchors_per_seq=2, step=step))
        counts[pair] = counts.get(pair, 0) + 1
    assert set(counts) == set(itertools.combinations(range(4), 2))
    assert all(abs(n - 1000) < 5 * 29 for n in counts.values()), counts


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_ranks_share_the_blocks_of_one_rank(cp_size):
    whole = PackedLayout(LENGTHS, cp_size=1, pad_multiple=8)
    rows_A = draw(whole, whole.pack(masks(LENGTHS)))
    owned = []
    for rank in range(cp_size):
        layout = PackedLayout(LENGTHS, cp_size=cp_size, cp_rank=rank, pad_multiple=8)
        mask_R = layout.pack(masks(LENGTHS))
        assert torch.equal(draw(layout, mask_R), rows_A)
        blocks = blocks_of(layout, mask_R, rows_A, 3)
        assert torch.equal(layout.local_sequences[blocks.local_rows_B], blocks.sequences_B)
        assert torch.equal(layout.local_positions[blocks.local_rows_B], blocks.positions_B)
        owned += layout.local_rows[blocks.local_rows_B].tolist()
    assert sorted(owned) == rows_A.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_slots_are_those_of_the_reference(seed):
    layout, mask = PackedLayout(LENGTHS, pad_multiple=4), masks(LENGTHS, seed, trained=0.8)
    mask_R = layout.pack(mask)
    tokens = [torch.arange(100 * i, 100 * i + n) for i, n in enumerate(LENGTHS)]
    tokens_R = layout.pack(tokens, fill=-1)
    blocks = blocks_of(layout, mask_R, draw(layout, mask_R, anchors_per_seq=4), 5)
    want = block_targets(torch.cat(tokens), torch.cat(mask), LENGTHS, blocks.sequences_B, blocks.positions_B, 5)
    assert torch.equal(blocks.mask_BS, want.mask) and want.mask.any() and not want.mask.all()
    assert torch.equal(tokens_R[blocks.label_rows_BS][want.mask], want.label_ids[want.mask])
    assert torch.equal(tokens_R[blocks.previous_rows_BS][want.mask], want.previous_ids[want.mask])
    assert (tokens_R[blocks.previous_rows_BS] >= 0).all() and (tokens_R[blocks.label_rows_BS] >= 0).all()


def test_a_block_ends_at_a_hole_and_at_the_end_of_its_sequence():
    layout = PackedLayout([6, 4])
    mask_R = layout.pack([torch.tensor([0.0, 1, 1, 0, 1, 1]), torch.ones(4)])
    blocks: Blocks = blocks_of(layout, mask_R, torch.tensor([0, 3, 8]), 4)
    assert blocks.mask_BS.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert blocks.positions_B.tolist() == [0, 3, 2]


@pytest.mark.parametrize("lengths", [[], [0], [1, 1]])
def test_packs_without_a_trained_row_have_no_blocks(lengths):
    layout = PackedLayout(lengths)
    mask_R = torch.ones(layout.total_rows)
    rows_A = draw(layout, mask_R, list(range(len(lengths))))
    blocks = blocks_of(layout, mask_R, rows_A, 3)
    assert rows_A.shape == (0,) and blocks.mask_BS.shape == (0, 3)


def test_a_missing_sample_id_is_named():
    with pytest.raises(ValueError, match="there are 1 sample_ids for 2 sequences"):
        draw(PackedLayout([2, 2]), torch.ones(4), [1])
