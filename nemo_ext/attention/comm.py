"""Tensors on their way round the ring, in flight while the rank computes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


class RingError(RuntimeError):
    """A neighbour in the ring did not deliver."""


class Hop:
    """Tensors being sent on to the next rank while as many of the same shapes come in from the one before.

    The tensors sent must not change before `wait` has returned.
    """

    def __init__(self, sent: Sequence[torch.Tensor], works, received: list[torch.Tensor], told: str):
        self._sent, self._works, self._received, self._told = sent, works, received, told

    def wait(self) -> list[torch.Tensor]:
        """The received tensors. Raises RingError when the neighbours do not answer within the group's timeout."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise RingError(f"{self._told}: {str(error).splitlines()[0]}") from error
        self._sent = self._works = ()
        return self._received


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
        told = (
            f"ring attention, rank {self.rank} of {self.size}, step {step}: no {what} from rank {from_} or to rank {to}"
        )
        ops = [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for x in sent]
        ops += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=from_) for x in received]
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise RingError(f"{told}: {str(error).splitlines()[0]}") from error
        self.bytes_sent += sum(x.numel() * x.element_size() for x in sent)
        return Hop(sent, works, received, told)
