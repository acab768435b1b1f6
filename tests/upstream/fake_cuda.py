"""Lets upstream's Megatron policy worker run on CPU tensors: "cuda" means the CPU. Import it before anything of upstream's.

`nemo_ext.local.megatron_cpu` does as much for Megatron; upstream asks a little more.
"""

import contextlib
import functools

import torch
import torch._dynamo  # takes torch's functions as it finds them, so it must come before they are replaced

from nemo_ext.local import megatron_cpu  # noqa: F401

CPU = torch.device("cpu")


def _is_cuda(device) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _on_cpu(function):
    """`function`, with any "cuda" among its arguments read as the CPU."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        args = [CPU if isinstance(x, (str, torch.device)) and x != "" and _named_cuda(x) else x for x in args]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return called


def _named_cuda(x) -> bool:
    return str(x).partition(":")[0] == "cuda"


class _Stream:
    def __init__(self, *args, **kwargs):
        pass

    def synchronize(self):
        pass

    wait_stream = wait_event = record_event = lambda self, *args: None


def install() -> None:
    """Patches torch, once."""
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "randn", "rand", "randint", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _on_cpu(torch.Tensor.to)
    cuda = torch.cuda
    cuda.empty_cache = cuda.reset_peak_memory_stats = lambda *args, **kwargs: None
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = lambda *args, **kwargs: 0
    cuda.get_device_name = lambda *args: "CPU"
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args: _Stream()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    cuda.stream = lambda stream: contextlib.nullcontext()


install()
