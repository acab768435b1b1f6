"""Tensors on their way round the ring, in flight while the rank computes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from nemo_ext.layout import LayoutMismatch, PackedLayout


class RingError(RuntimeError):
    """A neighbour in the ring did not deliver."""


class Hop:
    """Tensors being sent on to the next rank while as many of the same shapes come in from the one before.

    The tensors sent must not change before `wait` has returned.
    """

    def __init__(self, sent: Sequence[torch.Tensor], received: list[torch.Tensor], works, failures: Sequence[str]):
        self._sent, self._received = sent, received
        self._works, self._failures = works, failures  # and what to say when that work fails

    def wait(self) -> list[torch.Tensor]:
        """The received tensors, once. Raises RingError when a neighbour does not answer within the group's timeout."""
        for work, failure in zip(self._works, self._failures, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise RingError(f"{failure}: {_cause(error)}") from error
        received = self._received
        # Not held any longer than the caller holds them.
        self._sent = self._received = self._works = self._failures = ()
        return received


class RingComm:
    """This rank's two neighbours in a process group.

    Attributes:
        size, rank: of the group.
        bytes_sent: counted here, tensor by tensor.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.bytes_sent = 0

    def pass_on(self, tensors: Sequence[torch.Tensor], step: int, what: str) -> Hop:
        """Starts to send to the next rank and to receive from the one before. `what` and `step` are for the error."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return self.swap(tensors, after, before, step, what)

    def swap(self, tensors: Sequence[torch.Tensor], to: int, from_: int, step: int, what: str) -> Hop:
        """Starts to send to one rank of the group and to receive as much from another."""
        sent = [x.contiguous() for x in tensors]
        received = [torch.empty_like(x) for x in sent]
        ops = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=from_) for x in received]
        ops += [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for x in sent]
        here = f"ring attention, rank {self.rank} of {self.size}, step {step}"
        failures = [f"{here}: no {what} from rank {from_}"] * len(sent)
        failures += [f"{here}: rank {to} did not take {what}"] * len(sent)
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise RingError(f"{here}: no {what} from rank {from_} or to rank {to}: {_cause(error)}") from error
        if len(works) != len(ops):  # NCCL makes one work of a batch
            failures = [f"{here}: no {what} from rank {from_} or to rank {to}"] * len(works)
        self.bytes_sent += sum(x.numel() * x.element_size() for x in sent)
        return Hop(sent, received, works, failures)


def ring_comm(layout: PackedLayout, group: dist.ProcessGroup | None) -> RingComm | None:
    """The layout's neighbours in the group, all of which hold the same pack; None for one rank.

    Raises:
        ValueError: if layout and group do not belong together.
        LayoutMismatch: if the ranks were given different packs.
        RingError: if a rank does not say which pack it holds.
    """
    if layout.cp_size > 1:
        if group is None:
            raise ValueError(
                f"the layout is for {layout.cp_size} context-parallel ranks but group is None; pass the group"
            )
        try:
            layout.agree(group)
        except LayoutMismatch:
            raise
        except RuntimeError as error:
            told = f"ring attention, rank {layout.cp_rank} of {layout.cp_size}, before step 0: a rank is missing"
            raise RingError(f"{told}: {_cause(error)}") from error
        return RingComm(group)
    if group is not None and group.size() != 1:
        raise ValueError(f"the layout is for one rank but the group has {group.size()}; make it with that cp_size")
    return None


def _cause(error: RuntimeError) -> str:
    """The transport's own words, without its source line and its advice."""
    return str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
