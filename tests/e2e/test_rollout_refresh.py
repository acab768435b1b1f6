"""Refreshes of a running engine: whole or refused, and what is generated follows."""

import pytest
import torch

from nemo_ext.rollout.errors import EngineUnusable, RefreshError
from nemo_ext.rollout.manifest import manifest_of
from tests import fixtures_models as models
from tests.e2e.conftest import exact_logits, stream

pytestmark = pytest.mark.e2e
PROMPTS = [[3 + i, 5, 7, 9, 11] for i in range(8)]
# Several blocks of the prefix cache, so that a second generation finds all but the last there.
LONG_PROMPT = [3 + (7 * i * i + i) % 60 for i in range(140)]


@pytest.fixture(scope="module")
def engine(start_engine, policy, draft):
    return start_engine(policy, draft, vllm_kwargs={"block_size": 32})


@pytest.fixture
def fresh(engine, policy, draft):
    """The engine at version 0 with the weights of its folders."""
    engine.refresh(0, stream(policy.tensors, draft.tensors))
    return engine


@pytest.fixture(scope="module")
def new_policy(policy):
    return models.policy_tensors(policy.config, seed=1, mixing=0.05)


@pytest.fixture(scope="module")
def new_draft(draft, new_policy):
    return models.bigram_draft(draft.config, new_policy)


def greedy(engine) -> list[list[int]]:
    return [s.token_ids for s in engine.generate(PROMPTS, temperature=0.0, max_new_tokens=32).samples]


def worst_logprob_error(engine, policy, tensors, prompt: list[int]) -> float:
    """Largest difference of the engine's log-probabilities from transformers' with the given weights."""
    (sample,) = engine.generate([prompt], max_new_tokens=40).samples
    logits_TV = exact_logits(policy, tensors, [prompt + sample.token_ids])[0, len(prompt) - 1 : -1]
    exact = logits_TV.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    return (torch.tensor(sample.logprobs) - exact).abs().max().item()


def test_generation_and_logprobs_follow_a_refresh(fresh, policy, new_policy, new_draft):
    before = greedy(fresh)
    assert worst_logprob_error(fresh, policy, policy.tensors, LONG_PROMPT) < 1e-5
    fresh.refresh(1, stream(new_policy, new_draft))
    assert greedy(fresh) != before
    assert worst_logprob_error(fresh, policy, new_policy, LONG_PROMPT) < 1e-5
    rollouts = fresh.generate(PROMPTS, max_new_tokens=32)
    assert rollouts.weights_version == 1
    assert rollouts.accept.accepted_length > 3


def test_a_stale_draft_costs_acceptance_and_nothing_else(fresh, policy, draft, new_policy, new_draft):
    fresh.refresh(1, stream(new_policy, new_draft))
    followed = fresh.generate(PROMPTS, 4, temperature=0.0, max_new_tokens=32)
    fresh.refresh(2, stream(new_policy, draft.tensors))
    stale = fresh.generate(PROMPTS, 4, temperature=0.0, max_new_tokens=32)
    assert [s.token_ids for s in stale.samples] == [s.token_ids for s in followed.samples]
    assert stale.accept.accepted_length < 2 < followed.accept.accepted_length
    assert worst_logprob_error(fresh, policy, new_policy, LONG_PROMPT) < 1e-5


def test_a_refresh_empties_the_prefix_cache_itself(fresh, policy, new_policy, new_draft, monkeypatch):
    fresh.generate([LONG_PROMPT], max_new_tokens=2)
    fresh.refresh(1, stream(new_policy, new_draft))
    monkeypatch.setattr(fresh, "_reset_prefix_cache", lambda: None)
    assert worst_logprob_error(fresh, policy, new_policy, LONG_PROMPT) < 1e-5


def test_every_tensor_is_served_as_it_was_sent(fresh, new_policy, new_draft):
    sent = dict(stream(new_policy, new_draft))
    fresh.refresh(1, sent.items())
    served = fresh.read_weights(list(sent))
    assert all(torch.equal(served[name], sent[name]) for name in sent)


def test_buckets_in_any_order_load_what_one_call_does(fresh, policy, draft, new_policy, new_draft):
    whole = stream(new_policy, new_draft)
    fresh.refresh(1, whole)
    loaded = fresh.state_digest()
    fresh.refresh(0, stream(policy.tensors, draft.tensors))
    assert fresh.state_digest() != loaded
    shuffled = [whole[i] for i in torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))]
    fresh.refresh(2, iter(shuffled), manifest_of(whole), bucket_bytes=20_000)
    assert fresh.state_digest() == loaded
    assert fresh.weights_version() == 2


DRAFT_KEY = "draft.midlayer.self_attn.k_proj.weight"
REFUSED = {
    "missing policy": ("model.layers.2.mlp.up_proj.weight", None, "missing: model.layers.2.mlp.up_proj.weight"),
    "missing draft": (DRAFT_KEY, None, f"missing: {DRAFT_KEY}"),
    "extra policy": ("model.layers.4.mlp.up_proj.weight", torch.ones(2, 2), "not expected: model.layers.4.mlp.up_proj"),
    "extra draft": ("draft.confidence_head.weight", torch.ones(2, 2), "not expected: draft.confidence_head.weight"),
    "misshaped policy": ("model.norm.weight", torch.ones(63), r"model.norm.weight is \[63\], needs \[64\]"),
    "misshaped draft": ("draft.fc.weight", torch.ones(64, 128), r"draft.fc.weight is \[64, 128\], needs \[64, 192\]"),
    "integers": ("draft.norm.weight", torch.ones(64, dtype=torch.int64), "draft.norm.weight is torch.int64"),
}


@pytest.mark.parametrize("name, tensor, message", REFUSED.values(), ids=list(REFUSED))
def test_a_refresh_that_is_not_whole_is_refused(fresh, new_policy, new_draft, name, tensor, message):
    before, digest = greedy(fresh), fresh.state_digest()
    tensors = dict(stream(new_policy, new_draft))
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(RefreshError, match=message):
        fresh.refresh(1, tensors.items())
    assert fresh.weights_version() == 0
    assert fresh.state_digest() == digest
    assert greedy(fresh) == before


def test_a_tensor_sent_twice_is_refused(fresh, new_policy, new_draft):
    digest = fresh.state_digest()
    twice = [*stream(new_policy, new_draft), ("draft.fc.weight", new_draft["fc.weight"])]
    with pytest.raises(RefreshError, match="declared twice: draft.fc.weight"):
        fresh.refresh(1, twice)
    with pytest.raises(RefreshError, match="draft.fc.weight came twice, or was not declared"):
        fresh.refresh(1, iter(twice[::-1]), manifest_of(twice[:-1]), bucket_bytes=1 << 30)
    assert fresh.weights_version() == 0
    assert fresh.state_digest() == digest


def test_a_stream_that_breaks_before_the_first_write_does_no_harm(fresh, new_policy, new_draft):
    before = greedy(fresh)
    whole = stream(new_policy, new_draft)

    def breaking():
        yield from whole[:3]
        raise ConnectionError("sender lost")

    with pytest.raises(ConnectionError, match="sender lost"):
        fresh.refresh(1, breaking(), manifest_of(whole))
    assert fresh.weights_version() == 0
    assert greedy(fresh) == before
    fresh.refresh(1, whole)
    assert fresh.weights_version() == 1


def test_a_draft_head_equal_to_the_policys_is_its_own(fresh, policy, draft):
    """vLLM makes such a head the target's module; a refresh of the draft's would then change the policy."""
    assert torch.equal(draft.tensors["lm_head.weight"], policy.tensors["lm_head.weight"])
    before = greedy(fresh)
    other_head = {**draft.tensors, "lm_head.weight": torch.zeros_like(draft.tensors["lm_head.weight"])}
    fresh.refresh(1, stream(policy.tensors, other_head))
    served = fresh.read_weights(["lm_head.weight", "draft.lm_head.weight"])
    assert torch.equal(served["lm_head.weight"], policy.tensors["lm_head.weight"])
    assert not served["draft.lm_head.weight"].any()
    assert greedy(fresh) == before
    assert worst_logprob_error(fresh, policy, policy.tensors, LONG_PROMPT) < 1e-5


def test_a_reduced_vocabulary_is_refreshed_with_its_map(start_engine, policy, make_draft):
    reduced = make_draft(policy, draft_vocab_size=32)
    engine = start_engine(policy, reduced)
    half = engine.generate(PROMPTS, temperature=0.0, max_new_tokens=32)
    kept = torch.tensor(sorted({token for sample in half.samples for token in sample.token_ids}))[:32]
    spare = torch.tensor([i for i in range(64) if i not in kept.tolist()])[: 32 - len(kept)]
    maps = models.vocabulary_maps(reduced.config, torch.cat([kept, spare]))
    tensors = {**reduced.tensors, **maps, "lm_head.weight": policy.tensors["lm_head.weight"][maps["t2d"]]}
    engine.refresh(1, stream(policy.tensors, tensors))
    all_kept = engine.generate(PROMPTS, temperature=0.0, max_new_tokens=32)
    assert [s.token_ids for s in all_kept.samples] == [s.token_ids for s in half.samples]
    # Every token that greedy decoding makes is now in the draft's vocabulary.
    assert all_kept.accept.accepted_length > half.accept.accepted_length + 0.5
    assert torch.equal(engine.read_weights(["draft.d2t"])["draft.d2t"], maps["d2t"])
    without_map = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    with pytest.raises(RefreshError, match="missing: draft.d2t"):
        engine.refresh(2, stream(policy.tensors, without_map))


def test_a_frozen_draft_stays_while_the_policy_is_refreshed(start_engine, policy, draft, new_policy, new_draft):
    engine = start_engine(policy, draft, refresh_draft=False)
    followed = engine.generate(PROMPTS, 4, temperature=0.0, max_new_tokens=32)
    engine.refresh(1, new_policy.items())
    frozen = engine.generate(PROMPTS, 4, temperature=0.0, max_new_tokens=32)
    assert frozen.weights_version == 1
    assert frozen.accept.accepted_length < 2 < followed.accept.accepted_length
    head = engine.read_weights(["draft.lm_head.weight"])["draft.lm_head.weight"]
    assert torch.equal(head, draft.tensors["lm_head.weight"])
    assert worst_logprob_error(engine, policy, new_policy, LONG_PROMPT) < 1e-5
    with pytest.raises(RefreshError, match="not expected: draft.fc.weight"):
        engine.refresh(2, stream(new_policy, new_draft))


def test_tied_embeddings_and_a_draft_folder_with_embeddings_of_its_own(start_engine, make_policy, make_draft):
    policy = make_policy(tie_word_embeddings=True)
    draft = make_draft(policy)
    own = {**draft.tensors, "embed_tokens.weight": policy.tensors["model.embed_tokens.weight"].clone()}
    models.write_model(draft.folder, draft.config, own)
    engine = start_engine(policy, draft)
    new = models.policy_tensors(policy.config, seed=1, mixing=0.05)
    engine.refresh(1, stream(new, {**own, "embed_tokens.weight": torch.zeros_like(own["embed_tokens.weight"])}))
    served = engine.read_weights(["model.embed_tokens.weight", "draft.embed_tokens.weight"])
    assert torch.equal(served["model.embed_tokens.weight"], new["model.embed_tokens.weight"])
    assert not served["draft.embed_tokens.weight"].any()
    assert worst_logprob_error(engine, policy, new, LONG_PROMPT) < 1e-5


def test_a_draft_folder_that_lacks_a_tensor_is_refused_at_the_start(start_engine, policy, make_draft):
    """vLLM serves such a draft from uninitialised memory."""
    draft = make_draft(policy)
    models.write_model(
        draft.folder, draft.config, {k: v for k, v in draft.tensors.items() if k != "midlayer.mlp.up_proj.weight"}
    )
    with pytest.raises(RefreshError, match="leaves .*gate_up_proj.weight without a value"):
        start_engine(policy, draft)


def test_a_stream_that_breaks_after_the_first_write_ends_the_engine(start_engine, policy, draft, new_policy, new_draft):
    engine = start_engine(policy, draft)
    whole = stream(new_policy, new_draft)

    def breaking():
        yield from whole[:3]
        raise ConnectionError("sender lost")

    with pytest.raises(EngineUnusable, match="weights of version 0 were overwritten: ConnectionError: sender lost"):
        engine.refresh(1, breaking(), manifest_of(whole), bucket_bytes=1)
    for call in (engine.weights_version, lambda: engine.generate([[1]]), lambda: engine.refresh(1, whole)):
        with pytest.raises(EngineUnusable, match="build the engine anew"):
            call()
