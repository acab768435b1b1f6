"""Ray actors of a run: one per policy rank, one for the rollout engine. Nothing outlives the `with` block."""

import logging
import os
import socket

import ray
import torch

from nemo_ext.local.settings import RunConfig
from nemo_ext.rollout.environment import CPU_ENVIRONMENT, REQUIRED_ENVIRONMENT

# One thread per process: ranks and engine share few cores, and threads that wait for each other cost more than they give.
_ENV = {"OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "TOKENIZERS_PARALLELISM": "false"}


@ray.remote
class _PolicyActor:
    """A policy rank. Imports Megatron only in its own process."""

    def __init__(self, config: RunConfig, rank: int, init_method: str):
        from nemo_ext.local.parallel import init_gloo
        from nemo_ext.local.worker import PolicyWorker

        init_gloo(rank, config.cluster.gpus_per_node, init_method)
        self._worker = PolicyWorker(config)

    def call(self, method: str, *args, **kwargs):
        return getattr(self._worker, method)(*args, **kwargs)


@ray.remote
class _EngineActor:
    """The rollout engine. Imports vLLM only in its own process."""

    def __init__(self, kwargs: dict):
        from nemo_ext.rollout.engine import RolloutEngine

        self._engine = RolloutEngine(**kwargs)

    def call(self, method: str, *args, **kwargs):
        return getattr(self._engine, method)(*args, **kwargs)


class PolicyGroup:
    """All policy ranks; a call reaches every rank and returns the answer of the last stage's first rank."""

    def __init__(self, config: RunConfig):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._actors = [
            _PolicyActor.remote(config, rank, f"tcp://127.0.0.1:{port}") for rank in range(config.cluster.gpus_per_node)
        ]
        stages = config.policy.megatron_cfg.pipeline_model_parallel_size
        self._lead = len(self._actors) // stages * (stages - 1)  # Megatron numbers stages slowest

    def start(self, method: str, *args, **kwargs) -> list[ray.ObjectRef]:
        """One reference per rank, without waiting."""
        return [actor.call.remote(method, *args, **kwargs) for actor in self._actors]

    def call(self, method: str, *args, **kwargs):
        return ray.get(self.start(method, *args, **kwargs))[self._lead]

    def lead(self, method: str, *args, **kwargs) -> ray.ObjectRef:
        """Reference to the answer of the last stage's first rank; every rank works on it."""
        return self.start(method, *args, **kwargs)[self._lead]


class EngineHandle:
    """The engine's actor."""

    def __init__(self, kwargs: dict):
        # vLLM's environment must stand before its process imports torch.
        environment = _ENV | (
            REQUIRED_ENVIRONMENT if torch.cuda.is_available() else CPU_ENVIRONMENT | REQUIRED_ENVIRONMENT
        )
        self._actor = _EngineActor.options(runtime_env={"env_vars": environment}).remote(kwargs)

    def start(self, method: str, *args, **kwargs) -> ray.ObjectRef:
        return self._actor.call.remote(method, *args, **kwargs)

    def call(self, method: str, *args, **kwargs):
        return ray.get(self.start(method, *args, **kwargs))


class Cluster:
    """A local Ray instance for one run."""

    def __enter__(self) -> "Cluster":
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # the ranks are the run, not its background
        ray.init(
            num_cpus=64,  # actors take turns; the count must only not hold any of them back
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=512 * 2**20,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": _ENV},
        )
        return self

    def __exit__(self, *exc) -> None:
        ray.shutdown()

    def policy(self, config: RunConfig) -> PolicyGroup:
        return PolicyGroup(config)

    def engine(self, **kwargs) -> EngineHandle:
        return EngineHandle(kwargs)
