"""What can go wrong between a tapped layer and the draft. Every message names the stage, and the microbatch and tap where
there is one."""


class TapError(RuntimeError):
    """Taps did not get to the draft."""


class PlanMismatch(TapError):
    """The stages of a pipeline were set up differently, or a message is not the one that the plan says comes next."""


class TapTimeout(TapError):
    """A tap, or the credit to send one, did not come in time."""


class StageLost(TapError):
    """A stage died, or failed and said so."""


class TransportUnavailable(TapError):
    """The transport that was asked for cannot work between these stages."""
