"""The list of tensors that a refresh will bring, and its check against what the engine was loaded from."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from nemo_ext.rollout.errors import RefreshError

DRAFT_PREFIX = "draft."
# vLLM does not read the inverse vocabulary map; training stacks put it beside d2t.
OPTIONAL = frozenset({DRAFT_PREFIX + "t2d"})
NAMES_SHOWN = 4


class TensorSpec(NamedTuple):
    """Name (draft tensors carry the prefix `draft.`), shape and dtype of one streamed tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def manifest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    """The manifest that describes a stream of (name, tensor)."""
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]


def folder_manifest(folder: str | Path, prefix: str = "") -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of all safetensors files of a model folder, from their headers; names get `prefix`.

    Raises:
        RefreshError: no local folder, or one without safetensors.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise RefreshError(
            f"model {folder} has no *.safetensors; an engine that is to be refreshed needs a local folder"
        )
    specs = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                header = tensors.get_slice(name)
                # A slice of no rows gives the dtype in torch's own terms without reading data.
                shape = tuple(header.get_shape())
                dtype = header[:0].dtype if shape else tensors.get_tensor(name).dtype
                specs[prefix + name] = TensorSpec(prefix + name, shape, dtype)
    return specs


def check_manifest(declared: Iterable[TensorSpec], expected: Mapping[str, TensorSpec]) -> None:
    """Every expected tensor once, none besides, each of its shape and kind.

    The kind is float, integer or bool: a bf16 stream into an fp32 engine is converted, an integer map is not.

    Raises:
        RefreshError: one line that names the offending tensors.
    """
    declared = [spec._replace(name=canonical(spec.name)) for spec in declared]
    expected = {canonical(name): spec for name, spec in expected.items()}
    names = Counter(spec.name for spec in declared)
    known = [(spec, expected[spec.name]) for spec in declared if spec.name in expected]
    problems = {
        "missing": [spec.name for name, spec in expected.items() if name not in names and name not in OPTIONAL],
        "not expected": [name for name in names if name not in expected and name not in OPTIONAL],
        "declared twice": [name for name, count in names.items() if count > 1],
        "misshaped": [f"{a.name} is {list(a.shape)}, needs {list(b.shape)}" for a, b in known if a.shape != b.shape],
        "of the wrong type": [
            f"{a.name} is {a.dtype}, needs {b.dtype}" for a, b in known if not same_kind(a.dtype, b.dtype)
        ],
    }
    told = [f"{what}: {shorten(which)}" for what, which in problems.items() if which]
    if told:
        raise RefreshError("weight refresh refused; " + "; ".join(told))


def canonical(name: str) -> str:
    """One name for a tensor that vLLM reads under two: EAGLE-3 folders call their first layer `midlayer` too."""
    return name.replace(DRAFT_PREFIX + "midlayer.", DRAFT_PREFIX + "layers.0.")


def same_kind(a: torch.dtype, b: torch.dtype) -> bool:
    """Both floating, or exactly the same type."""
    return a == b or (a.is_floating_point and b.is_floating_point)


def shorten(names: list[str]) -> str:
    """The first few names, and how many more."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
