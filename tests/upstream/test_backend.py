"""The worker extension in a real vLLM engine on a CPU, refitted through upstream's own transports.

It runs with the vLLM that this NeMo-RL pins, and with the checkout on the path.
"""

import pytest
import torch

from nemo_ext.nemo_rl.hooks import WORKER_EXTENSION
from nemo_ext.rollout.errors import EngineUnusable, RefreshError
from tests import fixtures_models as models
from tests.e2e.conftest import stream
from tests.upstream.served import serving

PROMPTS = [[5, 9, 2 + i] for i in range(8)]


def new_weights(engine, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Another policy, and a draft that knows it by heart."""
    policy = models.policy_tensors(engine.config, seed, mixing=0.05)
    return stream(policy, models.bigram_draft(engine.draft_config, policy))


def held(pairs) -> dict[str, torch.Tensor]:
    """What of a refit the engine keeps: not the inverse vocabulary map."""
    return {name: tensor for name, tensor in pairs if name != "draft.t2d"}


def greedy(engine) -> tuple[list, float]:
    """Greedy tokens, and the accepted length."""
    rollouts = engine.generate(PROMPTS)
    return [sample.token_ids for sample in rollouts.samples], rollouts.accepted_length


# EAGLE-3 drafts over the whole vocabulary, as every fresh one is, and over a part of it.
@pytest.fixture(scope="module", params=[None, 32], ids=["whole vocabulary", "reduced vocabulary"])
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    config = models.policy_config()
    draft_config = models.draft_config(config, draft_vocab_size=request.param)
    models.write_model(folder / "policy", config, models.policy_tensors(config, 0, mixing=0.05))
    models.write_model(folder / "draft", draft_config, models.random_draft(draft_config))
    with serving(folder / "policy", folder / "draft") as made:
        made.config, made.draft_config = config, draft_config
        pairs = new_weights(made, 1)
        made.before_the_announcement = made.served(held(pairs))
        made.announce(pairs)
        made.after_the_announcement = made.served(held(pairs))
        yield made


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
    old_tokens, _ = greedy(engine)
    version = engine.call(lambda worker: worker.weights_version())
    pairs = new_weights(engine, seed)
    assert engine.refit(transport, pairs)
    served = engine.served(held(pairs))
    assert all(torch.equal(served[name], tensor) for name, tensor in held(pairs).items())
    assert engine.call(lambda worker: worker.weights_version()) == version + 1
    tokens, accepted_length = greedy(engine)
    assert tokens != old_tokens
    # Of 5: the draft is the new policy's own bigram table, or that of every second token.
    assert accepted_length > (3.0 if engine.draft_config["draft_vocab_size"] == 64 else 1.3)


def test_a_draft_of_another_shape_is_refused_before_anything_of_a_refit_is_taken(engine, capfd):
    pairs = dict(new_weights(engine, 1))
    before = pairs | engine.served(held(pairs.items()))
    wrong = [(n, torch.zeros(64, 64) if n == "draft.fc.weight" else tensor) for n, tensor in pairs.items()]
    engine.announce(wrong)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        engine.refit("collective", wrong)
    missing = [(name, tensor) for name, tensor in pairs.items() if name != "draft.norm.weight"]
    engine.announce(missing)
    assert not engine.refit("collective", missing)
    assert "norm.weight" in capfd.readouterr().out
    policy_alone = [(name, tensor) for name, tensor in pairs.items() if not name.startswith("draft.")]
    with pytest.raises(RefreshError, match="refits bring 0 draft tensors"):
        engine.announce(policy_alone)
    engine.announce(list(pairs.items()))
    assert engine.refit("collective", list(before.items()))


def test_a_torn_refit_is_told_and_nothing_is_served_afterwards(engine, capfd):
    pairs = new_weights(engine, 3)
    # The trainer's stream breaks off inside the draft: what was announced does not all come.
    assert not engine.refit("ipc", pairs[:-2])
    with pytest.raises(EngineUnusable, match="broke off"):
        engine.call(lambda worker: worker.weights_version())
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[draft] ")]
    assert len(told) == 1 and "a refresh broke off after weights of version" in told[0]
    assert not engine.refit("collective", pairs)
    assert "build the engine anew" in capfd.readouterr().out
