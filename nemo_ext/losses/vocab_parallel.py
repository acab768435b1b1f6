"""Statistics of logits that are sharded over the tensor-parallel group. No gradient.

Legend: T rows, V this rank's shard of the vocabulary.
"""

import torch
import torch.distributed as dist


@torch.no_grad()
def vocab_parallel_logsumexp(logits_TV: torch.Tensor, tp_group: dist.ProcessGroup | None) -> torch.Tensor:
    """Log-sum-exp over the whole vocabulary, `[T]`, in at least float32."""
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    top_T = logits_TV.amax(-1)
    if _parallel(tp_group):
        dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=tp_group)
    sum_T = (logits_TV - top_T[:, None]).exp_().sum(-1)
    if _parallel(tp_group):
        dist.all_reduce(sum_T, group=tp_group)
    return top_T + sum_T.log()


@torch.no_grad()
def vocab_parallel_argmax(logits_TV: torch.Tensor, tp_group: dist.ProcessGroup | None) -> torch.Tensor:
    """Id of the largest logit over the whole vocabulary, `[T]`; the lowest id among equals."""
    best_T, where_T = logits_TV.max(-1)
    if not _parallel(tp_group):
        return where_T
    where_T = where_T + dist.get_rank(tp_group) * logits_TV.shape[-1]
    top_T = best_T.clone()
    dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=tp_group)
    where_T = torch.where(best_T == top_T, where_T, torch.iinfo(torch.long).max)
    dist.all_reduce(where_T, op=dist.ReduceOp.MIN, group=tp_group)
    return where_T


def _parallel(group) -> bool:
    return group is not None and dist.get_world_size(group) > 1
