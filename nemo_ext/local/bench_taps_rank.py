"""One rank of `nemo-ext bench taps`: the same training batch, with taps carried in different ways or not at all.

Legend: T rows of this rank, K taps, E rows with halo, H hidden size, V this rank's shard of the vocabulary.
"""

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict

import torch
import torch.distributed as dist

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from nemo_ext.attention.core_attention import PackedParams
from nemo_ext.cotrain import Eagle3Objective, embed_rows, read_target
from nemo_ext.drafts.eagle3 import Eagle3Draft
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_hf import load_eagle3
from nemo_ext.drafts.eagle3_init import init_eagle3
from nemo_ext.local.batch import Microbatch, Sample, microbatches
from nemo_ext.local.bench_taps_figures import WAYS, BenchSize, StepTimes
from nemo_ext.local.blocking_taps import BlockingTaps
from nemo_ext.local.grpo_loss import supervised_loss, token_log_probs
from nemo_ext.local.hf_policy import init_policy, load_policy
from nemo_ext.local.optim import wrap_ddp
from nemo_ext.local.parallel import ParallelSizes, destroy_parallel, init_gloo, init_parallel
from nemo_ext.local.policy import build_policy, policy_config
from nemo_ext.local.schedule import forward_backward
from nemo_ext.local.schedule_spans import ScheduleSpans
from nemo_ext.taps import Rows, open_channel
from nemo_ext.taps.trace import Trace


def run_rank(rank: int, world_size: int, init_method: str, size: BenchSize, repeats: int) -> dict:
    """`repeats` steps of every way, in turns, so that a busy machine hits all alike; the first turn does not count.

    Gives the transports of the sources, the embedding rows of a microbatch, and the `StepTimes` of each way.
    """
    init_gloo(rank, world_size, init_method)
    groups = init_parallel(ParallelSizes(pp=size.pp), seed=1)
    try:
        bench = _Bench(size, groups)
        times: dict[str, list[StepTimes]] = {way: [] for way in WAYS}
        for turn in range(repeats + 1):
            for way in WAYS:
                taken = bench.step(*WAYS[way])
                if turn > 0:
                    times[way].append(taken)
        bench.channel.close()
        return {
            "transports": bench.channel.transports,
            "embedding_rows": bench.embedding_rows,
            "steps": times,
        }
    finally:
        destroy_parallel()


class _Bench:
    def __init__(self, size: BenchSize, groups):
        self._size, self._groups = size, groups
        config = policy_config(size.hf_config, groups)
        self._trace = Trace(recording=True)
        self._spans = ScheduleSpans(self._trace)
        config.timers = self._spans
        self._chunks = [build_policy(size.hf_config, config, groups)]
        load_policy(self._chunks, size.hf_config, init_policy(size.hf_config, seed=1), groups)
        self._ddp = [wrap_ddp(chunk, config) for chunk in self._chunks]
        self._is_last = groups.pp.rank() == groups.pp.size() - 1
        self._batches = _batches(size)
        self._depth = Eagle3Objective.halo_depth(size.passes)
        halo = [len(batch.layout.halo(self._depth).rows) for batch in self._batches]
        self._rows = [Rows(batch.layout.local_total, n) for batch, n in zip(self._batches, halo, strict=True)]
        self.embedding_rows = max(halo)
        self._channel_trace, self._draft_trace = Trace(recording=True), Trace(recording=True)
        self.channel = open_channel(
            self._chunks,
            size.tap_layers,
            groups.pp,
            width=size.hf_config["hidden_size"],
            dtype=torch.float32,
            max_rows=max(rows.taps for rows in self._rows),
            max_embedding_rows=self.embedding_rows,
            transport=size.transport,
            trace=self._channel_trace,
        )
        self._blocking = BlockingTaps(self._chunks, self.channel.plan, groups.pp)
        if self._is_last:
            shape = Eagle3Config.for_policy(size.hf_config, size.tap_layers)
            self._draft = Eagle3Draft(shape, config, groups.tp)
            load_eagle3(self._draft, init_eagle3(shape, seed=2), groups.tp)
            self._draft_ddp = wrap_ddp(self._draft, config)
            self._objective = Eagle3Objective(self._draft, pass_weights=[1.0] * size.passes)
            counts = sum(self._objective.count(batch.layout, batch.label_mask_R) for batch in self._batches)
            self._denominator = self._objective.denominator(counts)

    def step(self, travel: str, with_draft: bool) -> StepTimes:
        """Forward and backward of one batch."""
        for ddp in self._ddp:
            ddp.zero_grad_buffer()
        carrier = {"none": None, "channel": self.channel, "blocking": self._blocking}[travel]
        self._spans.before = self._blocking.settle if travel == "blocking" else None
        for trace in (self._trace, self._channel_trace, self._draft_trace):
            trace.spans.clear()
        gc.collect()
        dist.barrier()
        start, cpu_start = time.monotonic(), time.process_time()
        with carrier.step(self._rows) if carrier else nullcontext() as stats:
            forward_backward(self._ddp, self._forward_step(carrier, with_draft), self._batches, self._groups)
        took, cpu = time.monotonic() - start, time.process_time() - cpu_start
        spans = {
            "schedule": list(self._trace.spans),
            "taps": list(self._channel_trace.spans),
            "draft": list(self._draft_trace.spans),
        }
        return StepTimes(
            step=took,
            cpu=cpu,
            forward=sum(span.seconds for span in spans["schedule"] if span.name.startswith("forward")),
            backward=sum(span.seconds for span in spans["schedule"] if span.name.startswith("backward")),
            channel=asdict(stats) if travel == "channel" else {},
            spans=spans,
        )

    def _forward_step(self, carrier, with_draft: bool) -> Callable:
        tokens = float(sum(batch.label_mask_R.sum() for batch in self._batches))

        def forward_step(iterator, model):
            batch: Microbatch = next(iterator)
            with carrier.forward(model, lambda: self._embedding(batch)) if carrier else nullcontext() as landing:
                output = model(
                    input_ids=batch.tokens_R[None],
                    position_ids=None,
                    attention_mask=None,
                    packed_seq_params=PackedParams.of(batch.layout),
                )

            def loss_function(logits_1TV):
                log_prob_T = token_log_probs(logits_1TV, batch.next_token(batch.tokens_R), 1.0)
                total = supervised_loss(log_prob_T, batch, tokens=tokens).loss
                if with_draft:
                    with self._draft_trace.span("draft forward"):
                        target = read_target(self._chunks[-1], landing, logits_1TV.squeeze(0), self._groups.tp)
                        draft = self._objective.loss(batch.layout, batch.label_mask_R, target, self._denominator)
                    total = landing.freed_after(total + draft.loss)
                elif landing is not None:
                    landing.free()
                return total, torch.ones((), dtype=torch.int), {}

            return output, loss_function

        return forward_step

    def _embedding(self, batch: Microbatch) -> torch.Tensor:
        ids_E = batch.tokens_R[batch.layout.halo(self._depth).rows]
        return embed_rows(self._chunks[0].embedding.word_embeddings, ids_E, self._groups.tp)


def _batches(size: BenchSize) -> list[Microbatch]:
    """Packs of one prompt and response each, all tokens random."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for _ in range(size.microbatches):
        tokens = torch.randint(0, size.hf_config["vocab_size"], (size.tokens,), generator=generator).tolist()
        response = tokens[size.tokens // 8 :]
        samples.append(Sample(tokens[: size.tokens // 8], response, [0.0] * len(response)))
    return microbatches(
        samples, packed=True, max_tokens=size.tokens, max_sequences=1, cp_size=1, cp_rank=0, pad_multiple=1
    )
