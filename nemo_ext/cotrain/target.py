"""Reads what the draft needs out of a Megatron `GPTModel` after its forward. Everything is detached.

Legend: T rows of this rank, E rows with halo, H hidden size, V this rank's shard of the vocabulary.
"""

import torch
import torch.distributed as dist

from nemo_ext.cotrain.eagle3_objective import TargetOutputs


def read_target(model, landing, logits_TV: torch.Tensor, tp_group: dist.ProcessGroup | None) -> TargetOutputs:
    """The policy's side of the draft loss, on the last stage.

    Args:
        model: the policy's last chunk, unwrapped.
        landing: of the microbatch (`nemo_ext.taps.Landing`), with the embedding rows of the objective's halo.
        logits_TV: what the forward gave.
        tp_group: tensor-parallel group; None for size 1.
    """
    scattered = model.config.sequence_parallel
    tied = model.share_embeddings_and_output_weights
    return TargetOutputs(
        taps_TK=whole_rows(landing.taps(), scattered, tp_group),
        embeds_EH=landing.embedding(),
        hidden_TH=whole_rows(landing.hidden, scattered, tp_group),
        logits_TV=logits_TV,
        head_VH=model.shared_embedding_or_output_weight() if tied else model.output_layer.weight,
    )


@torch.no_grad()
def whole_rows(x: torch.Tensor, scattered: bool, tp_group: dist.ProcessGroup | None) -> torch.Tensor:
    """All rows of a tensor whose rows sequence parallelism scatters over the tensor-parallel ranks."""
    if not scattered or tp_group is None or dist.get_world_size(tp_group) == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(tp_group))]
    dist.all_gather(parts, x.contiguous(), group=tp_group)
    return torch.cat(parts)


@torch.no_grad()
def embed_rows(embedding, ids_E: torch.Tensor, tp_group: dist.ProcessGroup | None) -> torch.Tensor:
    """Rows of a `VocabParallelEmbedding` at `ids_E`, whole on every rank (its own forward may scatter the sequence)."""
    weight_VH = embedding.weight.detach()
    if tp_group is None or dist.get_world_size(tp_group) == 1:
        return weight_VH[ids_E]
    local_E = ids_E - embedding.vocab_start_index
    owned_E = (local_E >= 0) & (local_E < weight_VH.shape[0])
    rows_EH = torch.where(owned_E[:, None], weight_VH[local_E.clamp(0, weight_VH.shape[0] - 1)], 0)
    dist.all_reduce(rows_EH, group=tp_group)
    return rows_EH
