"""The class that vLLM mixes into its worker (`worker_extension_cls`): refreshes and read-back by collective_rpc."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from nemo_ext.rollout.draft_model import check_reduced_vocabulary, find_draft_model, unshare, verify_loading
from nemo_ext.rollout.errors import RefreshError
from nemo_ext.rollout.manifest import DRAFT_PREFIX, TensorSpec, folder_manifest
from nemo_ext.rollout.readback import digest, read_weight
from nemo_ext.rollout.refresh import WeightRefresh


class RefreshWorkerExtension:
    """vLLM's worker with whole weight refreshes. Errors of the methods are those of WeightRefresh."""

    def prepare_refresh(self, version: int, refresh_draft: bool = True) -> dict:
        """To be called once, after the engine has started and before it serves.

        Reads from the folders of policy and draft what a refresh must bring, gives the draft modules of its own for
        what its folder has, and loads the draft once over poisoned weights to see that every element is written.

        Args:
            version: of the weights in the folders.
            refresh_draft: False keeps the draft as it is; refreshes then bring the policy alone.

        Returns:
            {"tensors": number expected, "unshared": paths of draft modules that vLLM had made the target's}.

        Raises:
            RefreshError: the draft is not found, is not written whole by its folder, has a reduced vocabulary without
                a head, or was captured in graphs while it shared a module; or the model is quantised.
        """
        model_config = self.vllm_config.model_config
        if model_config.quantization is not None:
            raise RefreshError(
                f"quantization is {model_config.quantization}, but a refresh writes plain weights; serve it unquantised"
            )
        target, draft = self.model_runner.get_model(), find_draft_model(self)
        expected = folder_manifest(model_config.model)
        unshared = []
        if draft is not None:
            folder = self.vllm_config.speculative_config.draft_model_config.model
            draft_expected = folder_manifest(folder)
            shapes = {name: spec.shape for name, spec in draft_expected.items()}
            unshared = unshare(draft, target, shapes, shapes)
            if unshared and not model_config.enforce_eager:
                raise RefreshError(
                    f"the draft's {unshared[0]} was the target's own when CUDA graphs were captured, which keep "
                    "reading it; set enforce_eager to true or start from a draft whose tensor differs from the target's"
                )
            check_reduced_vocabulary(draft, target)
            verify_loading(draft, target, folder_tensors(folder))
            if refresh_draft:
                expected |= folder_manifest(folder, DRAFT_PREFIX)
        self._refresh = WeightRefresh(target, draft, expected, version)
        return {"tensors": len(expected), "unshared": unshared}

    def begin_refresh(self, manifest: list[TensorSpec]) -> None:
        """Declares and checks the whole stream. Nothing is written yet."""
        self._refresh.begin(manifest)

    def load_bucket(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Takes the next tensors of the declared stream, in any order."""
        with torch.no_grad():
            self._refresh.load(tensors)

    def finish_refresh(self) -> None:
        """Ends the stream and loads the draft. The prefix cache must be emptied before publish_weights."""
        with torch.no_grad():
            self._refresh.finish()

    def publish_weights(self, version: int) -> None:
        """The new weights get their version."""
        self._refresh.publish(version)

    def abort_refresh(self, reason: str) -> None:
        """The sender failed."""
        self._refresh.abort(reason)

    def weights_version(self) -> int:
        """The version that serves. Raises EngineUnusable after a refresh that broke off half written."""
        return self._refresh.served_version()

    def correct_sampler(self) -> list[str]:
        """Applies sampler_fix in the worker's process, on CPU only; returns the names of what it replaced."""
        if self.device.type != "cpu":
            return []
        from vllm.v1.sample import rejection_sampler

        from nemo_ext.rollout.sampler_fix import correct_sampler

        return correct_sampler(rejection_sampler)

    def seed_sampling(self, seed: int) -> None:
        """Seeds the generators from which the worker draws proposals, acceptances and tokens."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # vLLM's newer runner draws seeds of requests from it

    def read_weights(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Copies of served tensors by name (see readback.read_weight)."""
        target, draft = self.model_runner.get_model(), find_draft_model(self)
        return {name: read_weight(target, draft, name) for name in names}

    def state_digest(self) -> dict[str, str | None]:
        """SHA-256 of all served weights: {"policy": hex, "draft": hex or None}."""
        draft = find_draft_model(self)
        return {"policy": digest(self.model_runner.get_model()), "draft": None if draft is None else digest(draft)}


def folder_tensors(folder: str) -> Iterable[tuple[str, torch.Tensor]]:
    """All tensors of a folder's safetensors files."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        yield from load_file(file).items()
