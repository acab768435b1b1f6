"""Orders and slot counts against Megatron's schedules; the plan's digest; slots in a buffer."""

import dataclasses

import pytest
import torch

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from nemo_ext.taps.errors import PlanMismatch
from nemo_ext.taps.plan import EMBEDDING, Message, make_plan
from nemo_ext.taps.schedule import Pipeline, forward_order, in_flight, warmup
from nemo_ext.taps.slots import HEADER_BYTES, SlotRings, header

OPTIONS = {"width": 4, "dtype": torch.float32, "max_rows": 10, "max_embedding_rows": 12}
SHAPES = [
    (stages, chunks, group)
    for stages in (2, 3, 4)
    for chunks in (1, 2, 3)
    for group in ((0,) if chunks == 1 else (0, stages + 1, 2 * stages))
]


def megatron_peak(pipeline: Pipeline, stage: int, microbatches: int) -> list[int]:
    """Most forwards without their backward, by chunk, when a stage runs Megatron's order of both."""
    table = get_schedule_table(microbatches, pipeline.chunks, pipeline.group or pipeline.stages)
    if pipeline.chunks == 1:
        table = [(microbatch, 0) for microbatch in range(microbatches)]
    ahead = min(warmup(pipeline, stage), len(table))
    events = [("f", chunk) for _, chunk in table[:ahead]]
    for step in range(len(table)):
        if ahead + step < len(table):
            events.append(("f", table[ahead + step][1]))
        events.append(("b", pipeline.chunks - 1 - table[step][1]))
    open_now, most = [0] * pipeline.chunks, [0] * pipeline.chunks
    for kind, chunk in events:
        open_now[chunk] += 1 if kind == "f" else -1
        most[chunk] = max(most[chunk], open_now[chunk])
    return most


@pytest.mark.parametrize("shape", SHAPES)
def test_slots_are_what_the_schedule_needs_and_no_more(shape):
    pipeline = Pipeline(*shape)
    group = pipeline.group or pipeline.stages
    # Those that Megatron's interleaved schedule takes.
    batches = [m for m in range(group, 5 * group + 1) if m % group == 0 or m % group >= pipeline.stages]
    for stage in range(pipeline.stages):
        peaks = [megatron_peak(pipeline, stage, m) for m in batches]
        for chunk in range(pipeline.chunks):
            assert max(peak[chunk] for peak in peaks) == in_flight(pipeline, stage, chunk)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] > 1])
def test_forwards_are_in_megatron_s_order(shape):
    pipeline = Pipeline(*shape)
    for microbatches in range(pipeline.stages, 4 * pipeline.stages):
        wanted = get_schedule_table(microbatches, pipeline.chunks, pipeline.group or pipeline.stages)
        assert forward_order(pipeline, microbatches) == wanted


def test_1f1b_needs_one_slot_more_than_the_stages_after_it():
    assert [in_flight(Pipeline(4), stage, 0) for stage in range(4)] == [4, 3, 2, 1]


def test_streams_name_where_each_tap_is_made():
    plan = make_plan([[[0], [2]], [[1], [3]]], [3, 0, 2], **OPTIONS)
    assert [(s.layer, s.stage, s.chunk) for s in plan.streams] == [(0, 0, 0), (2, 0, 1), (3, 1, 1), (EMBEDDING, 0, 0)]
    assert plan.remote_stages == (0,)
    order = [(microbatch, stream.layer) for microbatch, stream in plan.send_order(0, 2)]
    assert order == [(0, EMBEDDING), (0, 0), (1, EMBEDDING), (1, 0), (0, 2), (1, 2)]


def test_stages_without_taps_have_no_part():
    plan = make_plan([[[0]], [[1]], [[2]], [[3]]], [0, 3], **OPTIONS)
    assert plan.remote_stages == (0,)
    assert plan.of_stage(1) == plan.of_stage(2) == ()
    assert plan.send_order(1, 8) == []


def test_uneven_stages():
    plan = make_plan([[[]], [[0, 1, 2]], [[3]]], [0, 2, 3], **OPTIONS)
    assert [stream.stage for stream in plan.streams] == [1, 1, 2, 0]


def test_a_layer_that_is_not_there():
    with pytest.raises(ValueError, match=r"aux_layer_indices is \[0, 9\], but the pipeline has no layer 9"):
        make_plan([[[0]], [[1]]], [0, 9], **OPTIONS)


@pytest.mark.parametrize(
    "changes",
    [{"width": 8}, {"dtype": torch.bfloat16}, {"max_rows": 11}, {"max_embedding_rows": 13}, {"tap_layers": [1]}],
)
def test_the_digest_sees_every_setting(changes):
    options = {"tap_layers": [0], **OPTIONS}
    layers = [[[0]], [[1]]]
    assert make_plan(layers, **options).digest == make_plan(layers, **options).digest
    assert make_plan(layers, **options).digest != make_plan(layers, **{**options, **changes}).digest


def messages_of(plan, count):
    return [Message(stream, 3, m, m, stream.max_rows - m) for stream in plan.streams for m in range(count)]


def test_slots_do_not_overlap():
    plan = make_plan([[[0, 1]], [[2]]], [0, 1, 2], **OPTIONS)
    rings = SlotRings(plan.streams, plan, spare=1)
    buffer = torch.zeros(rings.total_bytes, dtype=torch.uint8)
    messages = [Message(s, 0, m, m, s.max_rows) for s in plan.streams for m in range(rings.slots(s))]
    for number, message in enumerate(messages):
        rings.fill(buffer, message, torch.full((message.rows, 4), float(number)))
    for number, message in enumerate(messages):
        rings.check(buffer, message)
        assert (rings.rows_of(buffer, message) == number).all()
        assert rings.size(message) == HEADER_BYTES + message.rows * 16


def test_messages_take_their_stream_s_slots_in_turn():
    plan = make_plan([[[0]], [[1]]], [0, 1], **OPTIONS)
    rings = SlotRings(plan.streams, plan)
    stream = plan.streams[0]
    starts = [rings.offset(Message(stream, 0, n, n, 1)) for n in range(5)]
    assert stream.slots == 2 and starts == [starts[0], starts[1]] * 2 + [starts[0]] and starts[0] != starts[1]


@pytest.mark.parametrize("field, told", [("step", "step 3"), ("microbatch", "microbatch 0"), ("rows", "rows 10")])
def test_another_message_is_told(field, told):
    plan = make_plan([[[0]], [[1]]], [0, 1], **OPTIONS)
    message = messages_of(plan, 1)[0]
    other = dataclasses.replace(message, **{field: 7})
    with pytest.raises(PlanMismatch, match=f"{told} instead of 7"):
        SlotRings.compare(header(message), other)
