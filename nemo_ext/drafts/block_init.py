"""Fresh weights of a block draft. Needs no Megatron."""

import math

import torch

from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_shapes import block_shapes


def init_block(
    cfg: BlockConfig,
    seed: int,
    target_ids: torch.Tensor | None = None,
    policy_head_VH: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Fresh weights under their Hugging Face names, full size, so that they are the same for every parallel layout.

    Linear weights are normal with variance 1 / fan-in and norms are ones. The Markov head starts as no bias at all (`W2` is
    zero, rows of `W1` have length about 1) and the confidence head at one half.

    Args:
        target_ids: the target ids of a reduced vocabulary, ascending.
        policy_head_VH: the policy's head, whose rows such a vocabulary's head then starts from.
    """
    generator = torch.Generator().manual_seed(seed)
    zeros = ("markov_head.markov_w2.weight", "confidence_head.proj.weight", "confidence_head.proj.bias")
    tensors = {}
    for name, shape in block_shapes(cfg).items():
        if name in zeros:
            tensors[name] = torch.zeros(shape)
        elif len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
    if cfg.reduced_vocab:
        ids = target_ids.long()
        if policy_head_VH is not None:
            tensors["lm_head.weight"] = policy_head_VH[ids].float()
        tensors["d2t"] = ids - torch.arange(cfg.draft_vocab_size)
        tensors["t2d"] = torch.zeros(cfg.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors
