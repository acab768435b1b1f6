"""A policy and a draft in the pinned vLLM engine on a CPU, behind this package's worker extension.

The engine is made from the arguments that NeMo-RL's generation worker would hand over, through the patched line's hook,
and refitted through NeMo-RL's own transports, both ends of which share this process (`transports`).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.upstream import v2_runner

if v2_runner.wanted():
    v2_runner.install()

# isort: split
import vllm
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from nemo_ext.nemo_rl.hooks import UPSTREAM_EXTENSION, engine_arguments
from nemo_ext.rollout.cpu_worker import plain_linear
from nemo_ext.rollout.draft_model import find_draft_model
from nemo_ext.rollout.engine import CPU_WORKER, extra_methods
from nemo_ext.rollout.environment import prepare_environment
from nemo_ext.rollout.metrics import read_counters, stats_between
from nemo_ext.rollout.readback import read_weight
from tests.upstream import cpu_runner, transports

cpu_runner.install()
BUCKET = 1 << 16
MAX_MODEL_LEN = 128


class Served:
    """The engine, and the worker inside.

    Args:
        policy, draft: Hugging Face folders.
        method: of `speculative_config`.
        drafted: tokens a step.
    """

    def __init__(self, policy: Path, draft: Path, method: str = "eagle3", drafted: int = 4):
        prepare_environment()
        speculative = {"method": method, "model": str(draft), "num_speculative_tokens": drafted}
        arguments = engine_arguments(
            {
                "worker_extension_cls": UPSTREAM_EXTENSION,
                "load_format": "dummy",
                "worker_cls": CPU_WORKER,
                "speculative_config": speculative,
            }
        )
        with extra_methods(speculative):
            self.llm = vllm.LLM(
                str(policy),
                dtype="float32",
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=8,
                enforce_eager=True,
                seed=0,
                skip_tokenizer_init=True,
                disable_log_stats=False,
                # vLLM 0.20.0 would put a CPU worker into a process of its own, out of the transports' reach.
                distributed_executor_backend=UniProcExecutor,
                **arguments,
            )
        assert hasattr(self.runner, "speculator") == v2_runner.wanted()

    def call(self, function, *args):
        """`function(worker, *args)` with vLLM's worker, which the extension is mixed into."""
        return self.llm.collective_rpc(lambda wrapper: function(wrapper.worker, *args))[0]

    @property
    def runner(self):
        """The worker's model runner."""
        return self.call(lambda worker: worker.model_runner)

    def announce(self, pairs) -> None:
        """Tells the engine what all refits will bring, as NeMo-RL does at setup."""
        info = {name: (tensor.shape, tensor.dtype) for name, tensor in pairs}
        self.call(lambda worker: worker.prepare_refit_info(info))

    def refit(self, transport: str, pairs) -> bool:
        """One refit through `ipc` or `collective`; whether the engine took it."""
        if transport == "ipc":
            return self.call(transports.ipc, pairs, BUCKET)
        return self.call(transports.collective, pairs)

    def served(self, names) -> dict[str, torch.Tensor]:
        """Copies of served tensors by Hugging Face name."""
        return self.call(
            lambda worker: {
                name: read_weight(worker.model_runner.get_model(), find_draft_model(worker), name) for name in names
            }
        )

    def generate(self, prompt_token_ids, temperature: float = 0.0, max_new_tokens: int = 24) -> SimpleNamespace:
        """`samples[i].token_ids`, and the accepted length."""
        self.llm.reset_prefix_cache()
        before = read_counters(self.llm.get_metrics())
        params = vllm.SamplingParams(
            temperature=temperature, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False
        )
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompt_token_ids], params, use_tqdm=False)
        stats = stats_between(before, read_counters(self.llm.get_metrics()))
        samples = [SimpleNamespace(token_ids=list(output.outputs[0].token_ids)) for output in outputs]
        return SimpleNamespace(samples=samples, accepted_length=stats.accepted_length)

    def close(self) -> None:
        """Frees the engine and the process groups that vLLM made in this process."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        cleanup_dist_env_and_memory()


@contextlib.contextmanager
def serving(*args, **kwargs) -> Iterator[Served]:
    """A `Served` while the block runs, in a process whose "cuda" is the CPU."""
    with plain_linear(), transports.on_cpu(BUCKET):
        made = Served(*args, **kwargs)
        try:
            yield made
        finally:
            made.close()
