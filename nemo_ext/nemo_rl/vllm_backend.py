"""NeMo-RL's vLLM worker extension with whole refits: the policy by upstream's own loaders, the draft in one call at the end."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension
from torch import nn

from nemo_ext.rollout.draft_model import find_draft_model, unshare, verify_loading
from nemo_ext.rollout.errors import EngineUnusable, RefreshError
from nemo_ext.rollout.manifest import DRAFT_PREFIX, TensorSpec
from nemo_ext.rollout.refresh import WeightRefresh


class DraftWorkerExtension(VllmInternalWorkerExtension):
    """Given to vLLM by path as `worker_extension_cls`."""

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Takes the names, shapes and types of all refits to come, and sees that the draft can take its part.

        Raises:
            RefreshError: the trainer sends no draft, the engine serves none, or the two do not have the same tensors;
                or CUDA graphs were captured while the draft shared its head with the policy.
        """
        super().prepare_refit_info(state_dict_info)
        manifest = [TensorSpec(name, tuple(shape), dtype) for name, (shape, dtype) in state_dict_info.items()]
        draft_specs = [spec for spec in manifest if spec.name.startswith(DRAFT_PREFIX)]
        target, draft = self.model_runner.get_model(), find_draft_model(self)
        if draft is None or not draft_specs:
            raise RefreshError(
                f"the engine serves {'no' if draft is None else 'a'} draft and refits bring {len(draft_specs)} draft "
                "tensors; policy.draft.enabled and speculative_config go together"
            )
        shapes = {spec.name.removeprefix(DRAFT_PREFIX): spec.shape for spec in draft_specs}
        with torch.no_grad():
            shared = unshare(draft, target, shapes, shapes)
            if shared and not self.vllm_config.model_config.enforce_eager:
                raise RefreshError(
                    f"the draft's {shared[0]} was the policy's own when CUDA graphs were captured, which keep reading it; "
                    "set policy.generation.vllm_cfg.enforce_eager to true or start from a draft whose head differs"
                )
            # Names and shapes are all that is known before the first refit; zeros show whether they load whole.
            zeros = [(name, torch.zeros(shape, dtype=_dtype(draft_specs, name))) for name, shape in shapes.items()]
            verify_loading(draft, target, zeros)
        self._draft_manifest = manifest
        self._draft_refresh = WeightRefresh(
            _UpstreamLoader(target, super()._load_weights), draft, {spec.name: spec for spec in manifest}, version=0
        )

    def update_weights_via_ipc_zmq(self) -> bool:
        """One refit through CUDA IPC (colocated generation). False after an error, which is in the log."""
        return self._whole_refit(super().update_weights_via_ipc_zmq)

    def update_weights_from_collective(self) -> bool:
        """One refit through NCCL broadcasts (generation on GPUs of its own). False after an error."""
        return self._whole_refit(super().update_weights_from_collective)

    def weights_version(self) -> int:
        """Number of whole refits so far: the version of policy and draft alike. Raises EngineUnusable after a torn one."""
        return self._draft_refresh.served_version()

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """One bucket of a refit; upstream's transports call this."""
        with torch.no_grad():
            self._draft_refresh.load(weights)

    def _whole_refit(self, transport: Callable[[], bool]) -> bool:
        refresh = self._draft_refresh
        try:
            refresh.begin(self._draft_manifest)
            if not transport():
                refresh.abort("the transport failed")
                return False
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the transport's buckets were taken on streams of its own
            with torch.no_grad():
                refresh.finish()
            refresh.publish(refresh.version + 1)
        except (RefreshError, EngineUnusable) as error:
            print(f"[draft] {type(error).__name__}: {error}", flush=True)
            return False
        except BaseException as error:
            refresh.abort(f"{type(error).__name__}: {error}")
            raise
        return True


class _UpstreamLoader:
    """The policy's model as WeightRefresh sees it, loaded by upstream's `_load_weights` (FP8, renamed weights)."""

    def __init__(self, model: nn.Module, load: Callable[[list], None]):
        self._model, self._load = model, load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._load(list(weights))

    def __getattr__(self, name: str):
        return getattr(self._model, name)


def _dtype(specs: Iterable[TensorSpec], name: str) -> torch.dtype:
    return next(spec.dtype for spec in specs if spec.name == DRAFT_PREFIX + name)
