"""What Megatron's pipeline schedules do, as far as taps need it: the order of forwards, and how many are in flight."""

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's shape.

    Attributes:
        stages: pipeline ranks.
        chunks: model chunks (virtual stages) on each; 1 means the plain 1F1B schedule, more the interleaved one.
        group: microbatches that run through one chunk before the next chunk's turn, Megatron's
            `microbatch_group_size_per_vp_stage`; 0 means as many as stages, Megatron's default.
    """

    stages: int
    chunks: int = 1
    group: int = 0

    def __post_init__(self):
        if self.stages < 1 or self.chunks < 1:
            raise ValueError(f"the pipeline has {self.stages} stages of {self.chunks} chunks; both are 1 or more")
        if self.group and self.group < self.stages:
            raise ValueError(
                f"microbatch_group_size_per_vp_stage is {self.group}; with {self.stages} stages it is at least that"
            )

    @property
    def last(self) -> int:
        """The stage that has the draft."""
        return self.stages - 1


def forward_order(pipeline: Pipeline, microbatches: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) of every forward on a stage, in order; all stages have the same."""
    group = pipeline.group or pipeline.stages
    if pipeline.chunks == 1:
        group = max(microbatches, 1)
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(pipeline.chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]


def warmup(pipeline: Pipeline, stage: int) -> int:
    """Forwards (of any chunk) that a stage does before its first backward, unless the batch has fewer."""
    after = pipeline.last - stage
    if pipeline.chunks == 1:
        return after
    return 2 * after + (pipeline.chunks - 1) * (pipeline.group or pipeline.stages)


@cache
def in_flight(pipeline: Pipeline, stage: int, chunk: int) -> int:
    """Most microbatches that a chunk has forwarded and not yet backwarded, the one in its forward included.

    This bounds the landing slots of its taps (contract E.6): a chunk's backward of a microbatch follows the last stage's,
    after which the draft has freed the slot. So whoever starts a forward finds a free slot, whatever the speeds.
    """
    if pipeline.chunks == 1:
        return warmup(pipeline, stage) + 1
    # Three groups show every phase; Megatron takes a last, smaller one of at least as many microbatches as stages.
    group = pipeline.group or pipeline.stages
    batches = [3 * group, *(2 * group + rest for rest in range(pipeline.stages, group))]
    return max(_in_flight(pipeline, stage, chunk, microbatches) for microbatches in batches)


def _in_flight(pipeline: Pipeline, stage: int, chunk: int, microbatches: int) -> int:
    order, ahead = forward_order(pipeline, microbatches), warmup(pipeline, stage)
    most = forwarded = backwarded = 0
    for step, (_, chunk_forward) in enumerate(order):
        forwarded += chunk_forward == chunk
        most = max(most, forwarded - backwarded)
        if step >= ahead:
            # Backwards come in the order of forwards, with the chunks reversed.
            backwarded += pipeline.chunks - 1 - order[step - ahead][1] == chunk
    return most
