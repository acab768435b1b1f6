"""The rows of the policy's head that a draft vocabulary shard needs.

Legend: V target vocabulary, U draft vocabulary, t tensor-parallel size, H hidden size of the policy.
"""

import torch
import torch.distributed as dist


@torch.no_grad()
def draft_shard_of_target_head(
    head_VH: torch.Tensor, target_ids_U: torch.Tensor | None, vocab_size: int, tp_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Rows of the policy's head at the target ids of this rank's shard of the draft vocabulary.

    The teacher of a draft token is the policy's logit of the target id that it stands for (contract A.5). Under
    tensor parallelism the two vocabularies are cut at different ids, so head rows move once per call
    (`U * H` elements) instead of logits once per row.

    Args:
        head_VH: this rank's shard of the policy's head, `[ceil(V / t), H]`, possibly padded at the end of the vocabulary.
        target_ids_U: target id of every draft id, `[U]`; None when the draft vocabulary is the target's.
        vocab_size: V, without padding.
        tp_group: tensor-parallel group of the policy, None for size 1.

    Returns:
        `[U / t, H]`, detached.
    """
    head_VH = head_VH.detach()
    size = dist.get_world_size(tp_group) if tp_group is not None else 1
    if size == 1:
        return head_VH[:vocab_size] if target_ids_U is None else head_VH[target_ids_U]
    shard = head_VH.shape[0]
    if target_ids_U is None:
        if shard * size == vocab_size:
            return head_VH
        target_ids_U = torch.arange(vocab_size, device=head_VH.device)
    rank = dist.get_rank(tp_group)
    local_U = target_ids_U - rank * shard
    owned_U = (local_U >= 0) & (local_U < shard)
    rows_UH = head_VH.new_zeros(target_ids_U.shape[0], head_VH.shape[1])
    rows_UH[owned_U] = head_VH[local_U[owned_U]]
    dist.all_reduce(rows_UH, group=tp_group)
    part = target_ids_U.shape[0] // size
    return rows_UH[rank * part : (rank + 1) * part].contiguous()
