"""NeMo-RL's vLLM worker extension with whole refits: the policy by upstream's own loaders, the draft in one call at the end."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension
from torch import nn

from nemo_ext.rollout.draft_model import find_draft_model, shared_modules, unshare, verify_loading
from nemo_ext.rollout.errors import EngineUnusable, RefreshError
from nemo_ext.rollout.manifest import DRAFT_PREFIX, TensorSpec
from nemo_ext.rollout.refresh import WeightRefresh


class DraftWorkerExtension(VllmInternalWorkerExtension):
    """Given to vLLM by path as `worker_extension_cls`."""

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Takes the names, shapes and types of all refits to come. Touches no weight: a colocated engine sleeps meanwhile.

        Raises:
            RefreshError: the trainer sends no draft, or the engine serves none; or CUDA graphs were captured while the
                draft shared its head with the policy.
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
        shared = shared_modules(draft, target, [spec.name.removeprefix(DRAFT_PREFIX) for spec in draft_specs])
        if shared and not self.vllm_config.model_config.enforce_eager:
            raise RefreshError(
                f"the draft's {shared[0]} was the policy's own when CUDA graphs were captured, which keep reading it; "
                "set policy.generation.vllm_cfg.enforce_eager to true or start from a draft whose head differs"
            )
        self._draft_manifest, self._draft_is_ready = manifest, False
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

    def _make_ready(self) -> None:
        """Before the first refit, when the weights are awake: sees that the draft can take its part.

        Raises RefreshError if the announced tensors are not the draft's.
        """
        if self._draft_is_ready:
            return
        target, draft = self.model_runner.get_model(), find_draft_model(self)
        specs = [spec for spec in self._draft_manifest if spec.name.startswith(DRAFT_PREFIX)]
        # Names and shapes are all that is known before the first refit; zeros show whether they load whole.
        zeros = {spec.name.removeprefix(DRAFT_PREFIX): torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs}
        shapes = {name: tuple(tensor.shape) for name, tensor in zeros.items()}
        unshare(draft, target, shapes, shapes)
        verify_loading(draft, target, zeros.items())
        self._draft_is_ready = True

    def _whole_refit(self, transport: Callable[[], bool]) -> bool:
        refresh = self._draft_refresh
        try:
            with torch.no_grad():
                self._make_ready()
            refresh.begin(self._draft_manifest)
            if not transport():
                refresh.abort("the transport failed")
                print(f"[draft] the refit broke off: {refresh.reason or 'nothing was written'}", flush=True)
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
