"""The plan: which tap leaves which stage, in what order, into how many slots. Every stage makes the same one."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from nemo_ext.taps.errors import PlanMismatch
from nemo_ext.taps.schedule import Pipeline, forward_order, in_flight

EMBEDDING = -1  # stands for a layer number


@dataclass(frozen=True)
class Stream:
    """One tapped layer's rows, or the embedding rows, of every microbatch.

    Attributes:
        index: place in `TapPlan.streams`.
        layer: global decoder layer from 0, or `EMBEDDING`.
        stage, chunk: where it is made.
        slots: microbatches that can wait on the last stage, or be in the draft, at once.
        max_rows: rows of the largest microbatch.
    """

    index: int
    layer: int
    stage: int
    chunk: int
    slots: int
    max_rows: int

    @property
    def name(self) -> str:
        return "the embedding rows" if self.layer == EMBEDDING else f"the tap of layer {self.layer}"


@dataclass(frozen=True)
class Rows:
    """Rows of one microbatch on one rank: of each tap, and of the embedding (own rows and halo)."""

    taps: int
    embedding: int


@dataclass(frozen=True)
class Message:
    """One stream's rows of one microbatch. `sequence` counts a stream's messages since the channel was opened."""

    stream: Stream
    step: int
    microbatch: int
    sequence: int
    rows: int

    def __str__(self) -> str:
        return f"{self.stream.name}, step {self.step}, microbatch {self.microbatch}, from stage {self.stream.stage}"


@dataclass(frozen=True)
class TapPlan:
    """Made by `make_plan`. `streams` are the taps in ascending layer order, then the embedding; `width` is H."""

    pipeline: Pipeline
    streams: tuple[Stream, ...]
    width: int
    dtype: torch.dtype

    @cached_property
    def fields(self) -> dict:
        """Everything that must be equal on all stages, as plain data."""
        fields = asdict(self)
        fields["dtype"] = str(self.dtype)
        return fields

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan."""
        return hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()

    @property
    def taps(self) -> tuple[Stream, ...]:
        return self.streams[:-1]

    @property
    def embedding(self) -> Stream:
        return self.streams[-1]

    def of_stage(self, stage: int) -> tuple[Stream, ...]:
        """What a stage makes."""
        return tuple(stream for stream in self.streams if stream.stage == stage)

    @property
    def remote_stages(self) -> tuple[int, ...]:
        """Stages that send to the last."""
        return tuple(sorted({stream.stage for stream in self.streams} - {self.pipeline.last}))

    def send_order(self, stage: int, microbatches: int) -> list[tuple[int, Stream]]:
        """(microbatch, stream) of everything that a stage sends in one step, in order."""
        made = sorted(self.of_stage(stage), key=lambda stream: stream.layer)
        return [
            (microbatch, stream)
            for microbatch, chunk in forward_order(self.pipeline, microbatches)
            for stream in made
            if stream.chunk == chunk
        ]


def make_plan(
    layers: Sequence[Sequence[Sequence[int]]],
    tap_layers: Sequence[int],
    *,
    width: int,
    dtype: torch.dtype,
    max_rows: int,
    max_embedding_rows: int,
    group: int = 0,
) -> TapPlan:
    """The plan of a pipeline.

    Args:
        layers: global numbers from 0 of the decoder layers, by stage and chunk.
        tap_layers: layers whose output is tapped, ascending.
        width, dtype: of hidden rows and embedding rows.
        max_rows, max_embedding_rows: rows of the largest microbatch on one rank, without and with halo.
        group: Megatron's `microbatch_group_size_per_vp_stage`; 0 for its default.

    Raises:
        ValueError: for a tapped layer that no stage has.
    """
    pipeline = Pipeline(len(layers), len(layers[0]), group if len(layers[0]) > 1 else 0)
    place = {
        layer: (stage, chunk)
        for stage, chunks in enumerate(layers)
        for chunk, numbers in enumerate(chunks)
        for layer in numbers
    }
    missing = [layer for layer in tap_layers if layer not in place]
    if missing:
        raise ValueError(
            f"policy.draft.aux_layer_indices is {list(tap_layers)}, but the pipeline has no layer {missing[0]}; "
            f"its layers are {min(place)} to {max(place)}"
        )
    sources = [(layer, *place[layer], max_rows) for layer in sorted(tap_layers)]
    sources.append((EMBEDDING, 0, 0, max_embedding_rows))
    streams = [
        Stream(index, layer, stage, chunk, in_flight(pipeline, stage, chunk), rows)
        for index, (layer, stage, chunk, rows) in enumerate(sources)
    ]
    return TapPlan(pipeline, tuple(streams), width, dtype)


def agree(make: Callable[[], TapPlan], group: dist.ProcessGroup) -> TapPlan:
    """Makes the plan on every stage and compares the digests; collective over the pipeline group.

    Raises:
        ValueError: what `make` raised, on every stage.
        PlanMismatch: on every stage, naming the stages and what they do not agree on.
    """
    error = plan = None
    try:
        plan = make()
        mine = (plan.digest, plan.fields, None)
    except ValueError as raised:
        error = raised
        mine = (None, None, str(raised))
    theirs: list = [mine] * group.size()
    if group.size() > 1:
        dist.all_gather_object(theirs, mine, group=group)
    if error is not None:
        raise error
    for stage, (_, _, complaint) in enumerate(theirs):
        if complaint is not None:
            raise ValueError(f"stage {stage}: {complaint}")
    for stage, (digest, fields, _) in enumerate(theirs):
        if digest != theirs[-1][0]:
            raise PlanMismatch(
                f"stage {stage} has another tap plan than the last stage, {group.size() - 1}: "
                f"{'; '.join(_differences(fields, theirs[-1][1]))}; policy.draft and the sizes must be equal on all ranks"
            )
    return plan


def _differences(a, b, path: str = "") -> list[str]:
    """`path is x and y` for every leaf that differs."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [line for key in keys for line in _differences(a.get(key), b.get(key), f"{path}.{key}".lstrip("."))]
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return [line for i, (x, y) in enumerate(zip(a, b, strict=True)) for line in _differences(x, y, f"{path}[{i}]")]
    return [] if a == b else [f"{path} is {a} and {b}"]
