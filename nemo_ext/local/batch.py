"""Samples of one optimizer step, and the packed microbatches that a rank trains on.

Legend: R rows of the whole padded pack, T rows of this rank.
"""

import math
from dataclasses import dataclass

import torch

from nemo_ext.layout import PackedLayout


@dataclass
class Sample:
    """One prompt with one response. `log_probs` are the sampler's, of the response tokens under the sampling distribution."""

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    advantage: float = 0.0
    mask: float = 1.0  # 0 leaves the sample out of both losses

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class StepPlan:
    """What one optimizer step does: which loss the policy has, and which of the two models learn."""

    loss: str  # "grpo" or "supervised"
    train_policy: bool = True
    train_draft: bool = True
    number: int = 0  # of the step in its run: what is drawn at random hangs on it


@dataclass
class Microbatch:
    """One pack. The `_R` are full-pack row vectors, aligned with the token that is predicted."""

    layout: PackedLayout
    sample_ids: list[int]  # of each sequence: its sample's place in the global batch, the same in every parallel layout
    tokens_R: torch.Tensor
    label_mask_R: torch.Tensor  # float, 1 on tokens that are trained on
    advantage_R: torch.Tensor
    sampler_log_prob_R: torch.Tensor

    def next_token(self, x_R: torch.Tensor, fill=0) -> torch.Tensor:
        """`x` of the token after each of this rank's rows, `[T]`; `fill` where the sequence ends."""
        halo = self.layout.halo(1)
        index_T = halo.index(1)
        return torch.where(index_T >= 0, x_R[halo.rows][index_T.clamp(min=0)], fill)


def microbatches(
    samples: list[Sample],
    *,
    packed: bool,
    max_tokens: int,
    max_sequences: int,
    cp_size: int,
    cp_rank: int,
    pad_multiple: int,
    count_multiple: int = 1,
    first: int = 0,
    stride: int = 1,
) -> list[Microbatch]:
    """Cuts samples into microbatches, in order, as many as a multiple of `count_multiple` (virtual stages want that).

    Packed: as many sequences as fit into `max_tokens` padded rows, a sequence that is longer alone. Not packed:
    `max_sequences` at a time, all padded to the longest, which is a pack whose padding multiple is that length. The samples
    are those at `first`, `first + stride`, ... of the global batch.
    """
    unit = math.lcm(2 * cp_size, pad_multiple)
    groups: list[list[Sample]] = [[]]
    for sample in samples:
        group = groups[-1]
        rows = sum(-(-len(each) // unit) * unit for each in [*group, sample])
        full = rows > max_tokens if packed else len(group) == max_sequences
        if group and full:
            groups.append([])
        groups[-1].append(sample)
    while len(groups) % count_multiple:
        groups.append([Sample([0], [0], [0.0], mask=0.0)])
    made, place = [], 0
    for group in groups:
        sample_ids = [first + stride * (place + i) for i in range(len(group))]
        place += len(group)
        multiple = pad_multiple
        if not packed:
            multiple = -(-max(map(len, group)) // unit) * unit
        layout = PackedLayout([len(s) for s in group], cp_size=cp_size, cp_rank=cp_rank, pad_multiple=multiple)
        made.append(
            Microbatch(
                layout,
                sample_ids,
                layout.pack([torch.tensor(s.prompt + s.response) for s in group]),
                layout.pack([_on_response(s, [s.mask] * len(s.response)) for s in group]),
                layout.pack([_on_response(s, [s.advantage] * len(s.response)) for s in group]),
                layout.pack([_on_response(s, s.log_probs) for s in group]),
            )
        )
    return made


def _on_response(sample: Sample, values: list[float]) -> torch.Tensor:
    return torch.tensor([0.0] * len(sample.prompt) + list(values), dtype=torch.float32)
