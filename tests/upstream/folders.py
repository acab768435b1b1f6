"""Folders of the tiny models that the tests against upstream use."""

from pathlib import Path

import torch

from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_init import init_block
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_init import init_eagle3
from nemo_ext.local.hf_folder import save_hf_folder
from tests.fixtures_models import policy_config, policy_tensors

VOCAB = 64


def policy_folder(path: Path, layers: int = 4) -> str:
    """A random Qwen3 policy, hidden size 64."""
    config = _config(layers)
    save_hf_folder(path, config, policy_tensors(config))
    return str(path)


def draft_folder(path: Path, *, layers: int = 4, taps=(0, 1, 3), draft_vocab: int | None = None, seed: int = 0) -> str:
    """A fresh EAGLE-3 draft for it; `draft_vocab` keeps that many ids of the vocabulary, evenly spread."""
    shape = Eagle3Config.for_policy(_config(layers), taps, draft_vocab_size=draft_vocab)
    ids = None if draft_vocab is None else torch.arange(draft_vocab) * (VOCAB // draft_vocab)
    save_hf_folder(path, shape.to_hf(), init_eagle3(shape, seed, ids))
    return str(path)


def block_folder(path: Path, kind: str, seed: int = 0) -> str:
    """A fresh draft of blocks of three tokens for the policy of four layers."""
    shape = BlockConfig.for_policy(kind, _config(4), (0, 1, 3), gamma=3, mask_token_id=VOCAB - 1, markov_rank=8)
    tensors = init_block(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if not tensor.any():  # heads begin at zero, which would hide a wrong gradient of what feeds them
            tensors[name] = 0.1 * torch.randn(tensor.shape, generator=generator)
    save_hf_folder(path, shape.to_hf(), tensors)
    return str(path)


def _config(layers: int) -> dict:
    return policy_config(vocab_size=VOCAB, num_key_value_heads=2, num_hidden_layers=layers)
