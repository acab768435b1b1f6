"""Statistics of logits that are sharded over the tensor-parallel group. No gradient.

Legend: T rows, V this rank's shard of the vocabulary.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

Reduce = Callable[..., torch.Tensor]


@torch.no_grad()
def vocab_parallel_logsumexp(
    logits_TV: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    temperature: float = 1.0,
    chunk_rows: int = 1024,
) -> torch.Tensor:
    """Log-sum-exp of `logits / temperature` over the whole vocabulary, `[T]`, in at least float32.

    `chunk_rows`: rows of which a copy exists at once.
    """
    acc, reduce_ = torch.promote_types(logits_TV.dtype, torch.float32), reducer(tp_group)
    # A chunk's own log-sum-exp first, so that ranks exchange two numbers a row once.
    own_T = logits_TV.new_empty(len(logits_TV), dtype=acc)
    for rows in range(0, len(logits_TV), chunk_rows):
        part = slice(rows, rows + chunk_rows)
        own_T[part] = logits_TV[part].to(acc).div(temperature).logsumexp(-1)
    top_T = reduce_(own_T.clone(), dist.ReduceOp.MAX)
    return top_T + reduce_((own_T - top_T).exp()).log()


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


def reducer(tp_group: dist.ProcessGroup | None) -> Reduce:
    """`reduce_(x, op=SUM)` over the group, in place; returns `x`. Without a group it does nothing."""

    def reduce_(x: torch.Tensor, op=dist.ReduceOp.SUM) -> torch.Tensor:
        if _parallel(tp_group):
            dist.all_reduce(x, op=op, group=tp_group)
        return x

    return reduce_


def log_softmax_(logits_TV: torch.Tensor, reduce_: Reduce) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax over the whole vocabulary, in place, and its log-sum-exp `[T]`."""
    top_T = reduce_(logits_TV.amax(-1), dist.ReduceOp.MAX)
    logits_TV = logits_TV.sub_(top_T[:, None])
    log_sum_T = reduce_(logits_TV.exp().sum(-1)).log_()
    return logits_TV.sub_(log_sum_T[:, None]), top_T.add_(log_sum_T)


def softmax_(logits_TV: torch.Tensor, reduce_: Reduce) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the whole vocabulary, in place, and its log-sum-exp `[T]`."""
    top_T = reduce_(logits_TV.amax(-1), dist.ReduceOp.MAX)
    sum_T = reduce_(logits_TV.sub_(top_T[:, None]).exp_().sum(-1))
    return logits_TV.div_(sum_T[:, None]), top_T.add_(sum_T.log_())


def at_argmax(
    p_TV: torch.Tensor, value_TV: torch.Tensor, reduce_: Reduce, tp_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """`value` at the id where `p` is largest over all shards, `[T]` (ties go to the lowest rank)."""
    best_T, where_T = p_TV.max(-1)
    found_T = value_TV.gather(-1, where_T[:, None]).squeeze(-1)
    if not _parallel(tp_group):
        return found_T
    top_T = reduce_(best_T.clone(), dist.ReduceOp.MAX)
    rank = dist.get_rank(tp_group)
    owner_T = torch.where(best_T == top_T, rank, dist.get_world_size(tp_group))
    owner_T = reduce_(owner_T, dist.ReduceOp.MIN)
    return reduce_(torch.where(owner_T == rank, found_T, torch.zeros_like(found_T)))


def _parallel(group) -> bool:
    return group is not None and dist.get_world_size(group) > 1
