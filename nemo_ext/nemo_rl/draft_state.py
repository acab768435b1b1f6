"""The draft inside NeMo-RL's checkpoints, and out of the GPU while vLLM has it.

A checkpoint's `weights` folder gets `draft/`, a Hugging Face folder that vLLM serves as it is, whatever the parallel
layout was. The optimizer's state goes beside it, one file for each tensor-parallel rank.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from nemo_ext.config import ConfigError
from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_formats import vllm_names
from nemo_ext.drafts.folder import CONFIG, WEIGHTS
from nemo_ext.drafts.kinds import Shape
from nemo_ext.nemo_rl.draft_trainer import DraftTrainer

FOLDER = "draft"


def saved_draft(weights_path: str | None) -> Path | None:
    """The draft's folder in a checkpoint; None where there is no checkpoint, or one without a draft."""
    folder = Path(weights_path) / FOLDER if weights_path else None
    return folder if folder is not None and (folder / WEIGHTS).is_file() else None


def read_draft(folder: Path, shape: Shape) -> dict[str, torch.Tensor]:
    """The tensors of a draft's folder that belong to a draft of this shape."""
    tensors = load_file(folder / WEIGHTS)
    if isinstance(shape, BlockConfig):
        return {known: tensors[name] for name, known in vllm_names(shape, tensors).items()}
    return tensors


def save_draft(trainer: DraftTrainer, groups, weights_path: str, optimizer: bool) -> None:
    """Writes the draft into a checkpoint. Collective over the tensor-parallel group; other replicas do nothing."""
    if trainer.draft is None or groups.dp_cp.rank() != 0:
        return
    folder = Path(weights_path) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in trainer.export()}
    if groups.tp.rank() == 0:
        # The weights come last and whole: a folder that has them is a checkpoint.
        (folder / CONFIG).write_text(json.dumps(trainer.shape.to_hf(_dtype_name(trainer.draft)), indent=2) + "\n")
        partial = folder / f".{WEIGHTS}.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.replace(folder / WEIGHTS)
    if optimizer and trainer.optimizer is not None:
        torch.save(trainer.optimizer.state_dict(), folder / _optimizer_file(groups))


def restore_optimizer(trainer: DraftTrainer, groups, folder: Path) -> None:
    """Goes on with the optimizer's state of a checkpoint. Collective over the pipeline.

    Raises ConfigError if the checkpoint has one of another tensor-parallel size.
    """
    trouble = None
    if trainer.optimizer is not None:
        file = folder / _optimizer_file(groups)
        others = sorted(path.name for path in folder.glob("optimizer_tp*.pt"))
        if file.is_file():
            trainer.optimizer.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
            trainer.steps = trainer.optimizer.schedule.num_steps
        elif others:
            trouble = (
                f"policy.megatron_cfg.tensor_model_parallel_size is {groups.tp.size()}, but {folder} has {others[0]}; resume "
                "with the tensor-parallel size of the checkpoint, or remove these files to start the draft's optimizer "
                "afresh"
            )
    told = [(trainer.steps, trouble)]
    if groups.pp.size() > 1:
        dist.broadcast_object_list(told, src=dist.get_process_group_ranks(groups.pp)[-1], group=groups.pp)
    trainer.steps, trouble = told[0]
    if trouble:
        raise ConfigError(trouble)


def _optimizer_file(groups) -> str:
    return f"optimizer_tp{groups.tp.rank()}of{groups.tp.size()}.pt"


def _dtype_name(draft: torch.nn.Module) -> str:
    return str(next(draft.parameters()).dtype).removeprefix("torch.")


class Parking:
    """Host copies of tensors whose memory is given back meanwhile.

    The tensors stay on their device, without memory: Megatron's DDP hooks each parameter's gradient accumulator, once,
    and torch forgets that accumulator when the parameter changes its device.
    """

    def __init__(self):
        self._parked: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def park(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies the tensors' memory to the host and frees it. What is parked already stays so."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                host = torch.UntypedStorage(storage.nbytes()).copy_(storage)
                self._parked.append((storage, host))
                storage.resize_(0)

    def bring_back(self) -> None:
        """Takes memory for all that is parked and fills it."""
        for storage, host in self._parked:
            storage.resize_(host.nbytes())
            storage.copy_(host)
        self._parked.clear()


@torch.no_grad()
def move_draft(
    trainer: DraftTrainer, parking: Parking, device: torch.device | str, *, params: bool, grads: bool
) -> None:
    """Parks parameters and frees the gradients' buffers on the way to a CPU device; else brings both back."""
    if trainer.draft is None:
        return
    away = torch.device(device).type == "cpu"
    if params and away:
        parking.park([*trainer.draft.parameters(), *trainer.draft.buffers()])
    elif params:
        parking.bring_back()
    if grads and trainer.optimizer is not None:
        for buffer in trainer.ddp.buffers:
            if away:
                buffer.offload_to_cpu(move_params=False, move_grads=True)
            else:
                buffer.reload_from_cpu(move_params=False, move_grads=True)


@torch.no_grad()
def move_draft_optimizer(trainer: DraftTrainer, device: torch.device | str) -> None:
    """Moves the optimizer's state, and the float32 parameters of a 16-bit draft."""
    if trainer.optimizer is None:
        return
    adam = trainer.optimizer.optimizer.optimizer
    own = {id(parameter) for parameter in trainer.draft.parameters()}
    for group in adam.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                parameter.data = parameter.data.to(device)
            state = adam.state.get(parameter, {})
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim():
                    state[name] = value.to(device)
