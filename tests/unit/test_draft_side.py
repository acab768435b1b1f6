"""The draft's side of a step, as far as it needs no draft."""

import pytest
import torch

from nemo_ext.config import DraftConfig
from nemo_ext.cotrain.draft_side import Eagle3Side
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.layout import PackedLayout
from tests.fixtures_models import policy_config


class Pack:
    def __init__(self, layout):
        self.layout, self.tokens_R = layout, torch.arange(layout.total_rows)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("lens", [[1] * 12, [3, 40, 1, 17], [64], [16, 16, 16, 16], []], ids=str)
def test_the_slots_of_the_embedding_hold_every_microbatch(lens, cp_size):
    side = Eagle3Side(DraftConfig(ttt_steps=3), Eagle3Config.for_policy(policy_config(), [0, 1]))
    for rank in range(cp_size):
        layout = PackedLayout(lens, cp_size=cp_size, cp_rank=rank)
        bound = side.max_embed_rows(layout.local_total, layout.total_rows, layout.total_rows // (2 * cp_size))
        assert len(side.embed_ids(Pack(layout), 0)) <= bound <= layout.total_rows


def test_long_packs_take_no_slots_of_all_ranks_rows():
    side = Eagle3Side(DraftConfig(ttt_steps=3), Eagle3Config.for_policy(policy_config(), [0, 1]))
    assert side.max_embed_rows(32768, 262144, 262144 // 64) <= 66_000
