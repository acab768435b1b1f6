"""A block draft's folder, taken into vLLM's form with its tensors. Needs no Megatron."""

from collections.abc import Mapping

import torch

from nemo_ext.config import ConfigError
from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_formats import vllm_form, vllm_names


def import_block_draft(
    config: dict,
    tensors: Mapping[str, torch.Tensor],
    policy_embedding_VH: torch.Tensor | None = None,
    policy_head_VH: torch.Tensor | None = None,
) -> tuple[dict, dict[str, torch.Tensor]]:
    """A folder of any of the forms as vLLM's config and tensors, in float32.

    Args:
        config, tensors: of the folder.
        policy_embedding_VH, policy_head_VH: of the policy that it will draft for.

    Raises:
        ConfigError: if the folder's own embedding, or whole-vocabulary head, is not the policy's: with the policy's, which
            is the one that is served, it would be another draft.
    """
    shape = BlockConfig.from_hf(vllm_form(config))
    names = vllm_names(shape, tensors)
    for name, (what, live) in {
        "embed_tokens.weight": ("embedding", policy_embedding_VH),
        "lm_head.weight": ("head", policy_head_VH),
    }.items():
        if name in tensors and name not in names and live is not None:
            own = tensors[name]
            if own.shape != live.shape or not torch.allclose(own.float(), live.float(), rtol=2**-7, atol=1e-6):
                raise ConfigError(
                    f"policy.draft.model_name: tensor {name} is not the policy's {what}, which is the one that is trained "
                    "on and served; remove it, or use a draft made for this policy"
                )
    named = {known: tensors[name] for name, known in names.items()}
    if shape.reduced_vocab and "d2t" in named:
        ids = named["d2t"].long() + torch.arange(shape.draft_vocab_size)
        named["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return shape.to_hf(), {name: t.float() if t.is_floating_point() else t for name, t in named.items()}
