"""The worker extension in a real vLLM engine on a CPU, refitted through upstream's own transports.

It runs in the package's own environment, which has vLLM, with the checkout on the path.
"""

from pathlib import Path

import pytest
import torch

vllm = pytest.importorskip("vllm")

from nemo_ext.nemo_rl.hooks import WORKER_EXTENSION, engine_arguments  # noqa: E402
from nemo_ext.rollout.cpu_worker import plain_linear  # noqa: E402
from nemo_ext.rollout.draft_model import find_draft_model  # noqa: E402
from nemo_ext.rollout.engine import CPU_WORKER  # noqa: E402
from nemo_ext.rollout.environment import prepare_environment  # noqa: E402
from nemo_ext.rollout.errors import EngineUnusable, RefreshError  # noqa: E402
from nemo_ext.rollout.metrics import read_counters, stats_between  # noqa: E402
from nemo_ext.rollout.readback import read_weight  # noqa: E402
from tests import fixtures_models as models  # noqa: E402
from tests.upstream import transports  # noqa: E402

BUCKET = 1 << 16
PROMPTS = [[5, 9, 2 + i] for i in range(8)]


def stream(policy: dict, draft: dict) -> list[tuple[str, torch.Tensor]]:
    return [*policy.items(), *((f"draft.{name}", tensor) for name, tensor in draft.items())]


def info_of(pairs) -> dict:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in pairs}


class Engine:
    """A served policy and draft, and the worker inside."""

    def __init__(self, folder: Path):
        prepare_environment()
        self.config = models.policy_config()
        self.draft_config = models.draft_config(self.config)
        self.policy = models.policy_tensors(self.config, 0, mixing=0.05)
        draft = models.random_draft(self.draft_config)
        models.write_model(folder / "policy", self.config, self.policy)
        models.write_model(folder / "draft", self.draft_config, draft)
        arguments = {
            "worker_extension_cls": "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension",
            "load_format": "dummy",
            "worker_cls": CPU_WORKER,
            "speculative_config": {
                "method": "eagle3",
                "model": str(folder / "draft"),
                "num_speculative_tokens": 4,
            },
        }
        self.llm = vllm.LLM(
            str(folder / "policy"),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=8,
            enforce_eager=True,
            seed=0,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **engine_arguments(arguments),
        )

    def call(self, function, *args):
        """`function(worker, *args)` with vLLM's worker, which the extension is mixed into."""
        return self.llm.collective_rpc(lambda wrapper: function(wrapper.worker, *args))[0]

    def new_weights(self, seed: int) -> list[tuple[str, torch.Tensor]]:
        """Another policy, and a draft that knows it by heart."""
        policy = models.policy_tensors(self.config, seed, mixing=0.05)
        return stream(policy, models.bigram_draft(self.draft_config, policy))

    def served(self, names) -> dict[str, torch.Tensor]:
        return self.call(
            lambda worker: {
                name: read_weight(worker.model_runner.get_model(), find_draft_model(worker), name) for name in names
            }
        )

    def generate(self) -> tuple[list, float]:
        """Greedy tokens, and the accepted length."""
        self.llm.reset_prefix_cache()
        before = read_counters(self.llm.get_metrics())
        params = vllm.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        stats = stats_between(before, read_counters(self.llm.get_metrics()))
        return [list(output.outputs[0].token_ids) for output in outputs], stats.accepted_length


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with plain_linear(), transports.on_cpu(BUCKET):
        made = Engine(tmp_path_factory.mktemp("served"))
        pairs = made.new_weights(1)
        made.before_the_announcement = made.served([name for name, _ in pairs])
        made.call(lambda worker: worker.prepare_refit_info(info_of(pairs)))
        made.after_the_announcement = made.served([name for name, _ in pairs])
        yield made
        made.llm.llm_engine.engine_core.shutdown()


def refit(engine, transport, pairs) -> bool:
    if transport == "ipc":
        return engine.call(transports.ipc, pairs, BUCKET)
    return engine.call(transports.collective, pairs)


def test_the_hook_puts_the_extension_into_the_engine(engine):
    module, _, name = WORKER_EXTENSION.rpartition(".")
    assert engine.call(lambda worker: [cls.__name__ for cls in type(worker).__mro__ if cls.__module__ == module]) == [
        name
    ]


def test_the_announcement_of_refits_touches_no_weights(engine):
    """A colocated engine sleeps meanwhile, and its weights have no memory."""
    before, after = engine.before_the_announcement, engine.after_the_announcement
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("transport", "seed"), [("ipc", 1), ("collective", 2)])
def test_a_refit_replaces_policy_and_draft_bit_for_bit(engine, transport, seed):
    old_tokens, _ = engine.generate()
    version = engine.call(lambda worker: worker.weights_version())
    pairs = engine.new_weights(seed)
    assert refit(engine, transport, pairs)
    served = engine.served([name for name, _ in pairs])
    assert all(torch.equal(served[name], tensor) for name, tensor in pairs)
    assert engine.call(lambda worker: worker.weights_version()) == version + 1
    tokens, accepted_length = engine.generate()
    assert tokens != old_tokens
    assert accepted_length > 3.0  # of 5: the draft is the new policy's own bigram table


def test_a_draft_of_another_shape_is_refused_before_anything_of_a_refit_is_taken(engine, capfd):
    pairs = dict(engine.new_weights(1))
    before = engine.served(list(pairs))
    wrong = [(n, torch.zeros(64, 64) if n == "draft.fc.weight" else tensor) for n, tensor in pairs.items()]
    engine.call(lambda worker: worker.prepare_refit_info(info_of(wrong)))
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        refit(engine, "collective", wrong)
    missing = [(name, tensor) for name, tensor in pairs.items() if name != "draft.norm.weight"]
    engine.call(lambda worker: worker.prepare_refit_info(info_of(missing)))
    assert not refit(engine, "collective", missing)
    assert "norm.weight" in capfd.readouterr().out
    policy_alone = info_of((name, tensor) for name, tensor in pairs.items() if not name.startswith("draft."))
    with pytest.raises(RefreshError, match="refits bring 0 draft tensors"):
        engine.call(lambda worker: worker.prepare_refit_info(policy_alone))
    info = info_of(pairs.items())
    engine.call(lambda worker: worker.prepare_refit_info(info))
    assert refit(engine, "collective", list(before.items()))


def test_a_torn_refit_is_told_and_nothing_is_served_afterwards(engine, capfd):
    pairs = engine.new_weights(3)
    # The trainer's stream breaks off inside the draft: what was announced does not all come.
    assert not refit(engine, "ipc", pairs[:-2])
    with pytest.raises(EngineUnusable, match="broke off"):
        engine.call(lambda worker: worker.weights_version())
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[draft] ")]
    assert len(told) == 1 and "a refresh broke off after weights of version" in told[0]
    assert not refit(engine, "collective", pairs)
    assert "build the engine anew" in capfd.readouterr().out
