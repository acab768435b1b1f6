"""NeMo-RL's Megatron policy worker with a draft that trains along.

Upstream's own draft is off in everything that it sees. What is overridden here adds the draft to it: to training steps,
to refits, to checkpoints, and to the moves between GPU and host.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import ray
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from nemo_ext.nemo_rl.config import draft_settings
from nemo_ext.nemo_rl.draft_folder import draft_of_folder
from nemo_ext.nemo_rl.draft_state import (
    Parking,
    move_draft,
    move_draft_optimizer,
    read_draft,
    restore_optimizer,
    save_draft,
    saved_draft,
)
from nemo_ext.nemo_rl.draft_trainer import DraftTrainer
from nemo_ext.nemo_rl.microbatches import DraftBatch, draft_batches, max_pack_rows
from nemo_ext.rollout.manifest import DRAFT_PREFIX


class DraftPolicyWorkerImpl(MegatronPolicyWorkerImpl):
    """The worker without Ray's decorator, to be made and subclassed as upstream's is."""

    _draft: DraftTrainer | None = None  # upstream's __init__ moves the model before there is a draft

    def __init__(
        self,
        config,
        tokenizer,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        **kwargs: Any,
    ):
        super().__init__(
            without_draft(config),
            tokenizer,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
            init_optimizer=init_optimizer,
            init_reference_model=init_reference_model,
            **kwargs,
        )
        self._add_draft(config, weights_path, optimizer_path, train=init_optimizer)

    def _add_draft(self, config, weights_path: str | None, optimizer_path: str | None, *, train: bool) -> None:
        """Makes the draft, from the checkpoint if it has one, else from `policy.draft.model_name`."""
        settings = draft_settings(config)
        saved = saved_draft(weights_path)
        folder, shape = draft_of_folder(saved or settings.model_name, settings, config)
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        self._device = next(self.model.parameters()).device
        self._parking = Parking()
        rows = max_pack_rows(config)
        self._draft = DraftTrainer(
            self.model,
            settings,
            shape,
            read_draft(folder, shape),
            self._groups,
            temperature=self.sampling_params.temperature if self.sampling_params is not None else 1.0,
            recompute=bool(config["megatron_cfg"]["activation_checkpointing"]),
            max_pack_rows=rows,
            max_sequences=rows // config["make_sequence_length_divisible_by"],
            device=self._device,
            train=train,
        )
        if saved and optimizer_path and train:
            restore_optimizer(self._draft, self._groups, saved)

    # Training

    def train(self, data, loss_fn, eval_mode: bool = False, gbs: int | None = None, mbs: int | None = None, **kwargs):
        """Upstream's train, and the draft's step with it. Draft metrics join `all_mb_metrics`."""
        scope = nullcontext() if eval_mode else self._draft.training(self._global_batches(data, gbs, mbs))
        with scope:
            result = super().train(data, loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs, **kwargs)
        if not eval_mode:
            result["all_mb_metrics"].update(self._draft_metrics())
        return result

    def _global_batches(self, data, gbs: int | None, mbs: int | None) -> Iterator[list[DraftBatch]]:
        """The microbatches of each global batch; upstream steps its optimizer once for each."""
        gbs = gbs if gbs is not None else self.cfg["train_global_batch_size"]
        share = gbs // self.dp_size
        index = 0
        while True:
            yield self._batches(data.get_batch(batch_idx=index, batch_size=share), mbs)
            index += 1

    def _batches(self, batch, mbs: int | None) -> list[DraftBatch]:
        return draft_batches(
            batch,
            self.cfg,
            mbs if mbs is not None else self.cfg["train_micro_batch_size"],
            cp_size=self._groups.cp.size(),
            cp_rank=self._groups.cp.rank(),
            device=self._device,
        )

    def _draft_metrics(self) -> dict[str, list[float]]:
        """Metrics in the form in which NeMo-RL's logger gets them: it sums over data-parallel ranks, so one rank tells."""
        metrics = flat_metrics(self._draft.take_metrics())
        return {name: [value] if self._groups.dp.rank() == 0 else [] for name, value in metrics.items()}

    # Refits

    def _iter_params_with_optional_kv_scales(self, *args, **kwargs) -> Iterator[tuple[str, torch.Tensor]]:
        """Upstream's stream, then the draft's under `draft.`, whole on every rank."""
        yield from super()._iter_params_with_optional_kv_scales(*args, **kwargs)
        for name, tensor in from_last_stage(self._draft.export(), self._groups.pp, self._device):
            yield DRAFT_PREFIX + name, tensor

    # Checkpoints, and moves between GPU and host

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None, **kwargs):
        """Upstream's checkpoint, with the draft in its `weights` folder."""
        super().save_checkpoint(weights_path, optimizer_path, **kwargs)
        save_draft(self._draft, self._groups, weights_path, optimizer=optimizer_path is not None)
        dist.barrier()

    def move_model(self, model, device: str, move_params: bool = True, move_grads: bool = True):
        """Moves the draft with the policy."""
        model = super().move_model(model, device, move_params=move_params, move_grads=move_grads)
        if self._draft is not None and model is self.model:
            move_draft(self._draft, self._parking, device, params=move_params, grads=move_grads)
        return model

    def move_optimizer(self, device: str):
        """Moves the draft's optimizer with the policy's."""
        super().move_optimizer(device)
        if self._draft is not None:
            move_draft_optimizer(self._draft, device)


def without_draft(config) -> dict:
    """The policy's settings as upstream gets to see them."""
    return {**config, "draft": {"enabled": False}}


def flat_metrics(metrics: dict[str, float | list[float]]) -> dict[str, float]:
    """One number a name: `draft_loss_per_pass: [a, b]` as `draft_loss_per_pass_1` and `_2`."""
    flat = {}
    for name, value in metrics.items():
        numbered = enumerate(value, start=1) if isinstance(value, list) else ()
        flat |= {f"{name}_{number}": one for number, one in numbered} or {name: value}
    return flat


def from_last_stage(
    tensors: Iterator[tuple[str, torch.Tensor]], pipeline: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """`(name, tensor)` pairs of the pipeline's last stage, on all of its stages. Collective."""
    if pipeline.size() == 1:
        yield from tensors
        return
    source = dist.get_process_group_ranks(pipeline)[-1]
    mine = list(tensors)
    told = [[(name, tensor.shape, tensor.dtype) for name, tensor in mine]]
    dist.broadcast_object_list(told, src=source, group=pipeline)
    for index, (name, shape, dtype) in enumerate(told[0]):
        tensor = mine[index][1].contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
        # Not every backend broadcasts bool.
        dist.broadcast(tensor.view(torch.uint8) if dtype == torch.bool else tensor, src=source, group=pipeline)
        yield name, tensor


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class DraftPolicyWorker(DraftPolicyWorkerImpl):
    """What `resolve_policy_worker_cls` names."""
