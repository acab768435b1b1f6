"""Hooks on one stage's tapped decoder layers.

They fire only inside `forward` scopes. A recomputed forward runs in the backward, so outside any scope, and sends
nothing; an evaluation has no scope at all. Which microbatch it is comes from counting a chunk's scopes, since both of
Megatron's schedules take a chunk's microbatches in order; Megatron's own number, which it leaves on the layers, is
compared with it.

Legend: T rows of this rank, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from nemo_ext.taps.errors import PlanMismatch, TapError
from nemo_ext.taps.plan import EMBEDDING, Stream


def unwrapped(model: nn.Module) -> nn.Module:
    """The module with the decoder, inside whatever wraps it (Megatron's DDP, its 16-bit module)."""
    while not hasattr(model, "decoder"):
        model = model.module
    return model


def layer_numbers(chunk: nn.Module) -> list[int]:
    """Global numbers from 0 of a chunk's decoder layers."""
    return [layer.layer_number - 1 for layer in chunk.decoder.layers]


class LayerHooks:
    """Hooks of a stage.

    Args:
        chunks: its unwrapped model chunks.
        streams: what the stage makes; the embedding is none of the hooks' business.
        emit: called with a stream, the microbatch's number in this step and the detached rows `[T, H]`.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        streams: Sequence[Stream],
        emit: Callable[[Stream, int, torch.Tensor], None],
    ):
        self._chunks, self._emit = list(chunks), emit
        self._streams = [stream for stream in streams if stream.layer != EMBEDDING]
        self._handles: list = []
        self._next: list[int] = []
        self._active: int | None = None
        self._seen: set[int] = set()

    def attach(self) -> None:
        """A step begins."""
        self._next = [0] * len(self._chunks)
        for stream in self._streams:
            layers = self._chunks[stream.chunk].decoder.layers
            layer = next(layer for layer in layers if layer.layer_number - 1 == stream.layer)
            self._handles.append(layer.register_forward_hook(self._hook(stream)))

    def detach(self) -> None:
        """A step ended, well or not."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def chunk_of(self, model: nn.Module) -> int:
        """The place of a (wrapped) chunk."""
        chunk = unwrapped(model)
        return next(i for i, own in enumerate(self._chunks) if own is chunk)

    @contextmanager
    def forward(self, chunk: int) -> Iterator[int]:
        """Around one microbatch's forward of a chunk; gives the microbatch's number.

        Raises TapError if a tapped layer was not called in it.
        """
        microbatch = self._next[chunk]
        self._next[chunk] += 1
        self._active, self._seen = chunk, set()
        try:
            yield microbatch
        finally:
            self._active = None
        missing = [s.layer for s in self._streams if s.chunk == chunk and s.layer not in self._seen]
        if missing:
            raise TapError(
                f"layer {missing[0]}, which is tapped, was not called as a module in the forward of microbatch "
                f"{microbatch}; CUDA graphs over layers (cuda_graph_impl) hide it, set it to none"
            )

    def _hook(self, stream: Stream):
        def hook(layer, _inputs, output):
            if self._active != stream.chunk:
                return
            if stream.layer in self._seen:
                raise TapError(f"layer {stream.layer}, which is tapped, was called twice in one forward")
            microbatch = self._next[stream.chunk] - 1
            theirs = getattr(layer, "current_microbatch", microbatch)
            if theirs != microbatch:
                raise PlanMismatch(
                    f"layer {stream.layer} runs microbatch {theirs} but taps are at microbatch {microbatch}; "
                    "every forward of a step needs its own forward scope"
                )
            self._seen.add(stream.layer)
            hidden = output[0] if isinstance(output, tuple) else output
            self._emit(stream, microbatch, hidden.detach().flatten(0, 1))

        return hook
