"""Block-draft weights under Hugging Face names, in and out of a tensor-parallel draft (contract D.1)."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from nemo_ext.config import ConfigError
from nemo_ext.drafts.dflash import DFlashDraft
from nemo_ext.drafts.layers import Linear


def _parameters(draft: DFlashDraft) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    """`(name, local tensor, split dimension)` of every parameter; the split is None where ranks hold the whole tensor."""
    split = {id(module.weight): module.split_dim for module in draft.modules() if isinstance(module, Linear)}
    for name, parameter in draft.named_parameters():
        yield name.replace(".inner.", "."), parameter, split.get(id(parameter))


def export_block(draft: DFlashDraft, tp_group: dist.ProcessGroup | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Streams `(name, full tensor)`; every rank of the tensor-parallel group takes part and gets every tensor.

    Embedding and head of a whole vocabulary are the policy's and are not among them.
    """
    size = dist.get_world_size(tp_group) if tp_group is not None else 1
    for name, parameter, split_dim in _parameters(draft):
        tensor = parameter.detach()
        if split_dim is not None and size > 1:
            shards = [torch.empty_like(tensor) for _ in range(size)]
            dist.all_gather(shards, tensor.contiguous(), group=tp_group)
            tensor = torch.cat(shards, dim=split_dim)
        yield name, tensor
    if draft.cfg.reduced_vocab:
        ids = draft.target_ids_U
        yield "d2t", ids - torch.arange(ids.shape[0], device=ids.device)
        yield "t2d", torch.zeros(draft.cfg.vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)


@torch.no_grad()
def load_block(draft: DFlashDraft, tensors: dict[str, torch.Tensor], tp_group: dist.ProcessGroup | None = None) -> None:
    """Copies full tensors, under vLLM's names, into this rank's shards; `t2d` is not needed.

    Raises ConfigError that names a tensor which is missing, unknown or misshaped.
    """
    size = dist.get_world_size(tp_group) if tp_group is not None else 1
    rank = dist.get_rank(tp_group) if size > 1 else 0
    given = dict(tensors)
    if draft.cfg.reduced_vocab:
        given.pop("t2d", None)
        offsets = given.pop("d2t", None)
        if offsets is None:
            raise ConfigError("policy.draft.model_name: tensor d2t is missing, though draft_vocab_size < vocab_size")
        draft.target_ids_U.copy_(offsets + torch.arange(offsets.shape[0]))
    for name, parameter, split_dim in _parameters(draft):
        if name not in given:
            raise ConfigError(f"policy.draft.model_name: tensor {name} is missing from the draft checkpoint")
        tensor = given.pop(name)
        want = list(parameter.shape)
        if split_dim is not None:
            want[split_dim] *= size
        if list(tensor.shape) != want:
            raise ConfigError(
                f"policy.draft.model_name: tensor {name} has shape {list(tensor.shape)}, the draft needs {want}"
            )
        parameter.copy_(tensor if split_dim is None else tensor.chunk(size, dim=split_dim)[rank])
    if given:
        kind = {"dflash": "DFlash", "dspark": "DSpark"}[draft.cfg.kind]
        raise ConfigError(f"policy.draft.model_name: tensor {sorted(given)[0]} is not part of this {kind} draft")
