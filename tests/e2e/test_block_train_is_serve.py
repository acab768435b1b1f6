"""The trained DFlash and DSpark drafts are what vLLM's own Qwen3 models serve."""

import pytest

from tests.e2e.conftest import stream
from tests.train_is_serve import assert_block_is_served, block_draft, one_step_later

# isort: split
from nemo_ext.drafts.block_hf import export_block

pytestmark = pytest.mark.e2e
VARIANTS = {
    "dflash": {"num_attention_heads": 4},
    "dflash, window narrower than the block": {"window": 3},
    "dflash, causal, reduced vocabulary": {"causal": True, "draft_vocab_size": 32},
    "dspark": {"method": "dspark", "num_attention_heads": 4},
    "dspark, window, reduced vocabulary": {"method": "dspark", "window": 6, "draft_vocab_size": 32},
    "dspark, not from the anchor": {"method": "dspark", "sample_from_anchor": False, "confidence_with_markov": False},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
def test_logits_equal_vllms_in_every_slot_also_after_a_refresh(start_engine, make_policy, make_block_draft, variant):
    policy = make_policy(mixing=1.0)
    model = make_block_draft(policy, **variant)
    engine = start_engine(policy, model)
    draft = block_draft(model.config, model.tensors)
    assert_block_is_served(engine, draft, policy.tensors)

    # An optimizer step later, through the export that the trainer streams.
    one_step_later(draft)
    engine.refresh(1, stream(policy.tensors, dict(export_block(draft))))
    assert_block_is_served(engine, draft, policy.tensors)
