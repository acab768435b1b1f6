"""What the ranks of `test_policy_worker` run."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tests.upstream.folders import VOCAB
from tests.upstream.worker import TinyWorker, grpo_batch, policy_settings

LENGTHS = [20, 13, 32, 7]
WIDTH = 32


@dataclass(frozen=True)
class Seen:
    """What one rank saw of some training steps."""

    metrics: list[dict]
    grad_norms: list[float]
    losses: list[float]
    digest: str
    draft: dict[str, torch.Tensor]


def batches(steps: int) -> list[dict]:
    """One batch a step, the same on every rank."""
    return [grpo_batch(LENGTHS, 4, seed=step, vocab=VOCAB, width=WIDTH) for step in range(steps)]


def train(rank, world_size, policy_folder, draft, sizes, policy, options: dict) -> Seen:
    """`steps` calls of the worker's train; `options` may have dp, kind, distributed, steps, gbs, and `same`: one batch in
    all steps."""
    usual = {"dp": 1, "kind": "draft", "distributed": False, "steps": 2, "gbs": 4, "same": False}
    dp, kind, distributed, steps, gbs, same = (usual | options).values()
    settings = policy_settings(policy_folder, draft, sizes=sizes, **policy)
    tiny = TinyWorker(settings, dp=dp, kind=kind, distributed=distributed)
    try:
        results = [tiny.train(batch, gbs=gbs) for batch in (batches(1) * steps if same else batches(steps))]
        return Seen(
            metrics=[
                {name: sum(values) for name, values in result["all_mb_metrics"].items() if name.startswith("draft")}
                for result in results
            ],
            grad_norms=[float(result["grad_norm"]) for result in results],
            losses=[float(result["global_loss"].sum()) for result in results],
            digest=tiny.digest(),
            draft=tiny.draft_weights() if kind == "draft" else {},
        )
    finally:
        tiny.close()


def resume(rank, world_size, policy_folder, draft, sizes, policy, root: str) -> tuple:
    """The draft after a third step, in one go and by a fresh worker from a checkpoint; and what the checkpoint has."""
    checkpoint = str(Path(root) / "weights")
    first, second, last = batches(3)
    tiny = TinyWorker(policy_settings(policy_folder, draft, sizes=sizes, **policy))
    try:
        tiny.train(first)
        tiny.train(second)
        tiny.save_policy(Path(root) / "policy")
        tiny.save_checkpoint(checkpoint)
        saved = tiny.draft_weights()
        # As NeMo-RL does around every rollout.
        for params in (True, False):
            tiny.worker.move_model(tiny.worker.model, "cpu", move_params=params, move_grads=not params)
        tiny.worker.move_optimizer("cpu")
        parked = tiny.draft_bytes()
        tiny.worker.move_model(tiny.worker.model, "cuda")
        tiny.worker.move_optimizer("cuda")
        assert parked == 0 and (tiny.draft_bytes() > 0) == (tiny.worker._draft.draft is not None)
        tiny.train(last)
        whole = tiny.draft_weights()
    finally:
        tiny.close()
    again = TinyWorker(
        policy_settings(str(Path(root) / "policy"), draft, sizes=sizes, **policy), checkpoint=(checkpoint, checkpoint)
    )
    try:
        restored = again.draft_weights()
        again.train(last)
        return saved, restored, whole, again.draft_weights()
    finally:
        again.close()


def upstreams_draft(rank, world_size, policy_folder, draft_folder: str, policy) -> tuple[dict, dict, dict]:
    """Draft metrics of one step: upstream's own draft, and this package's with one pass over the same rows; and how far
    apart the two exports of the untrained draft are."""
    from nemo_rl.models.megatron.draft import export_eagle_weights_to_hf

    from tests.upstream import upstream_draft

    (batch,) = batches(1)
    on = {"enabled": True, "engine": "nemo_ext", "model_name": draft_folder, "loss_weight": 1.0, "ttt_steps": 1}
    tiny = TinyWorker(policy_settings(policy_folder, on, sizes={}, **policy))
    try:
        weights = tiny.draft_weights()
        ours = tiny.train(batch)["all_mb_metrics"]
    finally:
        tiny.close()

    theirs = {"enabled": True, "model_name": draft_folder, "loss_weight": 1.0}
    tiny = TinyWorker(policy_settings(policy_folder, theirs, sizes={}, **policy), kind="upstream")
    try:
        worker = tiny.worker
        worker.draft_model = upstream_draft.build(worker.model.module, draft_folder, tiny.groups)
        exported = dict(export_eagle_weights_to_hf(worker.draft_model))
        apart = {
            name: float((weights["draft." + name.replace("midlayer", "layers.0")] - tensor).abs().max())
            for name, tensor in exported.items()
        }
        # Upstream takes a row for trained when the token after it is; pass 1 predicts the token after that.
        batch["token_mask"] = torch.nn.functional.pad(batch["token_mask"][:, 1:], (0, 1))
        seen = tiny.train(batch)["all_mb_metrics"]
    finally:
        tiny.close()
    return ours, seen, apart
