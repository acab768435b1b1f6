"""The trained EAGLE-3 draft is what vLLM's own `LlamaForCausalLMEagle3` serves."""

import pytest

from tests.e2e.conftest import stream
from tests.train_is_serve import assert_eagle3_is_served, eagle3_draft, one_step_later

# isort: split
from nemo_ext.drafts.eagle3_hf import export_eagle3

pytestmark = pytest.mark.e2e
VARIANTS = {
    "plain": {},
    "EAGLE-3.1 flags": {"norm_output": True, "norm_before_residual": True, "fc_norm": True},
    "reduced vocabulary, two layers": {"draft_vocab_size": 32, "num_hidden_layers": 2, "norm_before_fc": True},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
def test_logits_equal_vllms_at_every_depth_also_after_a_refresh(start_engine, make_policy, make_draft, variant):
    policy = make_policy(mixing=1.0)
    model = make_draft(policy, random=True, **variant)
    engine = start_engine(policy, model)
    draft = eagle3_draft(model.config, model.tensors)
    assert_eagle3_is_served(engine, draft, policy.tensors)

    # An optimizer step later, through the export that the trainer streams.
    one_step_later(draft)
    engine.refresh(1, stream(policy.tensors, dict(export_eagle3(draft))))
    assert_eagle3_is_served(engine, draft, policy.tensors)
