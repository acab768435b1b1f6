"""Taps: detached hidden states of chosen decoder layers, on their way to the draft."""

from nemo_ext.taps.capture import TapCapture

__all__ = ["TapCapture"]
