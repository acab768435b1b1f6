"""One microbatch's taps on the last stage, from the policy's forward to the end of the joint backward.

Legend: T rows of this rank, E rows with halo, K taps, H hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Landing:
    """Given by `TapChannel.forward` on the last stage.

    Attributes:
        hidden: after the forward, what the output layer read, `[T, H]`, detached.
    """

    def __init__(self, channel, microbatch: int):
        self._channel, self._microbatch = channel, microbatch
        self.hidden: torch.Tensor | None = None

    @contextmanager
    def keeps_hidden(self, model: nn.Module) -> Iterator[None]:
        """Around the forward of the last chunk."""

        def take(_layer, inputs):
            self.hidden = inputs[0].detach().flatten(0, 1)

        handle = model.output_layer.register_forward_pre_hook(take)
        try:
            yield
        finally:
            handle.remove()

    def taps(self) -> torch.Tensor:
        """The taps side by side in ascending layer order, `[T, K * H]`. Waits for them."""
        rows = [self._channel.take(stream, self._microbatch) for stream in self._channel.plan.taps]
        return torch.cat(rows, dim=-1)

    def embedding(self) -> torch.Tensor:
        """The embedding rows with halo, `[E, H]`: the slot itself, valid until it is freed. Waits for them."""
        return self._channel.take(self._channel.plan.embedding, self._microbatch)

    def free(self) -> None:
        """Frees the slots now; for a microbatch whose loss has no backward."""
        self._channel.free(self._microbatch)

    def freed_after(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` itself, whose backward frees the slots at its end."""
        return _AfterBackward.apply(loss, self.free)


class _AfterBackward(torch.autograd.Function):
    """The identity; calls a function when the backward that it takes part in is over."""

    @staticmethod
    def forward(ctx, loss: torch.Tensor, done: Callable[[], None]) -> torch.Tensor:
        ctx.done = done
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        torch.autograd.Variable._execution_engine.queue_callback(ctx.done)
        return grad, None
