"""Training computes what vLLM serves, for block drafts: the Megatron draft against vLLM's own Qwen3 DFlash and DSpark.

Legend: R trunk rows, K drafted tokens, H hidden size, U draft and V target vocabulary.
"""

import pytest
import torch

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_hf import export_block, load_block
from nemo_ext.drafts.dflash import DFlashDraft
from nemo_ext.drafts.dspark import DSparkDraft
from nemo_ext.layout import PackedLayout
from tests.e2e.block_capture import Block, capture_blocks
from tests.e2e.conftest import stream
from tests.e2e.test_train_is_serve import OneRank

pytestmark = pytest.mark.e2e
PROMPTS = [[3, 5, 7, 9, 11], [4, 6], [8, 10, 12, 14, 16, 18, 20]]
# float32 on both sides; logits are a few units.
TOLERANCE = 2e-5
VARIANTS = {
    "dflash": {"num_attention_heads": 4},
    "dflash, window narrower than the block": {"window": 3},
    "dflash, causal, reduced vocabulary": {"causal": True, "draft_vocab_size": 32},
    "dspark": {"method": "dspark", "num_attention_heads": 4},
    "dspark, window, reduced vocabulary": {"method": "dspark", "window": 6, "draft_vocab_size": 32},
    "dspark, not from the anchor": {"method": "dspark", "sample_from_anchor": False, "confidence_with_markov": False},
}


def training_draft(config: dict, tensors: dict) -> DFlashDraft:
    cfg = BlockConfig.from_hf(config)
    megatron = TransformerConfig(
        num_layers=1, hidden_size=cfg.hidden_size, num_attention_heads=cfg.num_heads, use_cpu_initialization=True
    )
    draft = (DSparkDraft if cfg.kind == "dspark" else DFlashDraft)(cfg, megatron, OneRank())
    load_block(draft, tensors)
    return draft


@torch.no_grad()
def training_outputs(draft: DFlashDraft, block: Block, policy: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits `[K, V]` and confidence `[K]` of a block as the trainer computes them. From the anchor's own row on the trunk is
    NaN: it must not be looked at."""
    cfg, embedding_VH = draft.cfg, policy["model.embed_tokens.weight"]
    layout = PackedLayout([block.anchor + 1])
    taps_TK = torch.full((layout.total_rows, block.taps_Rt.shape[1]), torch.nan)
    taps_TK[: block.anchor] = block.taps_Rt
    hidden_KH = draft(
        taps_TK,
        embedding_VH[[block.token_ids[block.anchor]]],
        embedding_VH[cfg.mask_token_id],
        layout,
        anchor_sequences=torch.tensor([0]),
        anchor_positions=torch.tensor([block.anchor]),
    )[0]
    logits_KU = draft.lm_head(hidden_KH) if cfg.reduced_vocab else hidden_KH @ policy["lm_head.weight"].T
    confidence_K = None
    if cfg.markov_rank:
        previous_K = torch.tensor(block.token_ids[block.anchor : block.anchor + cfg.gamma])
        markov_KR = draft.markov_head.embed(previous_K)
        logits_KU = logits_KU + draft.markov_head.markov_w2(markov_KR)
        confidence_K = draft.confidence_head(hidden_KH[None], markov_KR[None])[0].sigmoid()
    logits_KV = torch.full((cfg.gamma, cfg.vocab_size), -torch.inf)
    logits_KV[:, draft.target_ids_U] = logits_KU
    return logits_KV, confidence_K


def assert_serves_what_was_trained(engine, draft: DFlashDraft, policy: dict, max_new_tokens: int = 12) -> None:
    blocks, _ = capture_blocks(engine, PROMPTS, max_new_tokens=max_new_tokens)
    assert len(blocks) > 6
    for block in blocks:
        logits_KV, confidence_K = training_outputs(draft, block, policy)
        torch.testing.assert_close(block.logits_KV, logits_KV, atol=TOLERANCE, rtol=0)
        assert (block.confidence_K is None) == (confidence_K is None)
        if confidence_K is not None:
            torch.testing.assert_close(block.confidence_K, confidence_K, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
def test_logits_equal_vllms_in_every_slot_also_after_a_refresh(start_engine, make_policy, make_block_draft, variant):
    policy = make_policy(mixing=1.0)
    model = make_block_draft(policy, **variant)
    engine = start_engine(policy, model)
    draft = training_draft(model.config, model.tensors)
    assert_serves_what_was_trained(engine, draft, policy.tensors)

    # An optimizer step later, through the export that the trainer streams.
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    engine.refresh(1, stream(policy.tensors, dict(export_block(draft))))
    assert_serves_what_was_trained(engine, draft, policy.tensors)
