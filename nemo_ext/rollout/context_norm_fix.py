"""A correction of vLLM's DFlash and DSpark models, applied only where a probe shows that it is needed.

They norm the trunk keys of all draft layers in one call of `ops.rms_norm`, each layer by its own weight. vLLM 0.32's
CPU kernel knows one weight only and takes the first layer's for all (as its XPU kernel did: vLLM pull request 56431),
so every layer but the first attends to a trunk that was never trained.

Legend: L draft layers, T trunk rows, G key heads, D head size.
"""

import torch
from torch import nn
from vllm import _custom_ops as ops


def correct_context_norm(draft: nn.Module) -> bool:
    """Gives a loaded DFlash or DSpark model a `_normalize_context_k` that is right; returns whether it was wrong.

    Call it in the worker's process, on CPU. Other draft models are left as they are.
    """
    model = getattr(draft, "model", None)
    if not hasattr(model, "_normalize_context_k") or not grouped_norm_is_wrong():
        return False
    model._normalize_context_k = lambda k_LTGD: norm_by_layer(k_LTGD, model._k_norm_weights, model._rms_norm_eps)
    return True


def grouped_norm_is_wrong() -> bool:
    """Whether `ops.rms_norm` gives two layers with weights 1 and 2 anything but results 1 : 2."""
    x_LTGD = torch.ones(2, 1, 1, 32)
    out_LTGD = torch.empty_like(x_LTGD)
    ops.rms_norm(out_LTGD, x_LTGD, torch.tensor([1.0, 2.0])[:, None].expand(2, 32).contiguous(), 0.0)
    return not torch.allclose(out_LTGD[1], 2 * out_LTGD[0])


def norm_by_layer(k_LTGD: torch.Tensor, weights_LD: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of each layer's keys by that layer's weight; the result of vLLM's `_normalize_context_k`."""
    out_LTGD = torch.empty_like(k_LTGD)
    for out_TGD, k_TGD, weight_D in zip(out_LTGD, k_LTGD, weights_LD, strict=True):
        ops.rms_norm(out_TGD, k_TGD, weight_D, eps)
    return out_LTGD
