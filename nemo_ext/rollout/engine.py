"""A vLLM engine in this process that makes rollouts and takes whole weight refreshes. No Ray, no trainer."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_ext.rollout.environment import prepare_environment
from nemo_ext.rollout.errors import EngineUnusable
from nemo_ext.rollout.manifest import TensorSpec, manifest_of
from nemo_ext.rollout.metrics import AcceptStats, read_counters, stats_between

EXTENSION = "nemo_ext.rollout.worker_extension.RefreshWorkerExtension"
CPU_WORKER = "nemo_ext.rollout.cpu_worker.RefreshableCPUWorker"


@dataclass(frozen=True)
class Sample:
    """One generated sequence.

    Attributes:
        prompt: index of its prompt in the call.
        token_ids: generated ids, a stop token included.
        logprobs: of each, in nats, under the distribution that it was drawn from: the policy's at the rollouts'
            weights version, after temperature, top-k and top-p. Greedy decoding gives those at temperature 1.
        finish_reason: "stop" (a stop token) or "length".
    """

    prompt: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class Rollouts:
    """What one generate call made.

    Attributes:
        samples: n for each prompt, prompts in order.
        weights_version: of the policy and draft that made all of them.
        accept: statistics of speculation; None without a draft, or when nothing was verified.
        seconds: wall clock of the generation.
        generated_tokens: over all samples.
    """

    samples: list[Sample]
    weights_version: int
    accept: AcceptStats | None
    seconds: float
    generated_tokens: int


class RolloutEngine:
    """Serves a policy, with a draft if speculative_config names one, and is refreshed in place.

    Args:
        policy: local Hugging Face folder (safetensors).
        speculative_config: vLLM's own dict (method, model: a local folder, num_speculative_tokens,
            draft_sample_method, ...); None serves without a draft.
        max_model_len: longest prompt plus generation, in tokens.
        max_num_seqs: sequences decoded together.
        dtype: of the served weights.
        seed: of vLLM's own initial state; generate takes its own.
        weights_version: of the weights in the folders.
        refresh_draft: False serves the draft of the folder throughout; refreshes then bring the policy alone.
        vllm_kwargs: further arguments of vllm.LLM.

    Raises:
        RefreshError: the folders cannot be refreshed later (see RefreshWorkerExtension.prepare_refresh).
    """

    def __init__(
        self,
        policy: str | Path,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        max_model_len: int = 512,
        max_num_seqs: int = 32,
        dtype: str = "float32",
        seed: int = 0,
        weights_version: int = 0,
        refresh_draft: bool = True,
        vllm_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        prepare_environment()
        import vllm

        self._sampling_params = vllm.SamplingParams
        kwargs = {"worker_extension_cls": EXTENSION, "enforce_eager": True}
        if not torch.cuda.is_available():
            kwargs["worker_cls"] = CPU_WORKER
        if speculative_config is not None:
            # With a dummy load vLLM would make the draft's head the target's.
            kwargs["speculative_config"] = {
                "draft_load_config": {"load_format": "auto", "use_tqdm_on_load": False},
                **speculative_config,
            }
        self.max_model_len = max_model_len
        self._unusable = ""
        with extra_methods(speculative_config):
            self._llm = vllm.LLM(
                str(policy),
                dtype=dtype,
                max_model_len=max_model_len + room_for_drafts(policy, max_model_len, speculative_config),
                max_num_seqs=max_num_seqs,
                seed=seed,
                skip_tokenizer_init=True,
                use_tqdm_on_load=False,
                disable_log_stats=False,
                logprobs_mode="processed_logprobs",
                **{**kwargs, **(vllm_kwargs or {})},
            )
        try:
            self._call("prepare_refresh", weights_version, refresh_draft)
            self._call("correct_sampler")
        except Exception:
            self.close()
            raise

    def warm(self) -> None:
        """Takes the cost of first calls (both sampling paths) out of the first rollout."""
        for temperature in (0.0, 1.0):
            self.generate([[1, 1]], temperature=temperature, max_new_tokens=8)

    def generate(
        self,
        prompt_token_ids: list[list[int]],
        n: int = 1,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        max_new_tokens: int = 64,
        stop_token_ids: Iterable[int] = (),
        seed: int = 0,
    ) -> Rollouts:
        """n samples of each prompt, at temperature 0 greedy. The same weights, call and seed give the same samples.

        Only stop_token_ids stop a sample before max_new_tokens; the model's own end token is no exception.

        Raises:
            ValueError: a prompt is empty, or does not fit with max_new_tokens into max_model_len.
            EngineUnusable: an earlier refresh or step broke the engine, or this one's step did.
        """
        self._check_prompts(prompt_token_ids, max_new_tokens)
        version = self.weights_version()
        params = self._sampling_params(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k or 0,
            max_tokens=max_new_tokens,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": list(ids)} for ids in prompt_token_ids for _ in range(n)]
        # What a prompt finds cached changes the shapes computed, hence rounding: seeds must not depend on history.
        self._reset_prefix_cache()
        self._call("seed_sampling", seed)
        before = read_counters(self._llm.get_metrics())
        start = time.perf_counter()
        try:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        except Exception as error:
            self._unusable = f"generation failed and left vLLM's core unusable: {type(error).__name__}: {error}"
            raise EngineUnusable(self._unusable) from error
        seconds = time.perf_counter() - start
        samples = [to_sample(i // n, output.outputs[0]) for i, output in enumerate(outputs)]
        return Rollouts(
            samples=samples,
            weights_version=version,
            accept=stats_between(before, read_counters(self._llm.get_metrics())),
            seconds=seconds,
            generated_tokens=sum(len(sample.token_ids) for sample in samples),
        )

    def refresh(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        manifest: Iterable[TensorSpec] | None = None,
        *,
        bucket_bytes: int = 1 << 28,
    ) -> float:
        """Replaces policy and draft by the streamed weights, whole, and publishes `version`.

        Args:
            version: of the new weights.
            tensors: (Hugging Face name, tensor), draft tensors prefixed `draft.`, in any order.
            manifest: what the stream will bring. Without it the whole stream is held in memory to make one; with it
                policy tensors are written as they come, bucket_bytes at a time.

        Returns:
            Seconds that it took.

        Raises:
            RefreshError: refused before anything was written; the old version still serves.
            EngineUnusable: broke off half written.
        """
        start = time.perf_counter()
        self.weights_version()
        if manifest is None:
            tensors = list(tensors)
            manifest = manifest_of(tensors)
        self._call("begin_refresh", list(manifest))
        try:
            for bucket in in_buckets(tensors, bucket_bytes):
                self._call("load_bucket", bucket)
        except Exception as error:
            self._call("abort_refresh", f"{type(error).__name__}: {error}")
            self.weights_version()
            raise
        self._call("finish_refresh")
        self._reset_prefix_cache()
        self._call("publish_weights", version)
        return time.perf_counter() - start

    def weights_version(self) -> int:
        """The version that serves.

        Raises:
            EngineUnusable: none does.
        """
        if self._unusable:
            raise EngineUnusable(f"{self._unusable}; build the engine anew")
        return self._call("weights_version")

    def read_weights(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Copies of served tensors, by Hugging Face name (`draft.` prefixed) or vLLM's parameter name."""
        return self._call("read_weights", names)

    def state_digest(self) -> dict[str, str | None]:
        """SHA-256 of all served weights: {"policy": hex, "draft": hex or None}."""
        return self._call("state_digest")

    def close(self) -> None:
        """Frees the engine and the process groups that vLLM made in this process."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._unusable = "the engine is closed"
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        cleanup_dist_env_and_memory()

    def _call(self, method: str, *args) -> Any:
        """A method of the extension on every worker; the first worker's answer."""
        return self._llm.collective_rpc(method, args=args)[0]

    def _reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            self._unusable = "the prefix cache could not be emptied: requests are still running"
            raise EngineUnusable(self._unusable)

    def _check_prompts(self, prompt_token_ids: list[list[int]], max_new_tokens: int) -> None:
        for i, ids in enumerate(prompt_token_ids):
            if not ids:
                raise ValueError(f"prompt {i} is empty; it needs at least one token")
            if len(ids) + max_new_tokens > self.max_model_len:
                raise ValueError(
                    f"prompt {i} has {len(ids)} tokens and max_new_tokens is {max_new_tokens}, together more than "
                    f"max_model_len {self.max_model_len}; shorten either or raise max_model_len"
                )


def extra_methods(speculative_config: Mapping[str, Any] | None) -> AbstractContextManager:
    """While an engine starts: on a CPU, DSpark too, which vLLM serves on GPUs only."""
    if torch.cuda.is_available() or (speculative_config or {}).get("method") != "dspark":
        return nullcontext()
    from nemo_ext.rollout.dspark_cpu_proposer import dspark_on_v1

    return dspark_on_v1()


def room_for_drafts(policy: str | Path, max_model_len: int, speculative_config: Mapping[str, Any] | None) -> int:
    """Tokens beyond max_model_len that vLLM needs to draft for a sequence up to its end, as positions allow.

    In a step in which one sequence has no room for its K unverified tokens and another block, vLLM drafts for none,
    and the drafts of all others miss that step's rows for the rest of their sequences.
    """
    drafted = (speculative_config or {}).get("num_speculative_tokens") or 0
    if not drafted:
        return 0
    positions = json.loads((Path(policy) / "config.json").read_text()).get("max_position_embeddings", max_model_len)
    return max(0, min(2 * drafted, positions - max_model_len))


def to_sample(prompt: int, completion) -> Sample:
    """vLLM's completion as a Sample."""
    ids = list(completion.token_ids)
    logprobs = [at[token].logprob for at, token in zip(completion.logprobs, ids, strict=True)]
    return Sample(prompt, ids, logprobs, completion.finish_reason)


def in_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The stream in lists of about bucket_bytes; a larger tensor has one of its own."""
    bucket, size = [], 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
