"""How NeMo-RL 0.7 brings taps to the draft (`models/megatron/draft/hidden_capture.py`), for `nemo-ext bench taps`.

Each tap is cloned and sent by a blocking send, a message with its shape before it, inside the forward step; the last
stage receives them, blocking, inside its own. On CUDA the source's host goes on, but its stream computes nothing more
until the last stage has taken the taps. Gloo has no streams, so the source here waits before its next computation. (A
send that blocked the host would never return: the last stage waits for an activation that comes after it.)

Legend: T rows of this rank, E rows with halo, K taps, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from nemo_ext.taps.hooks import LayerHooks, unwrapped
from nemo_ext.taps.plan import Rows, Stream, TapPlan

_TAG = 71


class BlockingLanding:
    """What a `nemo_ext.taps.Landing` is to the draft."""

    def __init__(self, plan: TapPlan, model: nn.Module):
        self._plan, self._model = plan, model
        self.rows: dict[Stream, torch.Tensor] = {}
        self.hidden: torch.Tensor | None = None

    def taps(self) -> torch.Tensor:
        return torch.cat([self.rows[stream] for stream in self._plan.taps], dim=-1)

    def embedding(self) -> torch.Tensor:
        return self.rows[self._plan.embedding]

    def free(self) -> None:
        """Nothing is kept."""

    def freed_after(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


class BlockingTaps:
    """Has a channel's `step` and `forward`. One chunk a stage."""

    def __init__(self, chunks: Sequence[nn.Module], plan: TapPlan, group: dist.ProcessGroup):
        self._plan, self._group, self._stage = plan, group, group.rank()
        self._hooks = LayerHooks(chunks, plan.of_stage(self._stage), self._take)
        self._made: dict[Stream, torch.Tensor] = {}
        self._pending: list = []

    @contextmanager
    def step(self, rows: Sequence[Rows]) -> Iterator[None]:
        self._hooks.attach()
        try:
            yield
            self.settle()
        finally:
            self._hooks.detach()

    def _take(self, stream: Stream, microbatch: int, rows_TH: torch.Tensor) -> None:
        self._made[stream] = rows_TH.clone()

    @contextmanager
    def forward(self, model: nn.Module, embed: Callable[[], torch.Tensor]) -> Iterator[BlockingLanding | None]:
        self._made = {}
        landing = BlockingLanding(self._plan, unwrapped(model))
        last = self._stage == self._plan.pipeline.last
        if self._plan.embedding.stage == self._stage:
            self._made[self._plan.embedding] = embed().clone()
        handle = None
        if last:
            handle = landing._model.output_layer.register_forward_pre_hook(
                lambda _layer, inputs: setattr(landing, "hidden", inputs[0].detach().flatten(0, 1))
            )
        with self._hooks.forward(0):
            yield landing if last else None
        if handle is not None:
            handle.remove()
        for stream in self._plan.streams:
            if last:
                landing.rows[stream] = self._made[stream] if stream.stage == self._stage else self._receive(stream)
            elif stream.stage == self._stage:
                self._send(self._made[stream])

    def _send(self, rows_TH: torch.Tensor) -> None:
        shape = torch.tensor(rows_TH.shape)
        for message in (shape, rows_TH.contiguous()):
            work = dist.isend(message, group=self._group, group_dst=self._plan.pipeline.last, tag=_TAG)
            self._pending.append((work, message))

    def settle(self) -> None:
        """The source's stream goes on only now."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _receive(self, stream: Stream) -> torch.Tensor:
        shape = torch.zeros(2, dtype=torch.int64)
        dist.recv(shape, group=self._group, group_src=stream.stage, tag=_TAG)
        rows_TH = torch.empty(shape.tolist(), dtype=self._plan.dtype)
        dist.recv(rows_TH, group=self._group, group_src=stream.stage, tag=_TAG)
        return rows_TH
