"""What the ranks of `test_local_policy` run, inside an initialised gloo default group.

Every function takes (rank, world_size, *arguments) and sets up and forgets its own parallel layout.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from nemo_ext.attention.core_attention import PackedParams
from nemo_ext.layout import PackedLayout
from nemo_ext.local.hf_policy import export_policy, load_policy, policy_digest
from nemo_ext.local.optim import build_optimizer, finalize_grads, wrap_ddp
from nemo_ext.local.parallel import ParallelSizes, destroy_parallel, init_parallel
from nemo_ext.local.policy import PolicyNorm, build_policy, policy_config
from nemo_ext.local.schedule import forward_backward


@dataclass(frozen=True)
class Trained:
    """What a rank saw of some training steps."""

    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    weights: dict[str, torch.Tensor]
    digest: str


@contextmanager
def parallel(sizes: dict):
    groups = init_parallel(ParallelSizes(**sizes), seed=0)
    try:
        yield groups
    finally:
        destroy_parallel()


def pack_layout(pack: list[torch.Tensor], groups) -> PackedLayout:
    """Layout of one pack, padded so that sequence parallelism can cut it too."""
    lengths = [len(tokens) for tokens in pack]
    return PackedLayout(lengths, cp_size=groups.cp.size(), cp_rank=groups.cp.rank(), pad_multiple=groups.tp.size())


def run_model(model, pack: list[torch.Tensor], layout: PackedLayout) -> torch.Tensor:
    return model(
        input_ids=layout.shard(layout.pack(pack))[None],
        position_ids=None,
        attention_mask=None,
        packed_seq_params=PackedParams.of(layout),
    )


def policy_logits(rank, world_size, config, tensors, pack, sizes, options) -> list[torch.Tensor]:
    """The logits [T, V] of each sequence of a pack, gathered over TP, padding columns included."""
    with parallel(sizes) as groups:
        model = build_policy(config, policy_config(config, groups, **options), groups)
        load_policy([model], config, tensors, groups)
        layout = pack_layout(pack, groups)
        with torch.no_grad():
            logits_TV = run_model(model, pack, layout).squeeze(0)
        shards = [torch.empty_like(logits_TV) for _ in range(groups.tp.size())]
        torch.distributed.all_gather(shards, logits_TV.contiguous(), group=groups.tp)
        by_sequence = torch.cat(shards, dim=-1).split(list(layout.padded_lens))
        return [logits[: len(tokens)] for logits, tokens in zip(by_sequence, pack, strict=True)]


class Trainer:
    """A policy and its optimizer on this rank, with a next-token loss over packs."""

    def __init__(self, config, tensors, groups, *, vpp=None, optimizer=None, **policy_options):
        self.config, self.groups = config, groups
        megatron_config = policy_config(config, groups, vpp=vpp, **policy_options)
        stages = [None] if vpp is None else range(vpp)
        self.chunks = [build_policy(config, megatron_config, groups, vp_stage=stage) for stage in stages]
        load_policy(self.chunks, config, tensors, groups)
        self.ddp = [wrap_ddp(chunk, megatron_config) for chunk in self.chunks]
        megatron_config.finalize_model_grads_func = lambda chunks, num_tokens, **_: finalize_grads(chunks, groups)
        # A large eps, since Adam's steps for gradients near 0 would tell rounding errors apart by their sign.
        options = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3, **(optimizer or {})}
        self.optimizer = build_optimizer(self.ddp, tp_group=groups.tp, norm_group=groups.mp, **options)

    def step(self, packs) -> tuple[float, float]:
        """One optimizer step; returns the global loss and the gradient norm."""
        denominator = sum(len(tokens) - 1 for pack in packs for tokens in pack)
        self.optimizer.zero_grad()
        metrics = forward_backward(
            self.ddp,
            partial(self.forward_step, denominator=denominator),
            packs[self.groups.dp.rank() :: self.groups.dp.size()],
            self.groups,
        )
        loss = torch.tensor(sum(metric["loss"] for metric in metrics), dtype=torch.float64)
        torch.distributed.all_reduce(loss)
        return loss.item() / self.groups.tp.size(), self.optimizer.step()

    def forward_step(self, iterator, model, denominator):
        pack = next(iterator)
        layout = pack_layout(pack, self.groups)
        # The token after each row; none after a sequence's last.
        labels = layout.pack([torch.cat([tokens[1:], torch.tensor([-1])]) for tokens in pack], fill=-1)
        labels_T = layout.shard(labels)

        def loss(logits_1TV):
            losses_T = vocab_parallel_cross_entropy(logits_1TV.squeeze(0).float(), labels_T.clamp(min=0))
            total = (losses_T * (labels_T >= 0)).sum() / denominator
            return total, torch.tensor(1, dtype=torch.int), {"loss": total.item()}

        return run_model(model, pack, layout), loss

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(export_policy(self.ddp, self.config, self.groups))


def train(rank, world_size, config, tensors, packs, sizes, options) -> Trained:
    """Some steps over the same packs, in the layout `sizes`."""
    options = dict(options)
    steps = options.pop("steps", 3)
    with parallel(sizes) as groups:
        trainer = Trainer(config, tensors, groups, vpp=sizes.get("vpp"), **options)
        losses, norms, rates = [], [], []
        for _ in range(steps):
            loss, norm = trainer.step(packs)
            losses.append(loss)
            norms.append(norm)
            rates.append(trainer.optimizer.optimizer.param_groups[0]["lr"])
        weights = trainer.weights()
    return Trained(losses, norms, rates, weights if rank == 0 else {}, policy_digest(weights))


def export_twice(rank, world_size, config, tensors, sizes) -> tuple[dict, dict]:
    """What comes out of a policy that `tensors` went into, and out of a second one that this went into."""
    with parallel(sizes) as groups:
        stages = range(sizes["vpp"]) if "vpp" in sizes else [None]
        out = []
        for _ in range(2):
            megatron_config = policy_config(config, groups, vpp=sizes.get("vpp"))
            chunks = [build_policy(config, megatron_config, groups, vp_stage=stage) for stage in stages]
            load_policy(chunks, config, tensors, groups)
            tensors = dict(export_policy(chunks, config, groups))
            out.append(tensors)
        return tuple(out)


def resume(rank, world_size, config, tensors, packs, params_dtype, folder) -> tuple[str, str]:
    """Digests after four steps at a stretch, and after two, a checkpoint and two more."""
    options = {"params_dtype": params_dtype, "optimizer": {"lr_warmup_iters": 3}}
    with parallel({}) as groups:
        whole = Trainer(config, tensors, groups, **options)
        for step in range(4):
            if step == 2:
                torch.save((whole.weights(), whole.optimizer.state_dict()), f"{folder}/checkpoint.pt")
            whole.step(packs)

        weights, state = torch.load(f"{folder}/checkpoint.pt", weights_only=False)
        resumed = Trainer(config, weights, groups, **options)
        resumed.optimizer.load_state_dict(state)
        for _ in range(2):
            resumed.step(packs)
        return policy_digest(whole.weights()), policy_digest(resumed.weights())


def clipped_norm(rank, world_size, config, tensors, packs, clip_grad) -> tuple[float, float]:
    """Gradient norm that a step reports, and the norm of the gradients that it used."""
    with parallel({}) as groups:
        trainer = Trainer(config, tensors, groups, optimizer={"clip_grad": clip_grad})
        _, reported = trainer.step(packs)
        grads = [parameter.main_grad for ddp in trainer.ddp for parameter in ddp.params_with_grad]
        return reported, math.sqrt(sum(grad.double().square().sum().item() for grad in grads))


def draft_beside_the_policy(rank, world_size, config, tensors, packs, sizes) -> dict | None:
    """Trains a policy whose last stage has a child with a DDP and an optimizer of its own.

    The child is one norm under sequence parallelism, whose gradient is 1 on each rank. Returns the policy's digest and,
    from ranks that have the child, its gradient after the policy's and after its own completion, and its norm.
    """
    sequence_parallel = sizes.get("tp", 1) > 1
    with parallel(sizes) as groups:
        trainer = Trainer(config, tensors, groups, sequence_parallel=sequence_parallel)
        child = None
        if trainer.chunks[-1].post_process:
            megatron_config = trainer.chunks[-1].config
            child = wrap_ddp(PolicyNorm(megatron_config, 4, eps=1e-6), megatron_config)
            optimizer = build_optimizer([child], lr=1e-2, tp_group=groups.tp, norm_group=groups.tp)
            trainer.chunks[-1].draft_model = child.module
            child.module.weight.main_grad.fill_(1.0)
        trainer.step(packs)
        result = {"digest": policy_digest(trainer.weights())}
        if child is not None:
            result["after_policy"] = child.module.weight.main_grad.tolist()
            finalize_grads([child], groups)
            result["after_own"] = child.module.weight.main_grad.tolist()
            result["norm"] = optimizer.step()
        return result
