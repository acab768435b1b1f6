"""Hooks that keep the tapped layers' outputs of one forward of a model that is whole on this rank.

Legend: T rows, K taps, H hidden size.
"""

import torch
from torch import nn


class TapCapture:
    """Context manager around one policy forward. Hooks come off on every exit, so that neither a recomputed
    forward nor an evaluation pass fires them.

    Args:
        model: Megatron `GPTModel` with its decoder layers and output layer.
        tap_layers: global layer numbers from 0 whose output is tapped, ascending.

    After the forward, `taps()` gives `[T, K * H]` and `hidden` the input of the output layer `[T, H]`.
    """

    def __init__(self, model: nn.Module, tap_layers: tuple[int, ...]):
        self._model = model
        self._layers = {layer.layer_number - 1: layer for layer in model.decoder.layers}
        missing = [i for i in tap_layers if i not in self._layers]
        if missing:
            raise ValueError(
                f"policy.draft.aux_layer_indices has {missing[0]}, this stage has layers {sorted(self._layers)}"
            )
        self._tap_layers = tap_layers
        self._taken: dict[int, torch.Tensor] = {}
        self._handles: list = []
        self.hidden: torch.Tensor | None = None

    def __enter__(self) -> "TapCapture":
        for index in self._tap_layers:
            self._handles.append(self._layers[index].register_forward_hook(self._take(index)))
        self._handles.append(self._model.output_layer.register_forward_pre_hook(self._take_hidden))
        return self

    def __exit__(self, *exc) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _take(self, index):
        def hook(module, args, output):
            hidden = output[0] if isinstance(output, tuple) else output
            self._taken[index] = hidden.detach().flatten(0, 1)

        return hook

    def _take_hidden(self, module, args):
        self.hidden = args[0].detach().flatten(0, 1)

    def taps(self) -> torch.Tensor:
        """The taps side by side in ascending layer order, `[T, K * H]`."""
        return torch.cat([self._taken[index] for index in self._tap_layers], dim=-1)
