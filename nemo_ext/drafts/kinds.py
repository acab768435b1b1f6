"""What EAGLE-3 and block drafts do differently before they train: shape, limits, fresh weights and import. No Megatron.

Settings are checked with it before anything starts, so torch is loaded only for weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nemo_ext.config import DraftConfig, default_taps, show, taps_outside
from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_folder import check_block_folder
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_folder import check_draft_folder
from nemo_ext.drafts.fresh_sizes import fresh_sizes

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
Shape = Eagle3Config | BlockConfig


class DraftKind(Protocol):
    """One family of drafts."""

    filled: tuple[str, ...]  # keys of `policy.draft` whose nulls the shape fills in, besides the taps

    def shape_of(self, hf_config: dict) -> Shape:
        """Of a folder's `config.json` in the form that is served."""

    def folder_shape(self, folder: str | Path, draft: DraftConfig, policy: dict, max_length: int) -> Shape:
        """Of the draft in a folder. Raises ConfigError with a line for everything that does not fit."""

    def fresh_lines(self, draft: DraftConfig, policy: dict) -> Iterator[str]:
        """What stands in the way of a fresh draft."""

    def fresh_shape(self, draft: DraftConfig, policy: dict) -> Shape:
        """Of a fresh draft."""

    def fresh_tensors(self, shape: Shape, seed: int, target_ids=None, policy_head_VH=None) -> Tensors:
        """Its weights. `target_ids`: of a reduced vocabulary, whose head starts from those rows of the policy's."""

    def imported(self, hf_config: dict, tensors: Tensors, policy: Tensors) -> tuple[dict, Tensors]:
        """A checked folder under the names that the trainer streams; `policy` by Hugging Face name."""


class Eagle3Kind:
    """EAGLE-3."""

    filled = ("num_layers", "draft_vocab_size", "norm_output", "norm_before_residual", "fc_norm")

    def shape_of(self, hf_config):
        return Eagle3Config.from_hf(hf_config)

    def folder_shape(self, folder, draft, policy, max_length):
        return check_draft_folder(folder, policy, draft, max_length=max_length)

    def fresh_lines(self, draft, policy):
        yield from _fresh_lines(draft, policy)

    def fresh_shape(self, draft, policy):
        return Eagle3Config.for_policy(
            fresh_sizes(policy),
            _taps(draft, policy),
            num_layers=draft.num_layers or 1,
            draft_vocab_size=draft.draft_vocab_size,
            norm_output=bool(draft.norm_output),
            norm_before_residual=bool(draft.norm_before_residual),
            fc_norm=bool(draft.fc_norm),
        )

    def fresh_tensors(self, shape, seed, target_ids=None, policy_head_VH=None):
        from nemo_ext.drafts.eagle3_init import init_eagle3

        return init_eagle3(shape, seed, target_ids)

    def imported(self, hf_config, tensors, policy):
        hf_config = hf_config | {"torch_dtype": "float32", "dtype": "float32"}
        named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        return hf_config, {n: t.float() if t.is_floating_point() else t for n, t in named.items()}


class BlockKind:
    """DFlash and DSpark."""

    def __init__(self, name: str):
        self._name = name
        heads = ("markov_rank",) if name == "dspark" else ()
        self.filled = ("num_layers", "draft_vocab_size", "gamma", "mask_token_id", "sliding_window", *heads)

    def shape_of(self, hf_config):
        return BlockConfig.from_hf(hf_config)

    def folder_shape(self, folder, draft, policy, max_length):
        return check_block_folder(folder, policy, draft, max_length=max_length)

    def fresh_lines(self, draft, policy):
        yield from _fresh_lines(draft, policy)
        if draft.gamma is None:
            yield (
                "policy.draft.gamma is null and policy.draft.model_name is null, so the block's size is not known; set how "
                "many tokens a block drafts, or name a draft folder"
            )
        vocab = policy["vocab_size"]
        if draft.mask_token_id is None:
            yield (
                "policy.draft.mask_token_id is null and policy.draft.model_name is null, so the mask token is not known; "
                f"set a token id that texts do not have, below {vocab}, or name a draft folder"
            )
        elif draft.mask_token_id >= vocab:
            yield (
                f"policy.draft.mask_token_id is {draft.mask_token_id}, outside the policy's vocabulary of {vocab}; set a "
                f"token id from 0 to {vocab - 1}"
            )

    def fresh_shape(self, draft, policy):
        return BlockConfig.for_policy(
            self._name,
            fresh_sizes(policy),
            _taps(draft, policy),
            gamma=draft.gamma,
            mask_token_id=draft.mask_token_id,
            num_layers=draft.num_layers or 1,
            draft_vocab_size=draft.draft_vocab_size,
            sliding_window=draft.sliding_window,
            markov_rank=draft.markov_rank or 64,
        )

    def fresh_tensors(self, shape, seed, target_ids=None, policy_head_VH=None):
        from nemo_ext.drafts.block_init import init_block

        return init_block(shape, seed, target_ids, policy_head_VH)

    def imported(self, hf_config, tensors, policy):
        from nemo_ext.drafts.block_import import import_block_draft

        embedding_VH = policy["model.embed_tokens.weight"]
        return import_block_draft(hf_config, tensors, embedding_VH, policy.get("lm_head.weight", embedding_VH))


def kind_of(draft: DraftConfig) -> DraftKind:
    """The family of `policy.draft.speculator_type`."""
    return Eagle3Kind() if draft.speculator_type == "eagle3" else BlockKind(draft.speculator_type)


def uneven_line(size: int, shape: Shape, policy: Mapping[str, int] | None = None) -> Iterator[str]:
    """A line if the tensor-parallel size cannot cut a draft of this shape, or does not divide the policy's counts, given
    by name. Ranks may be more than the draft's key heads, if as many of them share each head."""
    key_heads = shape.num_kv_heads
    divided = {
        **(policy or {}),
        "the draft's num_attention_heads": shape.num_heads,
        "the draft's intermediate_size": shape.intermediate_size,
        "policy.draft.draft_vocab_size": shape.draft_vocab_size,
    }

    def deals_keys(size: int) -> bool:
        return key_heads % size == 0 or size % key_heads == 0

    uneven = [f"{name} ({count})" for name, count in divided.items() if count % size]
    troubles = [f"does not divide {', '.join(uneven)}"] if uneven else []
    if not deals_keys(size):
        troubles.append(f"neither divides the draft's num_key_value_heads ({key_heads}) nor is a multiple of them")
    if troubles:
        fitting = ", ".join(str(size) for size in _divisors(*divided.values()) if deals_keys(size))
        yield (
            f"policy.megatron_cfg.tensor_model_parallel_size is {size}, which {' and '.join(troubles)}; sizes that fit: "
            f"{fitting}"
        )


def sizes_that_divide(count: int) -> str:
    """The remedy for a size that does not divide this."""
    return f"these do: {', '.join(map(str, _divisors(count)))}"


def _divisors(*counts: int) -> list[int]:
    """All common divisors, ascending."""
    common = math.gcd(*counts)
    return [size for size in range(1, common + 1) if common % size == 0]


def _taps(draft: DraftConfig, policy: dict) -> list[int]:
    return draft.aux_layer_indices or default_taps(policy["num_hidden_layers"])


def _fresh_lines(draft: DraftConfig, policy: dict) -> Iterator[str]:
    yield from taps_outside(_taps(draft, policy), policy["num_hidden_layers"])
    if draft.draft_vocab_size and draft.draft_vocab_size > policy["vocab_size"]:
        yield (
            f"policy.draft.draft_vocab_size is {show(draft.draft_vocab_size)}, more than the policy's vocabulary of "
            f"{policy['vocab_size']}; set less, or null for all of it"
        )
