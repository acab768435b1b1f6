"""One policy rank: the policy, its draft, their optimizers, and the joint step over Megatron's own schedule.

Legend: T rows of this rank, E rows with halo, H hidden size, V this rank's shard of the vocabulary.
"""

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from nemo_ext.attention.core_attention import PackedParams
from nemo_ext.cotrain import embed_rows, read_target
from nemo_ext.cotrain.draft_side import DraftSide, draft_side
from nemo_ext.drafts.kinds import kind_of
from nemo_ext.local.batch import Microbatch, Sample, StepPlan, microbatches
from nemo_ext.local.grpo_loss import grpo_loss, supervised_loss, token_log_probs
from nemo_ext.local.hf_folder import read_hf_folder, save_hf_folder
from nemo_ext.local.hf_policy import export_policy, load_policy, policy_digest
from nemo_ext.local.optim import build_optimizer, finalize_grads, wrap_ddp
from nemo_ext.local.parallel import ParallelSizes, destroy_parallel, init_parallel
from nemo_ext.local.policy import build_policy, policy_config
from nemo_ext.local.schedule import forward_backward
from nemo_ext.local.settings import RunConfig
from nemo_ext.taps import Rows, TapChannel, open_channel


class PolicyWorker:
    """Everything that one policy rank holds. All ranks call every method together.

    The default process group of `config.cluster.gpus_per_node` ranks is there already.

    Args:
        config: the whole, checked run.
    """

    def __init__(self, config: RunConfig):
        megatron = config.policy.megatron_cfg
        self._config = config
        self._groups = init_parallel(
            ParallelSizes(
                tp=megatron.tensor_model_parallel_size,
                pp=megatron.pipeline_model_parallel_size,
                cp=megatron.context_parallel_size,
                dp=config.cluster.gpus_per_node // megatron.model_ranks,
                vpp=megatron.virtual_pipeline_model_parallel_size,
            ),
            seed=config.grpo.seed,
        )
        self._side: DraftSide | None = None
        self._draft: torch.nn.Module | None = None  # on the last stage
        self._channel: TapChannel | None = None

    def load(
        self,
        policy_folder: str,
        draft_folder: str | None,
        policy_lr: float | None = None,
        draft_lr: float | None = None,
    ) -> None:
        """Builds the policy, and the draft where a folder is given, from Hugging Face folders, with fresh optimizers.

        The learning rates are the config's unless given (the warm-up has its own).
        """
        policy, groups = self._config.policy, self._groups
        self._hf_config, tensors = read_hf_folder(policy_folder)
        config = policy_config(
            self._hf_config,
            groups,
            vpp=policy.megatron_cfg.virtual_pipeline_model_parallel_size,
            sequence_parallel=policy.megatron_cfg.sequence_parallel,
            recompute=policy.megatron_cfg.activation_checkpointing,
        )
        virtual = policy.megatron_cfg.virtual_pipeline_model_parallel_size
        self._chunks = [
            build_policy(self._hf_config, config, groups, vp_stage)
            for vp_stage in (range(virtual) if virtual else [None])
        ]
        load_policy(self._chunks, self._hf_config, tensors, groups)
        self._policy_ddp = [wrap_ddp(chunk, config) for chunk in self._chunks]
        self._policy_optimizer = self._optimizer(
            self._policy_ddp,
            policy.megatron_cfg.optimizer,
            policy_lr,
            policy.megatron_cfg.scheduler.lr_warmup_iters,
            groups.mp,
        )
        self._close_channel()
        self._draft = None
        if draft_folder is None:
            return
        self._draft_hf_config, tensors = read_hf_folder(draft_folder)
        shape = kind_of(policy.draft).shape_of(self._draft_hf_config)
        self._side = draft_side(policy.draft, shape, seed=self._config.grpo.seed)
        self._channel = self._open_channel(self._side, config.params_dtype)
        if groups.pp.rank() < groups.pp.size() - 1:
            return
        self._draft = self._side.build(config, groups, tensors, "cpu")
        # Wrapped apart from the policy and only then made its child: the policy's gradient buckets, norm and clip are
        # the same with a draft and without.
        self._draft_ddp = [wrap_ddp(self._draft, config)]
        settings = policy.draft.optimizer
        self._draft_optimizer = self._optimizer(
            self._draft_ddp, settings, draft_lr, settings.lr_warmup_iters, groups.tp
        )
        self._chunks[-1].draft_model = self._draft
        self._side.prepare(
            groups,
            temperature=policy.generation.temperature,
            recompute=policy.megatron_cfg.activation_checkpointing,
        )

    def _open_channel(self, side: DraftSide, dtype: torch.dtype) -> TapChannel:
        """The taps' way to the last stage; its slots hold the largest microbatch that the settings allow."""
        policy, groups = self._config.policy, self._groups
        unit = math.lcm(2 * groups.cp.size(), self._pad_multiple)
        longest = -(-policy.max_total_sequence_length // unit) * unit
        if policy.sequence_packing.enabled:
            pack_rows = max(policy.sequence_packing.train_mb_tokens, longest)
        else:
            pack_rows = policy.train_micro_batch_size * longest
        rows = pack_rows // groups.cp.size()
        return open_channel(
            self._chunks,
            side.shape.tap_layers,
            groups.pp,
            width=side.shape.hidden_size,
            dtype=dtype,
            max_rows=rows // (groups.tp.size() if policy.megatron_cfg.sequence_parallel else 1),
            max_embedding_rows=side.max_embed_rows(rows, pack_rows, pack_rows // unit),
            transport=policy.draft.tap_transport,
        )

    @property
    def _pad_multiple(self) -> int:
        """Sequence parallelism cuts a rank's rows once more."""
        groups = self._groups
        return 2 * groups.cp.size() * groups.tp.size() if self._config.policy.megatron_cfg.sequence_parallel else 1

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _optimizer(self, ddp_chunks, settings, lr: float | None, lr_warmup_iters: int, norm_group):
        return build_optimizer(
            ddp_chunks,
            lr=settings.lr if lr is None else lr,
            weight_decay=settings.weight_decay,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            lr_warmup_iters=0 if lr is not None else lr_warmup_iters,
            tp_group=self._groups.tp,
            norm_group=norm_group,
        )

    def step(self, samples: list[Sample], plan: StepPlan) -> dict:
        """One optimizer step on the global batch (every rank gets all of it and takes its share).

        Returns the step's metrics, equal on all ranks of the last stage; the other stages know the policy's gradient
        norm alone.
        """
        with_taps = plan.train_draft and self._channel is not None
        with_draft = with_taps and self._draft is not None
        batches = self._microbatches(samples)
        tokens = sum(sample.mask * len(sample.response) for sample in samples)
        denominator = self._draft_denominator(batches, plan.number) if with_draft else None
        self._policy_optimizer.zero_grad()
        if with_draft:
            self._draft_optimizer.zero_grad()

        with self._channel.step(self._rows(batches, plan.number)) if with_taps else nullcontext():
            sums = forward_backward(
                self._policy_ddp, self._forward_step(plan, max(tokens, 1.0), denominator), batches, self._groups
            )
        metrics: dict = {}
        if plan.train_policy:
            finalize_grads(self._policy_ddp, self._groups)
            metrics["grad_norm"] = self._policy_optimizer.step()
        if not sums:
            return metrics
        policy_sums = self._reduce(torch.stack([s["policy"] for s in sums]).sum(0))
        loss, ratio, clipped, kl = (policy_sums / max(tokens, 1.0)).tolist()
        metrics |= {"policy_loss": loss, "ratio_mean": ratio, "clipped_share": clipped, "sampler_kl": kl}
        if with_draft:
            finalize_grads(self._draft_ddp, self._groups)
            metrics["draft_grad_norm"] = self._draft_optimizer.step()
            draft_sums = self._reduce(torch.stack([s["draft"] for s in sums]).sum(0))
            metrics |= self._side.metrics(draft_sums)
        return metrics

    def _microbatches(self, samples: list[Sample]) -> list[Microbatch]:
        policy, groups = self._config.policy, self._groups
        return microbatches(
            samples[groups.dp.rank() :: groups.dp.size()],
            packed=policy.sequence_packing.enabled,
            max_tokens=policy.sequence_packing.train_mb_tokens,
            max_sequences=policy.train_micro_batch_size,
            cp_size=groups.cp.size(),
            cp_rank=groups.cp.rank(),
            pad_multiple=self._pad_multiple,
            count_multiple=groups.pp.size() if policy.megatron_cfg.virtual_pipeline_model_parallel_size else 1,
            first=groups.dp.rank(),
            stride=groups.dp.size(),
        )

    def _rows(self, batches: list[Microbatch], step: int) -> list[Rows]:
        """What travels to the last stage for each microbatch."""
        scattered = self._groups.tp.size() if self._config.policy.megatron_cfg.sequence_parallel else 1
        return [Rows(b.layout.local_total // scattered, len(self._side.embed_ids(b, step))) for b in batches]

    def _draft_denominator(self, batches: list[Microbatch], step: int) -> torch.Tensor:
        """The global weighted count: one reduction per step, over DP and CP, never over TP."""
        counts = sum(self._side.count(batch, step) for batch in batches)
        return self._side.denominator(self._reduce(counts))

    def _forward_step(self, plan: StepPlan, tokens: float, denominator: torch.Tensor | None):
        config, groups, channel = self._config, self._groups, self._channel

        def forward_step(data_iterator, model):
            batch: Microbatch = next(data_iterator)
            embed = partial(self._embedding, batch, plan.number)
            with channel.forward(model, embed) if channel else nullcontext() as landing:
                output = model(
                    input_ids=batch.tokens_R[batch.layout.local_rows][None],
                    position_ids=None,
                    attention_mask=None,
                    packed_seq_params=PackedParams.of(batch.layout),
                )

            def loss_function(logits_1TV):
                log_prob_T = token_log_probs(
                    logits_1TV, batch.next_token(batch.tokens_R), config.policy.generation.temperature
                )
                if plan.loss == "grpo":
                    policy = grpo_loss(
                        log_prob_T,
                        batch,
                        clip_min=config.loss_fn.ratio_clip_min,
                        clip_max=config.loss_fn.ratio_clip_max,
                        tokens=tokens,
                    )
                else:
                    policy = supervised_loss(log_prob_T, batch, tokens=tokens)
                total, sums = policy.loss, {"policy": policy.sums()}
                if denominator is not None:
                    target = read_target(self._chunks[-1], landing, logits_1TV.squeeze(0), groups.tp)
                    draft = self._side.loss(batch, plan.number, target, denominator)
                    if not plan.train_policy:
                        # A stage waits for the next one's gradient, so with several there is one, of zeros.
                        total = 0.0 * total if groups.pp.size() > 1 else 0.0
                    total = landing.freed_after(total + config.policy.draft.loss_weight * draft.loss)
                    sums["draft"] = draft.sums()
                return total, torch.ones((), dtype=torch.int), sums

            return output, loss_function

        return forward_step

    def _embedding(self, batch: Microbatch, step: int) -> torch.Tensor:
        """The draft's embedding rows, on the first stage, which has all ids: a lookup."""
        ids_E = self._side.embed_ids(batch, step)
        return embed_rows(self._chunks[0].embedding.word_embeddings, ids_E, self._groups.tp)

    def _reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self._groups.dp_cp)
        return x

    def export(self) -> list[tuple[str, torch.Tensor]] | None:
        """The refresh stream: policy tensors, then the draft's under `draft.`; whole on the last stage's first rank,
        None elsewhere."""
        groups = self._groups
        stream = list(export_policy(self._chunks, self._hf_config, groups))
        if self._draft is not None:
            stream += [(f"draft.{name}", t.clone()) for name, t in self._side.export()]
        first = groups.tp.rank() == 0 and groups.dp_cp.rank() == 0
        return stream if first and groups.pp.rank() == groups.pp.size() - 1 else None

    def digest(self) -> str:
        """SHA-256 of the policy's full weights."""
        return policy_digest(export_policy(self._chunks, self._hf_config, self._groups))

    def save(self, folder: str, tokenizer_folder: str) -> None:
        """Writes a checkpoint: both models as Hugging Face folders, and this rank's optimizer states."""
        stream = self.export()
        if stream is not None:
            policy = {name: t for name, t in stream if not name.startswith("draft.")}
            save_hf_folder(Path(folder) / "policy", self._hf_config, policy, tokenizer_folder)
            if self._draft is not None:
                draft = {name.removeprefix("draft."): t for name, t in stream if name.startswith("draft.")}
                save_hf_folder(Path(folder) / "draft", self._draft_hf_config, draft)
        state = {"policy": self._policy_optimizer.state_dict()}
        if self._draft is not None:
            state["draft"] = self._draft_optimizer.state_dict()
        torch.save(state, Path(folder) / f"optimizer_rank{dist.get_rank()}.pt")
        dist.barrier()

    def restore(self, folder: str) -> None:
        """Takes the optimizer states of `save` back, after `load` took its folders; the parallel layout must be the same."""
        state = torch.load(Path(folder) / f"optimizer_rank{dist.get_rank()}.pt", weights_only=True)
        self._policy_optimizer.load_state_dict(state["policy"])
        if self._draft is not None:
            self._draft_optimizer.load_state_dict(state["draft"])

    def close(self) -> None:
        self._close_channel()
        destroy_parallel()
