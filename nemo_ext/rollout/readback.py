"""Reads served weights back, by Hugging Face name, and digests of all of them. For one tensor-parallel rank."""

import hashlib

import torch
from torch import nn

from nemo_ext.rollout.manifest import DRAFT_PREFIX

# Hugging Face projection -> the module that vLLM fuses it into, and its part there.
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def read_weight(target: nn.Module, draft: nn.Module | None, name: str) -> torch.Tensor:
    """A copy of the served tensor.

    Args:
        name: a Hugging Face name as a refresh uses it (`model.layers.0.self_attn.q_proj.weight`, `draft.fc.weight`),
            or a parameter name of vLLM's module (`draft.model.layers.0.self_attn.qkv_proj.weight`).

    Raises:
        KeyError: no such tensor.
    """
    if name.startswith(DRAFT_PREFIX):
        if draft is None:
            raise KeyError(name)
        return part_of(draft, draft_parameter(name.removeprefix(DRAFT_PREFIX))).clone()
    return part_of(target, name).clone()


def draft_parameter(name: str) -> str:
    """The dotted path in vLLM's EAGLE-3, DFlash and DSpark modules of a draft checkpoint's tensor (or of itself)."""
    if name == "d2t":
        return "draft_id_to_target_id"
    name = name.replace("midlayer.", "layers.0.")
    return name if name.startswith(("model.", "lm_head.", "draft_id_to_target_id")) else f"model.{name}"


def part_of(model: nn.Module, name: str) -> torch.Tensor:
    """The parameter, or its rows that one Hugging Face projection fills; a padded vocabulary is cut."""
    path, _, leaf = name.rpartition(".")
    parent, _, kind = path.rpartition(".")
    fused, part = FUSED.get(kind, (kind, None))
    try:
        module = model.get_submodule(f"{parent}.{fused}" if parent else fused)
        tensor = getattr(module, leaf)
    except AttributeError:
        raise KeyError(name) from None
    if part is not None:
        return tensor.split(part_sizes(module))[part]
    return tensor[: module.org_vocab_size] if hasattr(module, "org_vocab_size") else tensor


def part_sizes(module: nn.Module) -> list[int]:
    """Rows of each projection in a fused linear layer."""
    if hasattr(module, "num_kv_heads"):
        return [
            module.num_heads * module.head_size,
            module.num_kv_heads * module.head_size,
            module.num_kv_heads * module.v_head_size,
        ]
    return list(module.output_sizes)


def digest(model: nn.Module) -> str:
    """SHA-256 over names, shapes and bytes of all parameters, in the order of their names."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        total.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode())
        total.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
