"""A weight refresh of one worker: declared whole, checked, written, and only then published under a version."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from nemo_ext.rollout.draft_model import load_in_place, shared_modules
from nemo_ext.rollout.errors import EngineUnusable, RefreshError
from nemo_ext.rollout.manifest import DRAFT_PREFIX, TensorSpec, check_manifest

IDLE, RECEIVING, LOADED, BROKEN = "idle", "receiving", "loaded", "broken"


class WeightRefresh:
    """begin -> load (any number of buckets) -> finish -> publish.

    begin checks the manifest of the whole stream, so whatever is wrong with it is known before anything is written.
    Policy tensors are written bucket by bucket, so a large policy never lies in memory twice; draft tensors are kept
    and loaded in the one call that their loaders need. A stream that breaks before the first write leaves the old
    weights serving; one that breaks after it leaves weights of no version, and every later call raises EngineUnusable.

    Args:
        target: the served policy, None where only the draft is refreshed here.
        draft: the served draft, or None.
        expected: every tensor that a refresh must bring, by name.
        version: of the weights that are loaded now.
    """

    def __init__(
        self, target: nn.Module | None, draft: nn.Module | None, expected: Mapping[str, TensorSpec], version: int
    ) -> None:
        self.target = target
        self.draft = draft
        self.expected = dict(expected)
        self.version = version
        self.state = IDLE
        self.reason = ""
        self._pending: dict[str, TensorSpec] = {}
        self._draft_tensors: list[tuple[str, torch.Tensor]] = []
        self._written = False

    def begin(self, manifest: Iterable[TensorSpec]) -> None:
        """Declares the stream.

        Raises:
            RefreshError: a tensor is missing, unknown, declared twice, misshaped or of the wrong type, or would be
                loaded through a module that the draft shares with the target.
            EngineUnusable: an earlier refresh broke off.
        """
        self._require(IDLE)
        manifest = list(manifest)
        check_manifest(manifest, self.expected)
        self._check_unshared([spec.name for spec in manifest])
        self._pending = {spec.name: spec for spec in manifest}
        self._draft_tensors = []
        self._written = False
        self.state = RECEIVING

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes one bucket of the declared stream: writes its policy part in place, keeps its draft part.

        Raises:
            RefreshError: a tensor is not the declared one, and nothing has been written yet.
            EngineUnusable: the same, or a failing write, after the first write.
        """
        self._require(RECEIVING)
        tensors = list(tensors)
        self._guard(lambda: self._take(tensors))
        policy = [(name, tensor) for name, tensor in tensors if not name.startswith(DRAFT_PREFIX)]
        # The caller may reuse the memory of its bucket.
        self._draft_tensors += [
            (name.removeprefix(DRAFT_PREFIX), tensor.detach().clone())
            for name, tensor in tensors
            if name.startswith(DRAFT_PREFIX)
        ]
        if policy:
            self._written = True
            self._guard(lambda: self.target.load_weights(iter(policy)))

    def finish(self) -> None:
        """Loads the draft. Until publish, the weights are new and their version still the old one.

        Raises:
            RefreshError: the stream ended early, and nothing has been written yet.
            EngineUnusable: the same after the first write, or the draft's loading failed.
        """
        self._require(RECEIVING)
        self._guard(self._check_complete)
        if self._draft_tensors:
            self._written = True
            self._guard(lambda: load_in_place(self.draft, self._draft_tensors))
        self._draft_tensors = []
        self.state = LOADED

    def publish(self, version: int) -> None:
        """Names the new weights. To be called once nothing computed from the old ones (prefix cache) is left."""
        self._require(LOADED)
        self.version = version
        self.state = IDLE

    def served_version(self) -> int:
        """The published version.

        Raises:
            EngineUnusable: a refresh broke off half written, so the weights are of no version.
        """
        self._require(IDLE, RECEIVING, LOADED)
        return self.version

    def abort(self, reason: str) -> None:
        """Ends a refresh whose sender failed: harmless before the first write, the end of the engine after it."""
        if self.state == RECEIVING:
            self._fail(reason)

    def _take(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            spec = self._pending.pop(name, None)
            if spec is None:
                raise RefreshError(f"weight refresh: {name} came twice, or was not declared")
            if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                raise RefreshError(
                    f"weight refresh: {name} came as {list(tensor.shape)} {tensor.dtype}, "
                    f"declared as {list(spec.shape)} {spec.dtype}"
                )

    def _check_complete(self) -> None:
        if self._pending:
            name = next(iter(self._pending))
            raise RefreshError(
                f"weight refresh: the stream ended without {name} ({len(self._pending)} tensors missing)"
            )

    def _check_unshared(self, names: list[str]) -> None:
        if self.target is None or self.draft is None:
            return
        draft_names = [name.removeprefix(DRAFT_PREFIX) for name in names if name.startswith(DRAFT_PREFIX)]
        shared = shared_modules(self.draft, self.target, draft_names)
        if shared:
            raise RefreshError(
                f"weight refresh: the draft's {shared[0]} is the target's own module, so loading it would change the "
                "target; give the draft one of its own when the engine starts"
            )

    def _guard(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:
            self._fail(str(error))
            if self.state == BROKEN:
                raise EngineUnusable(self.reason) from error
            raise

    def _fail(self, reason: str) -> None:
        self._draft_tensors, self._pending = [], {}
        self.state = IDLE
        if self._written:
            self.state = BROKEN
            self.reason = f"a refresh broke off after weights of version {self.version} were overwritten: {reason}"

    def _require(self, *states: str) -> None:
        if self.state == BROKEN:
            raise EngineUnusable(f"{self.reason}; build the engine anew")
        if self.state not in states:
            raise RefreshError(
                f"weight refresh is {self.state}, which allows no such call; it must be {' or '.join(states)}"
            )
