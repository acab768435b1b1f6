"""Lets Megatron-core run on CPU tensors and gloo; does nothing where CUDA is there.

Megatron-core 0.16 asks `torch.cuda` for its device, spells it "cuda" in a few tensor factories, and compares
`Tensor.type()` with the CUDA type names. Import this module before `megatron.core` in every process that runs
Megatron: it answers those calls for the CPU. This is the only file that knows that there is no GPU.
"""

import functools
import sys
import warnings
from collections.abc import Callable

import torch

CPU = torch.device("cpu")


def _without_cuda_device(factory: Callable) -> Callable:
    """The tensor factory `factory`, with `device="cuda"` read as the CPU."""

    @functools.wraps(factory)
    def create(*args, device=None, **kwargs):
        return factory(*args, device=CPU if device == "cuda" else device, **kwargs)

    return create


def _type_as_on_cuda(tensor_type: Callable) -> Callable:
    """`Tensor.type`, whose name for a tensor is the one that it would have on a GPU."""

    @functools.wraps(tensor_type)
    def type_or_convert(self, dtype=None, *args, **kwargs):
        if dtype is None:
            return tensor_type(self).replace("torch.", "torch.cuda.", 1)
        return tensor_type(self, dtype, *args, **kwargs)

    return type_or_convert


def _patch_torch() -> None:
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda device=None: None
    for rng in (torch.cuda, torch.cuda.random):
        rng.get_rng_state = lambda device="cuda": torch.get_rng_state()
        rng.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
        rng.manual_seed = torch.manual_seed
    torch.zeros = _without_cuda_device(torch.zeros)
    torch.tensor = _without_cuda_device(torch.tensor)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = _type_as_on_cuda(torch.Tensor.type)


def _import_megatron_uncompiled() -> None:
    """Imports Megatron with its fused functions left as plain Python: compiling them takes half a minute."""
    if "megatron.core.jit" in sys.modules:
        from torch._dynamo import config as compiler

        compiler.disable = True
        return
    compile_function = torch.compile
    torch.compile = lambda function: function
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compile_function


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random

    # Megatron sets the CUDA generator's state through the C extension, past torch.cuda.set_rng_state.
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


if not torch.cuda.is_available():
    # Megatron warns at a dozen places that GPU libraries are missing, in every process.
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", category=UserWarning)
    _patch_torch()
    _import_megatron_uncompiled()
    _patch_megatron()
