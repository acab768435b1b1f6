"""Which tensor-parallel sizes a draft takes, and what those that it does not take are told."""

import pytest

from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.kinds import uneven_line
from tests.fixtures_models import policy_config

SETTING = "policy.megatron_cfg.tensor_model_parallel_size"


def shape(heads, key_heads, intermediate=96, vocab=192):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "vocab_size": vocab}
    return Eagle3Config.for_policy(policy_config(**sizes) | {"intermediate_size": intermediate}, (0, 1))


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(32, 2, 4), (32, 2, 2), (32, 2, 1), (8, 1, 8), (16, 16, 16)])
def test_ranks_cut_key_heads_or_share_them(heads, key_heads, size):
    assert not list(uneven_line(size, shape(heads, key_heads)))


@pytest.mark.parametrize(
    ("size", "draft", "says"),
    [
        (6, shape(24, 4), "neither divides the draft's num_key_value_heads (4) nor is a multiple of them; sizes that fit: "
         "1, 2, 4, 8, 12, 24"),
        (3, shape(12, 2), "neither divides the draft's num_key_value_heads (2) nor is a multiple of them; sizes that fit: "
         "1, 2, 4, 6, 12"),
        (8, shape(12, 2), "does not divide the draft's num_attention_heads (12); sizes that fit: 1, 2, 4, 6, 12"),
        (4, shape(8, 2, intermediate=90, vocab=190), "does not divide the draft's intermediate_size (90), "
         "policy.draft.draft_vocab_size (190); sizes that fit: 1, 2"),
        (9, shape(6, 2), "does not divide the draft's num_attention_heads (6), the draft's intermediate_size (96), "
         "policy.draft.draft_vocab_size (192) and neither divides the draft's num_key_value_heads (2) nor is a multiple of "
         "them; sizes that fit: 1, 2, 6"),
    ],
)  # fmt: skip
def test_other_sizes_are_a_line(size, draft, says):
    assert list(uneven_line(size, draft)) == [f"{SETTING} is {size}, which {says}"]


def test_the_policy_must_be_divided():
    policy = {"the policy's num_key_value_heads": 2}
    (line,) = uneven_line(4, shape(8, 2), policy)
    assert line == f"{SETTING} is 4, which does not divide the policy's num_key_value_heads (2); sizes that fit: 1, 2"
