"""Taps: detached hidden states of chosen decoder layers, on their way to the draft."""

from nemo_ext.taps.channel import TapChannel, TapStats, open_channel
from nemo_ext.taps.errors import PlanMismatch, StageLost, TapError, TapTimeout, TransportUnavailable
from nemo_ext.taps.landing import Landing
from nemo_ext.taps.plan import Rows

__all__ = [
    "Landing",
    "PlanMismatch",
    "Rows",
    "StageLost",
    "TapChannel",
    "TapError",
    "TapStats",
    "TapTimeout",
    "TransportUnavailable",
    "open_channel",
]
