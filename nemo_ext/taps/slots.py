"""Landing slots: where a message lies in memory, and the header that says which message it is.

A slot is a header of `HEADER_BYTES`, then the rows, `[rows, H]` of the plan's dtype, as many as the message has. A
stream's slots lie one after the other; message n of a stream goes to slot n mod slots.
"""

from collections.abc import Sequence

import torch

from nemo_ext.taps.errors import PlanMismatch
from nemo_ext.taps.plan import Message, Stream, TapPlan

HEADER_BYTES = 64
_ALIGNMENT = 128
_FIELDS = ("sequence number", "step", "microbatch", "stream", "rows")


def header(message: Message) -> list[int]:
    """The header's words. The first is never 0, so a cleared slot holds no message."""
    return [message.sequence + 1, message.step, message.microbatch, message.stream.index, message.rows, 0, 0, 0]


class SlotRings:
    """Slots of some streams in one byte buffer.

    Args:
        streams: whose slots these are.
        plan: width and dtype of the rows.
        spare: slots beyond `stream.slots`, for transports whose credits travel later than the gradients.
    """

    def __init__(self, streams: Sequence[Stream], plan: TapPlan, spare: int = 0):
        self.streams, self._dtype, self._width = tuple(streams), plan.dtype, plan.width
        self._row_bytes = plan.width * plan.dtype.itemsize
        self._slots: dict[Stream, int] = {}
        self._starts: dict[Stream, int] = {}
        self._strides: dict[Stream, int] = {}
        self.total_bytes = 0
        for stream in streams:
            size = HEADER_BYTES + stream.max_rows * self._row_bytes
            self._strides[stream] = -(-size // _ALIGNMENT) * _ALIGNMENT
            self._slots[stream] = stream.slots + spare
            self._starts[stream] = self.total_bytes
            self.total_bytes += self._strides[stream] * self._slots[stream]

    def slots(self, stream: Stream) -> int:
        """How many slots a stream has."""
        return self._slots[stream]

    def offset(self, message: Message) -> int:
        """First byte of the message's slot."""
        stream = message.stream
        return self._starts[stream] + message.sequence % self._slots[stream] * self._strides[stream]

    def size(self, message: Message) -> int:
        """Bytes of header and rows."""
        return HEADER_BYTES + message.rows * self._row_bytes

    def header_of(self, buffer: torch.Tensor, message: Message) -> torch.Tensor:
        """View of the slot's header, int64 `[8]`."""
        start = self.offset(message)
        return buffer[start : start + HEADER_BYTES].view(torch.int64)

    def rows_of(self, buffer: torch.Tensor, message: Message) -> torch.Tensor:
        """View of the slot's rows, `[rows, H]`."""
        start = self.offset(message) + HEADER_BYTES
        end = start + message.rows * self._row_bytes
        return buffer[start:end].view(self._dtype).view(message.rows, self._width)

    def bytes_of(self, buffer: torch.Tensor, message: Message) -> torch.Tensor:
        """View of the whole message, `[bytes]`."""
        start = self.offset(message)
        return buffer[start : start + self.size(message)]

    def fill(self, buffer: torch.Tensor, message: Message, rows: torch.Tensor) -> None:
        """Writes rows, then the header, into the message's slot."""
        self.rows_of(buffer, message).copy_(rows, non_blocking=True)
        self.header_of(buffer, message).copy_(torch.tensor(header(message)))

    def check(self, buffer: torch.Tensor, message: Message) -> None:
        """Raises PlanMismatch unless the slot's header is the message's."""
        self.compare(self.header_of(buffer, message).tolist(), message)

    @staticmethod
    def compare(found: list[int], message: Message) -> None:
        """Raises PlanMismatch, telling what differs, unless the header's words are the message's."""
        wanted = header(message)
        if found != wanted:
            told = ", ".join(
                f"{name} {theirs} instead of {ours}"
                for name, theirs, ours in zip(_FIELDS, found, wanted, strict=False)
                if theirs != ours
            )
            raise PlanMismatch(f"{message}: what arrived has {told}; all stages must get the same microbatches")
