"""Starts and ends a policy rank's parallel world: gloo, Megatron's process groups, seeds."""

from dataclasses import dataclass
from datetime import timedelta

import torch

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


@dataclass(frozen=True)
class ParallelSizes:
    """How ranks are split: tensor, pipeline, context and data parallel sizes, and virtual stages per pipeline rank.

    Ranks run fastest over TP, then CP, DP and PP (Megatron's own order), so `tp * cp * dp * pp` ranks are needed.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    vpp: int | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp


def init_gloo(rank: int, world_size: int, init_method: str, timeout_s: float = 300.0) -> None:
    """Joins the default gloo group; `init_method` is torch's (`tcp://host:port` or `file://path`)."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


def init_parallel(sizes: ParallelSizes, seed: int, timeout_s: float = 300.0) -> ProcessGroupCollection:
    """Builds Megatron's process groups over the default group and seeds this rank.

    Returns the collection that everything else takes: `.tp .pp .cp .dp .dp_cp .mp .embd` are the groups that matter
    (`mp` is TP x PP of one model replica, `embd` the pipeline's first and last stage).
    Raises ValueError if the default group has not `sizes.world` ranks.
    """
    world_size = torch.distributed.get_world_size()
    if world_size != sizes.world:
        raise ValueError(
            f"{world_size} ranks were started but tp * pp * cp * dp = "
            f"{sizes.tp} * {sizes.pp} * {sizes.cp} * {sizes.dp} needs {sizes.world}"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp,
        context_parallel_size=sizes.cp,
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return ProcessGroupCollection.use_mpu_process_groups()


def destroy_parallel() -> None:
    """Ends Megatron's process groups; the default gloo group stays. Called by every rank."""
    # Megatron only forgets them: each would keep its threads and sockets for as long as the process lives.
    groups = [group for group in parallel_state._global_process_group_list or () if group is not None]
    parallel_state.destroy_model_parallel()
    for group in groups:
        torch.distributed.destroy_process_group(group)


def destroy_gloo() -> None:
    """Leaves the default gloo group."""
    torch.distributed.destroy_process_group()
