"""Runs Megatron's forward-backward schedules over packs, with or without pipeline stages."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config


class StageLink(P2PCommunicator):
    """Megatron's link between stages, for packs of any length also with 2 stages of several virtual stages.

    There the previous and the next stage are one rank, and messages between two ranks are matched in order. Megatron
    sends a pack's shape to the previous stage first and receives from the previous stage first, so activations and
    gradients would get each other's shape. Here each rank sends onwards first and receives from behind first.
    """

    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        shapes = {peer: torch.zeros(3, dtype=torch.int64) for peer in ("prev", "next")}
        ops = []
        for tensor, rank in ((tensor_send_next, self.next_rank), (tensor_send_prev, self.prev_rank)):
            if tensor is not None:
                ops.append(P2POp(isend, torch.tensor(tensor.shape, dtype=torch.int64), rank, self.pp_group))
        for wanted, peer, rank in ((recv_prev, "prev", self.prev_rank), (recv_next, "next", self.next_rank)):
            if wanted:
                ops.append(P2POp(irecv, shapes[peer], rank, self.pp_group))
        for request in batch_isend_irecv(ops) if ops else ():
            request.wait()
        return shapes["prev"].tolist(), shapes["next"].tolist()


def forward_backward(
    ddp_chunks: Sequence[torch.nn.Module],
    forward_step: Callable,
    microbatches: Sequence[Any],
    groups: ProcessGroupCollection,
    forward_only: bool = False,
) -> list:
    """Runs one batch through Megatron's schedule for this layout, and the backward unless `forward_only`.

    `forward_step(iterator, model)` takes `next(iterator)`, one of `microbatches`, and returns the model's output and a
    function `loss(output) -> (loss, torch.tensor(1, dtype=torch.int), metrics)`, which is called on the last stage.
    `loss` is a numerator over a global denominator: the schedule adds the microbatches' gradients and divides by
    nothing. Every rank passes as many microbatches, and those of one pipeline pass the same ones. Gradients are
    finished by the configuration's `finalize_model_grads_func`.

    Returns the metrics of each microbatch on the last stage, and an empty list on others.
    """
    chunks = list(ddp_chunks)
    config = get_model_config(chunks[0])
    schedule = get_forward_backward_func(groups.pp.size(), config.virtual_pipeline_model_parallel_size)
    staged = {"p2p_communicator": StageLink(groups.pp, config)} if groups.pp.size() > 1 else {}
    return schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in chunks],
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=1,  # stages tell each other the shapes
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=groups,
        **staged,
    )
