"""The interface of all transports, and the one way to wait.

A link joins one source stage to the last stage and carries that source's streams. Nothing in it blocks: the channel asks,
waits for a bounded time, and names what is missing. Both ends are told at the start of a step what will be sent.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nemo_ext.taps.errors import TapError, TapTimeout
from nemo_ext.taps.plan import Message


class Outlet(ABC):
    """The source's end of a link. Made from the inlet's `offer`; `answer` goes back to the inlet."""

    answer: Any = None

    def complete(self) -> None:  # noqa: B027
        """The inlet has the answer; its own `complete` runs at the same time."""

    def begin(self, messages: Sequence[Message]) -> None:  # noqa: B027
        """A step begins in which these messages will be sent in this order."""

    @abstractmethod
    def has_room(self, message: Message) -> bool:
        """Whether the message's slot has been freed: the credit is here."""

    @abstractmethod
    def send(self, message: Message, rows_TH: torch.Tensor) -> None:
        """Hands over the rows of a message that has room. They may be overwritten afterwards."""

    def settled(self) -> bool:
        """Whether the last stage will send nothing more, so that closing cannot break its hold of this end."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Gives everything back; safe to call twice and after a failure."""


class Inlet(ABC):
    """The last stage's end of a link. `offer` goes to the source, whose `answer` comes to `complete`."""

    offer: Any = None

    def complete(self, answer: Any) -> None:  # noqa: B027
        """The outlet is there."""

    def begin(self, messages: Sequence[Message]) -> None:  # noqa: B027
        """A step begins in which these messages will arrive in this order."""

    @abstractmethod
    def arrived(self, message: Message) -> bool:
        """Whether the message is in its slot."""

    @abstractmethod
    def rows(self, message: Message) -> torch.Tensor:
        """View of an arrived message's rows, `[rows, H]`, valid until `release`. Raises PlanMismatch if the slot holds
        another message."""

    @abstractmethod
    def release(self, message: Message) -> None:
        """Frees the slot. A stream's messages are freed in the order in which they were sent."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back; safe to call twice and after a failure."""


def wait_until(
    done: Callable[[], bool], timeout_s: float, failure: Callable[[], TapError | None], complaint: Callable[[], str]
) -> float:
    """Polls, ever less often, until `done()`; returns the seconds it took.

    Raises:
        TapError: what `failure()` returned, if it did; TapTimeout with `complaint()` after `timeout_s`.
    """
    if done():
        return 0.0
    start, pause = time.monotonic(), 2e-5
    while not done():
        lost = failure()
        if lost is not None:
            raise lost
        waited = time.monotonic() - start
        if waited > timeout_s:
            raise TapTimeout(f"{complaint()} (waited {waited:.1f} s)")
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)
    return time.monotonic() - start
