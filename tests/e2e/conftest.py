"""Real vLLM engines on tiny models. One engine at a time lives in the process; `start_engine` closes the one before."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nemo_ext.rollout.engine import RolloutEngine
from tests import fixtures_block_drafts as block_drafts
from tests import fixtures_models as models

DRAFTED = 4


@dataclass
class Model:
    """A Hugging Face folder and what was written into it."""

    folder: Path
    config: dict
    tensors: dict[str, torch.Tensor]


def stream(policy: dict[str, torch.Tensor], draft: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The stream of a refresh."""
    return [*policy.items(), *((f"draft.{name}", tensor) for name, tensor in draft.items())]


def method_of(draft_config: dict) -> str:
    """vLLM's name of a draft's method."""
    if "markov_rank" in draft_config:
        return "dspark"
    return "dflash" if "dflash_config" in draft_config else "eagle3"


def exact_logits(model: Model, tensors: dict[str, torch.Tensor], token_ids: list[list[int]]) -> torch.Tensor:
    """Logits [B, T, V] of transformers' own model with the given weights, fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model.folder), attn_implementation="eager")
    reference.load_state_dict(tensors, strict=False)
    reference.tie_weights()
    with torch.no_grad():
        return reference.eval()(torch.tensor(token_ids)).logits


@pytest.fixture(scope="session")
def make_policy(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """make(seed=..., mixing=..., silent_mask=..., **config) -> a policy in a folder of its own."""

    def make(seed: int = 0, mixing: float = 0.05, silent_mask: bool = False, **config) -> Model:
        made = models.policy_config(**config)
        tensors = models.policy_tensors(made, seed, mixing=mixing)
        if silent_mask:
            tensors = block_drafts.with_silent_mask(tensors)
        return Model(models.write_model(tmp_path_factory.mktemp("policy"), made, tensors), made, tensors)

    return make


@pytest.fixture(scope="session")
def make_draft(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """make(policy, random=False, **config) -> the bigram draft of a policy (or a random one) in a folder of its own."""

    def make(policy: Model, random: bool = False, **config) -> Model:
        made = models.draft_config(policy.config, **config)
        tensors = models.random_draft(made) if random else models.bigram_draft(made, policy.tensors)
        return Model(models.write_model(tmp_path_factory.mktemp("draft"), made, tensors), made, tensors)

    return make


@pytest.fixture(scope="session")
def make_block_draft(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """make(policy, tensors=function of (config, policy's tensors), **config) -> a DFlash or DSpark draft in a folder
    of its own, random unless `tensors` makes it."""

    def make(policy: Model, tensors: Callable | None = None, **config) -> Model:
        made = block_drafts.block_draft_config(policy.config, **config)
        weights = tensors(made, policy.tensors) if tensors else block_drafts.random_block_draft(made)
        return Model(models.write_model(tmp_path_factory.mktemp("block_draft"), made, weights), made, weights)

    return make


@pytest.fixture(scope="session")
def policy(make_policy) -> Model:
    """64 tokens, 4 layers whose contribution is weak."""
    return make_policy()


@pytest.fixture(scope="session")
def draft(make_draft, policy) -> Model:
    """A draft that `policy` accepts nearly always, with a head equal to the policy's."""
    return make_draft(policy)


@pytest.fixture(scope="module")
def start_engine() -> Iterator[Callable[..., RolloutEngine]]:
    """start(policy, draft=None, **engine arguments) -> a running engine; closes the one that it started before."""
    running: list[RolloutEngine] = []

    def start(policy: Model, draft: Model | None = None, *, sample: str = "probabilistic", **kwargs) -> RolloutEngine:
        while running:
            running.pop().close()
        speculative = None
        if draft is not None:
            speculative = {
                "method": method_of(draft.config),
                "model": str(draft.folder),
                "num_speculative_tokens": DRAFTED,
                "draft_sample_method": sample,
            }
        engine = RolloutEngine(
            policy.folder, speculative_config=speculative, **{"max_model_len": 256, "max_num_seqs": 64, **kwargs}
        )
        running.append(engine)
        return engine

    yield start
    while running:
        running.pop().close()
