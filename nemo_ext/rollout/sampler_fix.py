"""Corrections of vLLM's rejection sampler, each applied only where a probe with a known answer shows that it is needed.

vLLM 0.32's CPU kernel behind `vllm.v1.sample.rejection_sampler.expand_batch_to_tokens` writes into a temporary int64
copy when its input is float or int32, so temperature, top-p and top-k reach the sampler as uninitialised memory
(vLLM issue 55005). And `apply_top_k_top_p` fails on the steps in which no request has a draft token and top-k is set.

Names: x_B one value a request, cu_B running count of tokens, B requests.
"""

import functools
from collections.abc import Callable
from types import ModuleType

import torch


def expand_batch_to_tokens(
    x_B: torch.Tensor, cu_num_tokens_B: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each request's value, repeated over its tokens; a value equal to replace_from becomes replace_to.

    Arguments and result are those of vLLM's function of this name: [B], [B] cumulative counts -> [num_tokens].
    """
    counts_B = torch.diff(cu_num_tokens_B, prepend=cu_num_tokens_B.new_zeros(1))
    values_B = torch.where(x_B == replace_from, torch.full_like(x_B, replace_to), x_B)
    return values_B.repeat_interleave(counts_B.long(), output_size=num_tokens)


def expansion_is_wrong(sampler: ModuleType) -> bool:
    """Whether sampler.expand_batch_to_tokens gives anything but the right answer, for each type that vLLM hands it."""
    cu_num_tokens_B = torch.tensor([2, 5, 6], dtype=torch.int32)
    # Fresh numbers each time: what is left in memory by an earlier, right call must not pass for an answer.
    fresh = torch.Generator()
    fresh.seed()
    a, b = torch.randint(2, 1 << 20, (2,), generator=fresh).tolist()
    for dtype in (torch.float32, torch.int32, torch.int64):
        x_B = torch.tensor([a, 0, b], dtype=dtype)
        got = sampler.expand_batch_to_tokens(x_B, cu_num_tokens_B, 6, replace_from=0, replace_to=1)
        if got.dtype != dtype or got.tolist() != [a, a, 1, 1, 1, b]:
            return True
        if dtype.is_floating_point:
            halves = sampler.expand_batch_to_tokens(x_B / (2 * a), cu_num_tokens_B, 6)
            if halves.tolist()[:3] != [0.5, 0.5, 0.0]:
                return True
    return False


def top_k_needs_rows(sampler: ModuleType) -> bool:
    """Whether sampler.apply_top_k_top_p fails on logits without rows."""
    try:
        sampler.apply_top_k_top_p(torch.empty(0, 4), torch.empty(0, dtype=torch.int32), None)
    except RuntimeError:
        return True
    return False


def correct_sampler(sampler: ModuleType) -> list[str]:
    """Replaces the functions of `vllm.v1.sample.rejection_sampler` that a probe finds wrong; returns their names.

    Call it in the worker's process, on CPU, after the worker has registered its platform's kernels.
    """
    corrected = []
    if expansion_is_wrong(sampler):
        replace(sampler, "expand_batch_to_tokens", lambda stock: expand_batch_to_tokens)
        corrected.append("expand_batch_to_tokens")
    if top_k_needs_rows(sampler):
        replace(sampler, "apply_top_k_top_p", skipping_empty)
        corrected.append("apply_top_k_top_p")
    return corrected


def skipping_empty(apply_top_k_top_p: Callable) -> Callable:
    """apply_top_k_top_p that hands logits without rows back."""
    return lambda logits_TV, k_T, p_T: apply_top_k_top_p(logits_TV, k_T, p_T) if len(logits_TV) else logits_TV


def replace(sampler: ModuleType, name: str, make: Callable[[Callable], Callable]) -> None:
    """Puts make(stock) in the place of the function `name`; the stock one stays reachable as its `__wrapped__`."""
    stock = getattr(sampler, name)
    new = make(stock)

    @functools.wraps(stock)
    def corrected(*args, **kwargs):
        return new(*args, **kwargs)

    setattr(sampler, name, corrected)
