"""Training computes what vLLM serves: the Megatron draft's logits against vLLM's own `LlamaForCausalLMEagle3`.

Legend: R rows, K drafted tokens, V target vocabulary, H hidden size.
"""

import pytest
import torch

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_ext.drafts.eagle3 import Eagle3Draft
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_hf import export_eagle3, load_eagle3
from nemo_ext.layout import PackedLayout
from tests.e2e.capture import Proposal, capture_proposals
from tests.e2e.conftest import DRAFTED, stream

pytestmark = pytest.mark.e2e
PROMPTS = [[3, 5, 7, 9, 11], [4, 6], [8, 10, 12, 14, 16, 18, 20]]
# float32 on both sides; logits are a few units.
TOLERANCE = 2e-5
VARIANTS = {
    "plain": {},
    "EAGLE-3.1 flags": {"norm_output": True, "norm_before_residual": True, "fc_norm": True},
    "reduced vocabulary, two layers": {"draft_vocab_size": 32, "num_hidden_layers": 2, "norm_before_fc": True},
}


class OneRank:
    """What Megatron's parallel layers ask of a group of one rank. No real one: vLLM ends all groups of the process."""

    def size(self):
        return 1

    def rank(self):
        return 0


def training_draft(model) -> Eagle3Draft:
    cfg = Eagle3Config.from_hf(model.config)
    megatron = TransformerConfig(
        num_layers=1, hidden_size=cfg.hidden_size, num_attention_heads=cfg.num_heads, use_cpu_initialization=True
    )
    draft = Eagle3Draft(cfg, megatron, OneRank())
    load_eagle3(draft, model.tensors)
    return draft


def training_logits(draft: Eagle3Draft, proposal: Proposal, embedding_VH: torch.Tensor) -> torch.Tensor:
    """`[K, V]` as the trainer computes them: all passes over the whole sequence, read at the proposal's row."""
    ids = torch.tensor(proposal.token_ids)
    layout = PackedLayout([len(ids)])
    taps_TK = torch.zeros(layout.total_rows, proposal.taps_Rt.shape[1])
    taps_TK[: len(proposal.taps_Rt)] = proposal.taps_Rt  # later rows are invisible to this one
    halo = layout.halo(DRAFTED)
    embeds = embedding_VH[layout.pack([ids])]
    embeds_PTH = torch.stack([embeds[halo.index(d).clamp(min=0)] for d in range(1, DRAFTED + 1)])
    with torch.no_grad():
        hidden_KH = draft(taps_TK, embeds_PTH, layout)[proposal.row]
        logits_KU = draft.lm_head(hidden_KH)
    logits_KV = torch.full((DRAFTED, draft.cfg.vocab_size), -torch.inf)
    logits_KV[:, draft.target_ids_U] = logits_KU
    return logits_KV


def assert_serves_what_was_trained(engine, draft, policy):
    proposals, _ = capture_proposals(engine, PROMPTS, max_new_tokens=12)
    assert len(proposals) > 6
    for proposal in proposals:
        mine = training_logits(draft, proposal, policy.tensors["model.embed_tokens.weight"])
        torch.testing.assert_close(mine, proposal.logits_KV, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
def test_logits_equal_vllms_at_every_depth_also_after_a_refresh(start_engine, make_policy, make_draft, variant):
    policy = make_policy(mixing=1.0)
    model = make_draft(policy, random=True, **variant)
    engine = start_engine(policy, model)
    draft = training_draft(model)
    assert_serves_what_was_trained(engine, draft, policy)

    # An optimizer step later, through the export that the trainer streams.
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    engine.refresh(1, stream(policy.tensors, dict(export_eagle3(draft))))
    assert_serves_what_was_trained(engine, draft, policy)
