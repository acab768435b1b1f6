"""Folders of the tiny models that the tests against upstream use."""

from pathlib import Path

import torch

from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_init import init_eagle3
from nemo_ext.local.hf_folder import save_hf_folder
from tests.fixtures_models import policy_config, policy_tensors

VOCAB = 64


def policy_folder(path: Path) -> str:
    """A random Qwen3 policy of 4 layers, hidden size 64."""
    config = policy_config(vocab_size=VOCAB, num_key_value_heads=2)
    save_hf_folder(path, config, policy_tensors(config))
    return str(path)


def draft_folder(path: Path, *, draft_vocab: int | None = None, seed: int = 0) -> str:
    """A fresh EAGLE-3 draft for it; `draft_vocab` keeps every other id, or so, of the vocabulary."""
    config = policy_config(vocab_size=VOCAB, num_key_value_heads=2)
    shape = Eagle3Config.for_policy(config, [0, 1, 3], draft_vocab_size=draft_vocab)
    ids = None if draft_vocab is None else torch.arange(draft_vocab) * (VOCAB // draft_vocab)
    save_hf_folder(path, shape.to_hf(), init_eagle3(shape, seed, ids))
    return str(path)
