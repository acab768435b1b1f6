"""What the ranks of `test_cotrain` run, inside an initialised gloo default group."""

from dataclasses import dataclass, replace

import torch

from nemo_ext.local.batch import Sample, StepPlan
from nemo_ext.local.settings import RunConfig
from nemo_ext.local.worker import PolicyWorker


@dataclass(frozen=True)
class Seen:
    """What the last stage's first rank saw of some joint steps."""

    metrics: list[dict]
    digests: list[str]
    gradients: dict[str, torch.Tensor]  # of the draft, after the last step, full size
    weights: dict[str, torch.Tensor]


def run_config(settings: dict) -> RunConfig:
    """The config of a rank; `settings` are keyword arguments by section."""
    return RunConfig.model_validate(settings)


def joint_steps(rank, world_size, settings, policy, draft, batches: list[list[Sample]], plan: StepPlan) -> Seen | None:
    """One optimizer step per batch; the draft's gradients of the last one are read from Megatron's buffers."""
    worker = PolicyWorker(run_config(settings))
    try:
        worker.load(policy, draft)
        metrics, digests = [], []
        for number, batch in enumerate(batches):
            metrics.append(worker.step(batch, replace(plan, number=plan.number + number)))
            digests.append(worker.digest())
        weights = worker.export()
        gradients = None
        if draft is not None and plan.train_draft:
            with torch.no_grad():
                for parameter in worker._draft.parameters() if worker._draft else ():
                    parameter.copy_(parameter.main_grad)
            gradients = worker.export()
        if weights is None:
            return None
        only_draft = {name: t for name, t in gradients or [] if name.startswith("draft.")}
        return Seen(metrics, digests, only_draft, dict(weights))
    finally:
        worker.close()


def resumed_steps(rank, world_size, settings, policy, draft, batches, plan, folder, cut: int) -> tuple | None:
    """The same steps in one go and with a save and a fresh worker after `cut` of them: (digests, weights) of both."""
    results = []
    for split in (False, True):
        worker = PolicyWorker(run_config(settings))
        try:
            worker.load(policy, draft)
            digests = []
            for number, batch in enumerate(batches):
                if split and number == cut:
                    worker.save(folder, policy)
                    worker.load(f"{folder}/policy", f"{folder}/draft")
                    worker.restore(folder)
                worker.step(batch, replace(plan, number=number))
                digests.append(worker.digest())
            results.append((digests, dict(worker.export() or [])))
        finally:
            worker.close()
    return tuple(results) if results[0][1] else None


def whole_tensors(rank, world_size, settings, policy, draft, batches, plan) -> list[tuple[str, torch.Tensor]]:
    """What each rank holds whole of its draft after the steps: parameters by module name, and their Adam averages."""
    worker = PolicyWorker(run_config(settings))
    try:
        worker.load(policy, draft)
        for number, batch in enumerate(batches):
            worker.step(batch, replace(plan, number=number))
        adam = worker._draft_optimizer.optimizer.state
        return [
            (f"{name} {part}", tensor.detach().clone())
            for name, parameter in worker._draft.named_parameters()
            if not getattr(parameter, "tensor_model_parallel", False)
            for part, tensor in (("weight", parameter), *adam[parameter].items())
        ]
    finally:
        worker.close()
