"""DSpark: DFlash's backbone, a low-rank Markov head and a confidence head (contract C.1, C.2).

Legend: B blocks, S slots of a block, H hidden size, R Markov rank, V target vocabulary, U this rank's shard of the draft
vocabulary.
"""

import dataclasses

import torch
from torch import nn

from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.dflash import DFlashDraft
from nemo_ext.drafts.layers import Linear


class MarkovHead(nn.Module):
    """What the token before a slot adds to its logits, `W2 W1[token]` (vLLM's `DSparkMarkovHead`). `W1` is whole on every
    rank, `W2`'s rows are the rank's shard of the draft vocabulary; the loss multiplies them, chunk by chunk."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, config, tp_group):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = Linear(rank, draft_vocab_size, "column", config, tp_group)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """`[..., R]` of target ids."""
        return self.markov_w1(ids)


class ConfidenceHead(nn.Module):
    """The logit of the chance that a slot's token is accepted (vLLM's `DSparkConfidenceHead`), in float32."""

    def __init__(self, hidden_size: int, markov_rank: int, with_markov: bool):
        super().__init__()
        self.with_markov = with_markov
        self.proj = nn.Linear(hidden_size + (markov_rank if with_markov else 0), 1)

    def forward(self, hidden_BSH: torch.Tensor, markov_BSR: torch.Tensor) -> torch.Tensor:
        """`[B, S]`."""
        features = torch.cat([hidden_BSH, markov_BSR], dim=-1) if self.with_markov else hidden_BSH
        return self.proj(features.to(self.proj.weight.dtype)).squeeze(-1)


class DSparkDraft(DFlashDraft):
    """The draft: as `DFlashDraft`, with `markov_head` and, if the shape has one, `confidence_head` (else None)."""

    def __init__(self, cfg: BlockConfig, config, tp_group):
        super().__init__(cfg, config, tp_group)
        plain = dataclasses.replace(config, sequence_parallel=False, perform_initialization=False)
        self.markov_head = MarkovHead(cfg.vocab_size, cfg.draft_vocab_size, cfg.markov_rank, plain, tp_group)
        self.markov_head.to(config.params_dtype)
        self.confidence_head = None
        if cfg.confidence_head:
            self.confidence_head = ConfidenceHead(cfg.hidden_size, cfg.markov_rank, cfg.confidence_with_markov)
            # As it is served.
            self.confidence_head.to(torch.promote_types(config.params_dtype, torch.float32))
