"""The draft of one policy rank: it rides on upstream's own forwards and backwards by hooks, and steps by itself.

    trainer = DraftTrainer(...)
    with trainer.training(batches_of_each_global_batch):
        upstream's train()

Upstream's schedule, losses, gradients and optimizer are not touched. A forward of the policy, seen by a hook on its model,
leaves taps; when that forward's backward reaches the policy's output, the draft's own backward runs first. Megatron calls
`finalize_model_grads_func` when a global batch's backwards are done: there the draft's gradients are summed and its
optimizer steps.

The loss is kept as a sum, and its gradient divided by the global count before the step, because with upstream's split
step the count is known only then.

Legend: T rows of this rank, E embedding rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from nemo_ext.config import DraftConfig
from nemo_ext.cotrain import embed_rows, read_target
from nemo_ext.cotrain.draft_side import draft_side
from nemo_ext.cotrain.optim import build_optimizer, finalize_grads, wrap_ddp
from nemo_ext.drafts.kinds import Shape
from nemo_ext.nemo_rl.microbatches import DraftBatch
from nemo_ext.taps import Landing, Rows, TapChannel, open_channel
from nemo_ext.taps.hooks import unwrapped

ANCHOR_SEED = 0  # NeMo-RL's workers know no seed of the run; the anchors hang on tokens and step besides


class DraftTrainer:
    """Made on every rank, after the policy; the draft itself lives on the last pipeline stage. Collective.

    Args:
        model: the policy's model chunk, wrapped.
        settings: `policy.draft`.
        shape: of the draft.
        tensors: its weights by Hugging Face name.
        groups: Megatron's process groups.
        temperature: of the rollouts.
        recompute: run the draft's passes again in the backward instead of keeping them.
        max_pack_rows: rows of the largest microbatch over all context-parallel ranks.
        max_sequences: of the microbatch with the most sequences.
        device: of the policy.
        train: False makes a draft that is only exported.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: DraftConfig,
        shape: Shape,
        tensors: dict[str, torch.Tensor],
        groups,
        *,
        temperature: float,
        recompute: bool,
        max_pack_rows: int,
        max_sequences: int,
        device: torch.device,
        train: bool = True,
    ):
        self._model, self._settings, self.shape, self._groups = model, settings, shape, groups
        self._side = draft_side(settings, shape, seed=ANCHOR_SEED)
        self._gpt = unwrapped(model)
        self._config = get_model_config(model)
        self.draft: torch.nn.Module | None = None
        self.optimizer = None
        self._channel: TapChannel | None = None
        self._metrics: list[dict] = []
        self.steps = 0  # of the optimizer so far; known on every stage
        self._sums: torch.Tensor | None = None  # since the last optimizer step: the side's, and the counts below them
        self._batches: Iterator[Sequence[DraftBatch]] = iter(())
        self._step: _Step | None = None
        if self._is_last:
            self._make_draft(tensors, temperature, recompute, device, train)
        if not train:
            return
        rows = max_pack_rows // groups.cp.size()
        self._channel = open_channel(
            [model],
            shape.tap_layers,
            groups.pp,
            width=shape.hidden_size,
            dtype=self._config.params_dtype,
            max_rows=rows // self._scattered,
            max_embedding_rows=self._side.max_embed_rows(rows, max_pack_rows, max_sequences),
            transport=settings.tap_transport,
            device=device,
        )
        self._gpt.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._gpt.register_forward_hook(self._after_forward, with_kwargs=True)

    @property
    def _is_last(self) -> bool:
        return self._groups.pp.rank() == self._groups.pp.size() - 1

    @property
    def _scattered(self) -> int:
        """Ranks over which sequence parallelism scatters a tap's rows."""
        return self._groups.tp.size() if self._config.sequence_parallel else 1

    def _make_draft(self, tensors, temperature: float, recompute: bool, device: torch.device, train: bool) -> None:
        groups, settings = self._groups, self._settings
        config = draft_transformer_config(self._config, self.shape)
        self.draft = self._side.build(config, groups, tensors, device)
        if not train:
            return
        self.ddp = wrap_ddp(self.draft, config)
        optimizer = settings.optimizer
        self.optimizer = build_optimizer(
            [self.ddp],
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            clip_grad=optimizer.clip_grad,
            lr_warmup_iters=optimizer.lr_warmup_iters,
            tp_group=groups.tp,
            norm_group=groups.tp,
        )
        self._side.prepare(groups, temperature=temperature, recompute=recompute)

    # The scope that upstream's methods run in

    @contextmanager
    def training(self, batches: Iterator[Sequence[DraftBatch]]) -> Iterator[None]:
        """Around a call of upstream that trains. `batches`: of each run of Megatron's schedule in it, in order; made when
        the run begins. After an error the gradients are forgotten."""
        self._batches = iter(batches)
        try:
            with self._joined_finalize(), ExitStack() as self._stack:
                yield
        except BaseException:
            self.forget()
            raise
        finally:
            self._batches, self._step = iter(()), None

    def end_schedule(self) -> None:
        """The schedule has run all microbatches' backwards."""
        if self._step is not None:
            self._step.check_complete()
            self._stack.pop_all().close()
            self._step = None

    def forget(self) -> None:
        """Gives up gradients that no optimizer step has used."""
        self._sums = None

    def take_metrics(self) -> dict[str, float | list[float]]:
        """Mean over the optimizer steps since the last call; the same on every rank of a pipeline. Collective."""
        steps, self._metrics = self._metrics, []
        told = [steps]
        pipeline = self._groups.pp
        if pipeline.size() > 1:
            dist.broadcast_object_list(told, src=dist.get_process_group_ranks(pipeline)[-1], group=pipeline)
        return _mean(told[0])

    # Hooks

    def _before_forward(self, _model, _args, kwargs) -> None:
        if not torch.is_grad_enabled():
            return
        if self._step is None:
            batches = next(self._batches, None)
            if batches is None:
                return
            self._step = _Step(batches)
            self._stack.enter_context(self._channel.step([self._rows(batch) for batch in batches]))
            if self.optimizer is not None and self._sums is None:
                self.optimizer.zero_grad()  # no run of the schedule has added to them yet
        batch = self._step.take()
        ids = kwargs.get("input_ids")
        if self._step.taken == 1 and ids is not None:
            batch.check_forward(ids)
        self._scope = ExitStack()
        self._landing = self._scope.enter_context(self._channel.forward(self._model, lambda: self._embedding(batch)))

    def _after_forward(self, _model, _args, _kwargs, output: torch.Tensor) -> None:
        if self._step is None or not torch.is_grad_enabled():
            return
        self._scope.close()
        landing, self._landing = self._landing, None
        if landing is not None:
            self._ride(output, landing, self._step.current)

    def _ride(self, logits: torch.Tensor, landing: Landing, batch: DraftBatch) -> None:
        """The draft's forward, now; its backward, when the policy's reaches `logits`."""
        with torch.no_grad():
            target = read_target(self._gpt, landing, logits.flatten(0, 1), self._groups.tp)
            target.taps_TK = batch.of_hidden(target.taps_TK)
            target.hidden_TH = batch.of_hidden(target.hidden_TH)
            if self.shape.reduced_vocab:
                target.logits_TV = self._without_padding(batch.of_logits(logits.detach()))
        draft = self._side.loss(batch, self.steps, target, torch.ones((), dtype=torch.float64))
        loss = landing.freed_after(draft.loss)
        sums = torch.cat([draft.sums().double(), self._side.count(batch, self.steps)[None]])
        self._sums = sums if self._sums is None else self._sums + sums
        backward_before(logits, loss.backward)

    def _without_padding(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """A copy (upstream divides its logits by the temperature in place) without the ids that Megatron pads with."""
        first = self._groups.tp.rank() * logits_TV.shape[-1]
        logits_TV = logits_TV.clone()
        logits_TV[:, max(0, self.shape.vocab_size - first) :] = -torch.inf
        return logits_TV

    def _embedding(self, batch: DraftBatch) -> torch.Tensor:
        embedding = self._gpt.embedding.word_embeddings
        self._finish_gather(embedding.weight)
        return embed_rows(embedding, self._side.embed_ids(batch, self.steps), self._groups.tp)

    def _finish_gather(self, parameter: torch.nn.Parameter) -> None:
        """Megatron gathers what a distributed optimizer has stepped when a forward reaches the parameter's own module,
        and this is earlier (`overlap_param_gather`)."""
        ddp = self._model
        if getattr(ddp, "remove_forward_pre_hook_handles", None) and parameter in ddp.param_to_bucket_group:
            by_others = ddp.ddp_config.align_param_gather or ddp.overlap_param_gather_with_optimizer_step
            ddp.param_to_bucket_group[parameter].finish_param_sync(skip_next_bucket_dispatch=by_others)

    def _rows(self, batch: DraftBatch) -> Rows:
        ids_E = self._side.embed_ids(batch, self.steps)
        return Rows(taps=batch.forward_rows // self._scattered, embedding=len(ids_E))

    # The draft's own step

    @contextmanager
    def _joined_finalize(self) -> Iterator[None]:
        """The draft's step follows the policy's gradients. At all other times the policy's configuration is as upstream
        made it, because upstream writes it into checkpoints, functions and all."""
        finalize_policy = self._config.finalize_model_grads_func

        def finalize_both(*args, **kwargs) -> None:
            finalize_policy(*args, **kwargs)
            self.end_schedule()
            self._optimizer_step()
            self.steps += 1

        self._config.finalize_model_grads_func = finalize_both
        try:
            yield
        finally:
            self._config.finalize_model_grads_func = finalize_policy

    def _optimizer_step(self) -> None:
        if self.optimizer is None or self._sums is None:
            return
        sums, self._sums = self._sums, None
        dist.all_reduce(sums, group=self._groups.dp_cp)
        denominator = self._side.denominator(sums[-1])
        self.ddp.scale_gradients(float(self._settings.loss_weight / denominator))
        finalize_grads([self.ddp], self._groups)
        metrics = {"draft_grad_norm": self.optimizer.step()}
        self._metrics.append(metrics | self._side.metrics(sums[:-1]))

    # Weights out

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`(Hugging Face name, full tensor)` on the last stage; nothing on others. Collective over the TP group."""
        if self.draft is not None:
            yield from self._side.export()

    def close(self) -> None:
        """Gives the channel's slots and connections back."""
        if self._channel is not None:
            self._channel.close()


class _Step:
    """One run of the schedule: its microbatches, in the order of this stage's forwards."""

    def __init__(self, batches: Sequence[DraftBatch]):
        self._batches, self.taken = batches, 0

    @property
    def current(self) -> DraftBatch:
        return self._batches[self.taken - 1]

    def take(self) -> DraftBatch:
        if self.taken == len(self._batches):
            raise RuntimeError(
                f"the schedule has more microbatches than the {self.taken} that were planned for the draft"
            )
        self.taken += 1
        return self.current

    def check_complete(self) -> None:
        if self.taken < len(self._batches):
            raise RuntimeError(f"the schedule ran {self.taken} of the {len(self._batches)} microbatches of the draft")


def backward_before(output: torch.Tensor, backward: Callable[[], None]) -> None:
    """Calls `backward` once, when the gradient of `output` is known and before it goes on."""

    def hook(_grad: torch.Tensor) -> None:
        with torch.enable_grad():
            backward()

    output.register_hook(hook)


def _mean(steps: Sequence[dict]) -> dict:
    """The mean of each metric, number by number."""
    if not steps:
        return {}
    columns = {name: torch.tensor([step[name] for step in steps], dtype=torch.float64).mean(0) for name in steps[0]}
    return {name: column.tolist() for name, column in columns.items()}


def draft_transformer_config(policy: TransformerConfig, shape: Shape) -> TransformerConfig:
    """What Megatron's parallel linears and its DDP ask of a configuration."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        ffn_hidden_size=shape.intermediate_size,
        tensor_model_parallel_size=policy.tensor_model_parallel_size,
        params_dtype=policy.params_dtype,
        bf16=policy.params_dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        perform_initialization=False,
    )
