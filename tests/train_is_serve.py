"""Training computes what vLLM serves: the Megatron drafts against vLLM's own, proposal by proposal.

Legend: R trunk rows, K drafted tokens, H hidden size, U draft and V target vocabulary.
"""

import torch

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_hf import load_block
from nemo_ext.drafts.dflash import DFlashDraft
from nemo_ext.drafts.dspark import DSparkDraft
from nemo_ext.drafts.eagle3 import Eagle3Draft
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_hf import load_eagle3
from nemo_ext.layout import PackedLayout
from tests.e2e.block_capture import Block, capture_blocks
from tests.e2e.capture import Proposal, capture_proposals

PROMPTS = [[3, 5, 7, 9, 11], [4, 6], [8, 10, 12, 14, 16, 18, 20]]
# float32 on both sides; logits are a few units.
TOLERANCE = 2e-5


class OneRank:
    """What Megatron's parallel layers ask of a group of one rank. No real one: vLLM ends all groups of the process."""

    def size(self):
        return 1

    def rank(self):
        return 0


def eagle3_draft(config: dict, tensors: dict) -> Eagle3Draft:
    """The trainer's draft with a folder's weights, on one rank."""
    cfg = Eagle3Config.from_hf(config)
    draft = Eagle3Draft(cfg, _megatron(cfg), OneRank())
    load_eagle3(draft, tensors)
    return draft


def block_draft(config: dict, tensors: dict) -> DFlashDraft:
    """The same of a DFlash or DSpark draft."""
    cfg = BlockConfig.from_hf(config)
    draft = (DSparkDraft if cfg.kind == "dspark" else DFlashDraft)(cfg, _megatron(cfg), OneRank())
    load_block(draft, tensors)
    return draft


def _megatron(cfg) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=cfg.hidden_size, num_attention_heads=cfg.num_heads, use_cpu_initialization=True
    )


@torch.no_grad()
def one_step_later(draft: torch.nn.Module) -> None:
    """Changes every parameter, as an optimizer would."""
    generator = torch.Generator().manual_seed(3)
    for parameter in draft.parameters():
        parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def eagle3_logits(draft: Eagle3Draft, proposal: Proposal, embedding_VH: torch.Tensor) -> torch.Tensor:
    """`[K, V]` as the trainer computes them: all passes over the whole sequence, read at the proposal's row."""
    drafted = len(proposal.logits_KV)
    ids = torch.tensor(proposal.token_ids)
    layout = PackedLayout([len(ids)])
    taps_TK = torch.zeros(layout.total_rows, proposal.taps_Rt.shape[1])
    taps_TK[: len(proposal.taps_Rt)] = proposal.taps_Rt  # later rows are invisible to this one
    halo = layout.halo(drafted)
    embeds = embedding_VH[layout.pack([ids])]
    embeds_PTH = torch.stack([embeds[halo.index(d).clamp(min=0)] for d in range(1, drafted + 1)])
    hidden_KH = draft(taps_TK, embeds_PTH, layout)[proposal.row]
    logits_KU = draft.lm_head(hidden_KH)
    logits_KV = torch.full((drafted, draft.cfg.vocab_size), -torch.inf)
    logits_KV[:, draft.target_ids_U] = logits_KU
    return logits_KV


@torch.no_grad()
def block_outputs(draft: DFlashDraft, block: Block, policy: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
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


def assert_eagle3_is_served(engine, draft: Eagle3Draft, policy: dict) -> list[Proposal]:
    """Compares every depth of every proposal, and returns the proposals."""
    proposals, _ = capture_proposals(engine, PROMPTS, max_new_tokens=12)
    assert len(proposals) > 6
    for proposal in proposals:
        mine_KV = eagle3_logits(draft, proposal, policy["model.embed_tokens.weight"])
        torch.testing.assert_close(mine_KV, proposal.logits_KV, atol=TOLERANCE, rtol=0)
    return proposals


def assert_block_is_served(
    engine, draft: DFlashDraft, policy: dict, max_new_tokens: int = 12, *, confidence: bool = True
) -> list[Block]:
    """Compares every slot of every block, and returns the blocks. `confidence`: whether this engine has that head."""
    blocks, _ = capture_blocks(engine, PROMPTS, max_new_tokens=max_new_tokens)
    assert len(blocks) > 6
    for block in blocks:
        logits_KV, confidence_K = block_outputs(draft, block, policy)
        torch.testing.assert_close(block.logits_KV, logits_KV, atol=TOLERANCE, rtol=0)
        assert (block.confidence_K is None) == (confidence_K is None or not confidence)
        if block.confidence_K is not None:
            torch.testing.assert_close(block.confidence_K, confidence_K, atol=TOLERANCE, rtol=0)
    return blocks
