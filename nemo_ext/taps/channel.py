"""TapChannel: one pipeline rank's part in bringing taps and embedding rows to the draft on the last stage.

    channel = open_channel(chunks, tap_layers, pp_group, ...)
    with channel.step(rows_of_each_microbatch):      # around Megatron's schedule
        # in the schedule's forward step, on every stage and for every chunk:
        with channel.forward(model, embed) as landing:
            output = model(...)
        # in the loss function, which runs on the last stage only:
        draft_loss = f(landing.taps(), landing.embedding(), landing.hidden)
        loss = landing.freed_after(policy_loss + draft_loss)

Outside a step, `forward` does nothing, so evaluation may share the forward step.

Legend: T rows of this rank, E rows with halo, K taps, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from nemo_ext.taps.connect import Links, connect, in_step
from nemo_ext.taps.errors import PlanMismatch, TapError
from nemo_ext.taps.hooks import LayerHooks, layer_numbers, unwrapped
from nemo_ext.taps.landing import Landing
from nemo_ext.taps.plan import Message, Rows, Stream, TapPlan, agree, make_plan
from nemo_ext.taps.trace import Trace
from nemo_ext.taps.transport import wait_until

# Both waits are mostly for things that the pipeline's own traffic has overtaken already; where the host runs ahead of its
# GPU they last as long as the pipeline takes to fill, first-step compilations included. A stage that died is told at once.
TIMEOUT_S = 120.0
# A silent source starves the others of credit too, by way of the last stage, which alone knows the culprit: it is to
# give up first.
_CREDIT_PATIENCE = 1.4


@dataclass
class TapStats:
    """What this rank's channel did in one step.

    Attributes:
        messages, sent_bytes: sent to the last stage by this stage; rows only.
        write_s: seconds in which hooks copied and handed over.
        credit_wait_s: seconds in which this stage waited for a free slot; 0 in a healthy run.
        tap_wait_s: seconds in which the last stage waited for taps.
    """

    messages: int = 0
    sent_bytes: int = 0
    write_s: float = 0.0
    credit_wait_s: float = 0.0
    tap_wait_s: float = 0.0


def open_channel(
    chunks: Sequence[nn.Module],
    tap_layers: Sequence[int],
    group: dist.ProcessGroup,
    *,
    width: int,
    dtype: torch.dtype,
    max_rows: int,
    max_embedding_rows: int,
    microbatch_group: int = 0,
    transport: str = "auto",
    device: torch.device | str = "cpu",
    timeout_s: float = TIMEOUT_S,
    trace: Trace | None = None,
) -> "TapChannel":
    """Sets up the channel of one pipeline; collective over its group. All but `chunks` must be equal on all stages.

    Args:
        chunks: this stage's model chunks, with a Megatron `decoder` each, wrapped or not.
        tap_layers: global numbers from 0 of the layers whose output is tapped, ascending.
        group: this rank's pipeline group.
        width: H.
        dtype: of the hidden rows.
        max_rows, max_embedding_rows: rows of the largest microbatch on one rank, without and with halo.
        microbatch_group: Megatron's `microbatch_group_size_per_vp_stage`; 0 for its default.
        transport: `policy.draft.tap_transport`.
        device: of the hidden rows.
        timeout_s: bound of the last stage's wait for a tap; a source waits 1.4 times as long for a free slot.
        trace: records writes and waits.

    Raises:
        TapError: on every stage, if the stages do not agree or a transport cannot work.
    """
    chunks = [unwrapped(chunk) for chunk in chunks]
    layers = in_step(group, lambda: [layer_numbers(chunk) for chunk in chunks])
    plan = agree(
        lambda: make_plan(
            layers,
            tap_layers,
            width=width,
            dtype=dtype,
            max_rows=max_rows,
            max_embedding_rows=max_embedding_rows,
            group=microbatch_group,
        ),
        group,
    )
    links = connect(plan, group, transport, torch.device(device))
    return TapChannel(plan, group.rank(), links, chunks, timeout_s=timeout_s, trace=trace)


class TapChannel:
    """Made by `open_channel`. Not for use by several threads. Without `chunks`, rows are handed over by `put` alone."""

    def __init__(
        self,
        plan: TapPlan,
        stage: int,
        links: Links,
        chunks: Sequence[nn.Module] = (),
        *,
        timeout_s: float = TIMEOUT_S,
        trace: Trace | None = None,
    ):
        self.plan, self.stage = plan, stage
        self._links, self._timeout_s = links, timeout_s
        self._trace = trace or Trace()
        self._hooks = LayerHooks(chunks, plan.of_stage(stage) if chunks else (), self.put)
        self._own: dict[tuple[Stream, int], torch.Tensor] = {}  # the last stage's own rows: no copy
        self._rows: Sequence[Rows] | None = None
        self._step = 0
        self._sequence = 0  # of the step's first microbatch
        self._put = 0
        self._freed = 0
        self._error: TapError | None = None
        self.stats = TapStats()

    @property
    def transports(self) -> dict[int, str]:
        """The transport of each stage that sends to the last."""
        return dict(self._links.kinds)

    @property
    def is_last(self) -> bool:
        """Whether this stage has the draft."""
        return self.stage == self.plan.pipeline.last

    # The step

    @contextmanager
    def step(self, rows: Sequence[Rows]) -> Iterator[TapStats]:
        """Around one run of the schedule that trains; `rows` of each microbatch on this rank, the same on all stages.

        Hooks are on only inside. An exception in it is told to the other stages, and ends the channel.

        Raises:
            ValueError: if a microbatch has more rows than a slot.
            StageLost: in place of whatever the loss of another stage made fail here.
        """
        self._check_rows(rows)
        if self._error is not None:
            raise self._error
        monitor = self._links.monitor
        self._rows, self._put, self._freed, self.stats = rows, 0, 0, TapStats()
        try:
            if monitor is not None:
                monitor.busy(True)
            self._begin(len(rows))
            self._hooks.attach()
            yield self.stats
            self._end(len(rows))
        except Exception as error:
            failure = self._failure(error)
            if failure is error:
                raise
            raise failure from error
        finally:
            self._hooks.detach()
            self._own.clear()
            self._rows = None
            if monitor is not None:
                monitor.busy(False)
        self._step += 1
        self._sequence += len(rows)

    def _check_rows(self, rows: Sequence[Rows]) -> None:
        for stream in self.plan.streams:
            for microbatch in range(len(rows)):
                wanted = rows[microbatch].embedding if stream is self.plan.embedding else rows[microbatch].taps
                if wanted > stream.max_rows:
                    raise ValueError(
                        f"microbatch {microbatch} has {wanted} rows for {stream.name}, but its landing slots have "
                        f"{stream.max_rows}; raise policy.sequence_packing.train_mb_tokens or cut the sequences"
                    )

    def _begin(self, microbatches: int) -> None:
        if self._links.outlet is not None:
            self._links.outlet.begin(self._messages(self.stage, microbatches))
        for stage, inlet in self._links.inlets.items():
            inlet.begin(self._messages(stage, microbatches))

    def _end(self, microbatches: int) -> None:
        made = len(self.plan.send_order(self.stage, microbatches))
        if self._put != made:
            raise PlanMismatch(
                f"stage {self.stage} handed over {self._put} of the {made} messages of {microbatches} microbatches; "
                "the step and the schedule must have the same number of microbatches"
            )
        if self.is_last and self._freed != microbatches:
            raise PlanMismatch(
                f"the last stage freed {self._freed} of {microbatches} microbatches' taps; call free() on the landing, "
                "or freed_after(loss), in every loss function"
            )

    def _failure(self, error: Exception) -> Exception:
        """The error to raise for one that ended a step, after telling the others."""
        monitor = self._links.monitor
        if monitor is not None:
            # A dead stage breaks its neighbours' own traffic a moment before its loss is known here.
            lost = monitor.lost if isinstance(error, TapError) else monitor.wait_for_news(1.0)
            if lost is not None:
                error = lost
            else:
                monitor.fail(f"{type(error).__name__}: {error}")
        self._error = TapError(f"the channel ended in step {self._step} ({error}); open another")
        return error

    def _messages(self, stage: int, microbatches: int) -> list[Message]:
        return [self._message(stream, m) for m, stream in self.plan.send_order(stage, microbatches)]

    def _message(self, stream: Stream, microbatch: int) -> Message:
        rows = self._rows[microbatch]
        return Message(
            stream,
            self._step,
            microbatch,
            self._sequence + microbatch,
            rows.embedding if stream is self.plan.embedding else rows.taps,
        )

    # The sources

    @contextmanager
    def forward(self, model: nn.Module, embed: Callable[[], torch.Tensor] | None = None) -> Iterator[Landing | None]:
        """Around one microbatch's forward of a chunk.

        `embed` gives the embedding rows `[E, H]`; it is called where the embedding lives, and needed only there. Gives
        the microbatch's landing for the last chunk of the last stage, and None elsewhere and outside of a step.
        """
        if self._rows is None:
            yield None
            return
        chunk = self._hooks.chunk_of(model)
        with self._hooks.forward(chunk) as microbatch:
            embedding = self.plan.embedding
            if (embedding.stage, embedding.chunk) == (self.stage, chunk):
                self.put(embedding, microbatch, embed())
            if self.is_last and chunk == self.plan.pipeline.chunks - 1:
                landing = Landing(self, microbatch)
                with landing.keeps_hidden(unwrapped(model)):
                    yield landing
            else:
                yield None

    @torch.no_grad()
    def put(self, stream: Stream, microbatch: int, rows_TH: torch.Tensor) -> None:
        """Hands over one stream's rows of one microbatch, on the stage that makes them."""
        message = self._message(stream, microbatch)
        if tuple(rows_TH.shape) != (message.rows, self.plan.width) or rows_TH.dtype != self.plan.dtype:
            raise PlanMismatch(
                f"{message}: the rows are {list(rows_TH.shape)} of {rows_TH.dtype}, but the step was begun for "
                f"{[message.rows, self.plan.width]} of {self.plan.dtype}"
            )
        self._put += 1
        if self.is_last:
            self._own[stream, microbatch] = rows_TH.detach()
            return
        outlet = self._links.outlet
        with self._guarded(message):
            self.stats.credit_wait_s += wait_until(
                lambda: outlet.has_room(message),
                self._timeout_s * _CREDIT_PATIENCE,
                lambda: self._links.monitor.lost,
                lambda: (
                    f"{message}: no slot came free; the credit for message {message.sequence - stream.slots} of "
                    f"{stream.name} is missing"
                ),
            )
            with self._trace.span("write", stream=stream.name, microbatch=microbatch) as span:
                outlet.send(message, rows_TH.detach())
        self.stats.write_s += span.seconds
        self.stats.messages += 1
        self.stats.sent_bytes += rows_TH.numel() * rows_TH.element_size()

    # The last stage

    def take(self, stream: Stream, microbatch: int) -> torch.Tensor:
        """Rows of a stream, `[T, H]` or `[E, H]`, on the last stage; waits for them. Valid until the microbatch is freed."""
        if stream.stage == self.stage:
            return self._own[stream, microbatch]
        message = self._message(stream, microbatch)
        with self._guarded(message):
            self._await(message)
            return self._links.inlets[stream.stage].rows(message)

    def _await(self, message: Message) -> None:
        inlet = self._links.inlets[message.stream.stage]
        if inlet.arrived(message):
            return
        with self._trace.span("wait", stream=message.stream.name, microbatch=message.microbatch) as span:
            wait_until(
                lambda: inlet.arrived(message),
                self._timeout_s,
                lambda: self._links.monitor.lost,
                lambda: f"{message}: it did not arrive on the last stage",
            )
        self.stats.tap_wait_s += span.seconds

    def free(self, microbatch: int) -> None:
        """Frees the slots of a microbatch on the last stage; microbatches are freed in order."""
        if microbatch != self._freed:
            raise PlanMismatch(
                f"microbatch {microbatch} is freed, but {self._freed} is next; the schedule's order is kept"
            )
        for stream in self.plan.streams:
            if stream.stage == self.stage:
                del self._own[stream, microbatch]
                continue
            message = self._message(stream, microbatch)
            with self._guarded(message):
                self._await(message)
                self._links.inlets[stream.stage].release(message)
        self._freed += 1

    @contextmanager
    def _guarded(self, message: Message) -> Iterator[None]:
        """Names the message, or the stage that was lost, in a transport's own errors."""
        try:
            yield
        except TapError:
            raise
        except Exception as error:  # NIXL's errors have no common base
            lost = self._links.monitor.wait_for_news(1.0)
            kind = self._links.kinds[message.stream.stage]
            raise lost or TapError(f"{message}: transport {kind} failed: {error}") from error

    def close(self) -> None:
        """Gives slots, groups and connections back; safe to call twice and after a failure.

        A source waits for the last stage to be done with what it sent, if nothing failed.
        """
        self._hooks.detach()
        outlet, monitor = self._links.outlet, self._links.monitor
        if outlet is not None and self._error is None:
            with suppress(Exception):  # whatever fails now is no loss: every tap was used or its user is gone
                wait_until(outlet.settled, self._timeout_s, lambda: monitor.lost, lambda: "closing")
        self._links.close()
