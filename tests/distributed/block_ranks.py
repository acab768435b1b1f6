"""What the ranks of `test_block_ranks` run, inside an initialised gloo default group."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nemo_ext.cotrain import Draw
from nemo_ext.drafts.block_hf import export_block
from nemo_ext.layout import PackedLayout
from tests.unit.block_cases import (
    SHAPES,
    export_gradients,
    make_draft,
    make_objective,
    make_pack,
    make_tensors,
    run_objective,
)


@dataclass(frozen=True)
class Case:
    """One draft on one pack; everything follows from these."""

    shape: str
    lengths: list[int]
    seed: int = 0
    trained: float = 0.7
    pad_multiple: int = 1
    options: dict = field(default_factory=dict)

    @property
    def draw(self) -> Draw:
        return Draw([100 * self.seed + 7 * i for i in range(len(self.lengths))], step=self.seed)


@dataclass(frozen=True)
class Seen:
    """Sums over the context-parallel ranks, gathered over the tensor-parallel ones."""

    loss: torch.Tensor
    sums: torch.Tensor
    gradients: dict[str, torch.Tensor]
    blocks: list[int]  # of each context-parallel rank


def run_cases(rank, world_size, cases: list[Case], cp: int, tp: int) -> list[Seen] | None:
    """The cases on replicas of `cp * tp` ranks, tensor-parallel ranks next to each other; rank 0 tells."""
    tp_group = cp_group = None
    for first in range(0, world_size, cp * tp):
        for c in range(cp):
            members = list(range(first + c * tp, first + (c + 1) * tp))
            group = dist.new_group(members)
            tp_group = group if rank in members else tp_group
        for t in range(tp):
            members = list(range(first + t, first + cp * tp, tp))
            group = dist.new_group(members)
            cp_group = group if rank in members else cp_group
    seen = [_run(case, tp_group, cp_group) for case in cases]
    return seen if rank == 0 else None


def _run(case: Case, tp_group, cp_group) -> Seen:
    cfg, pack = SHAPES[case.shape], make_pack(case.lengths, seed=case.seed, trained=case.trained)
    layout = PackedLayout(
        case.lengths, cp_size=cp_group.size(), cp_rank=cp_group.rank(), pad_multiple=case.pad_multiple
    )
    draft = make_draft(cfg, make_tensors(cfg, case.seed), tp_group, tp=tp_group.size())
    objective = make_objective(draft, tp_group=tp_group, cp_group=cp_group, **case.options)
    count_S = objective.plan.count(layout, layout.pack(pack.mask), case.draw)
    dist.all_reduce(count_S, group=cp_group)
    head_VH = pack.head_VH.chunk(tp_group.size())[tp_group.rank()]
    got = run_objective(objective, pack, layout, case.draw, head_VH, objective.denominator(count_S))
    got.loss.backward()
    loss, sums = got.loss.detach().clone(), got.sums()
    for total in (loss, sums, *(p.grad for p in draft.parameters())):
        dist.all_reduce(total, group=cp_group)
    blocks = [None] * cp_group.size()
    dist.all_gather_object(
        blocks, len(objective.plan.blocks(layout, layout.pack(pack.mask), case.draw).local_rows_B), group=cp_group
    )
    return Seen(loss, sums, export_gradients(draft, export_block(draft, tp_group)), blocks)
