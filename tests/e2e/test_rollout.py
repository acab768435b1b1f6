"""Rollouts of a real engine: speculation changes speed and nothing else."""

import pytest
import torch

from tests.e2e.conftest import DRAFTED, exact_logits

pytestmark = pytest.mark.e2e
PROMPTS = [[3 + i, 5, 7, 9, 11][: 1 + i % 5] for i in range(16)]


@pytest.fixture(scope="module")
def plain_greedy(start_engine, policy):
    return start_engine(policy).generate(PROMPTS, temperature=0.0, max_new_tokens=40)


@pytest.fixture(scope="module")
def engine(start_engine, policy, draft, plain_greedy):
    engine = start_engine(policy, draft, weights_version=7)
    engine.warm()
    return engine


def test_greedy_with_draft_equals_greedy_without(engine, plain_greedy):
    drafted = engine.generate(PROMPTS, temperature=0.0, max_new_tokens=40)
    assert [s.token_ids for s in drafted.samples] == [s.token_ids for s in plain_greedy.samples]
    assert plain_greedy.accept is None
    assert drafted.accept.accepted_length > 3
    assert drafted.weights_version == 7


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_policys_at_that_temperature(engine, policy, temperature):
    rollouts = engine.generate(PROMPTS[:5], 3, temperature=temperature, max_new_tokens=24)
    assert rollouts.accept.accepted_length > 2
    for sample in rollouts.samples:
        ids = PROMPTS[sample.prompt] + sample.token_ids
        logits_TV = exact_logits(policy, policy.tensors, [ids])[0] / temperature
        rows = torch.arange(len(PROMPTS[sample.prompt]) - 1, len(ids) - 1)
        exact = logits_TV[rows].log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(sample.logprobs), exact, atol=1e-5, rtol=0)


def test_top_k_and_top_p_restrict_and_renormalise(engine, policy):
    # A generation of one token ends before any is drafted: the step on which stock vLLM's top-k fails.
    engine.generate(PROMPTS, temperature=1.0, top_k=4, max_new_tokens=1)
    rollouts = engine.generate(PROMPTS, 2, temperature=1.0, top_k=4, max_new_tokens=17)
    nucleus = engine.generate(PROMPTS, 2, temperature=1.0, top_p=0.6, max_new_tokens=17)
    for sample in rollouts.samples:
        prompt = PROMPTS[sample.prompt]
        logits_TV = exact_logits(policy, policy.tensors, [prompt + sample.token_ids])[0, len(prompt) - 1 : -1]
        kept = logits_TV.topk(4)
        exact = logits_TV.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0] - kept.values.logsumexp(-1)
        assert all(token in row for token, row in zip(sample.token_ids, kept.indices.tolist(), strict=True))
        assert torch.allclose(torch.tensor(sample.logprobs), exact, atol=1e-5, rtol=0)
    for sample in nucleus.samples:
        prompt = PROMPTS[sample.prompt]
        p_TV = exact_logits(policy, policy.tensors, [prompt + sample.token_ids])[0, len(prompt) - 1 : -1].softmax(-1)
        sorted_TV, order_TV = p_TV.sort(-1, descending=True)
        before_TV = (sorted_TV.cumsum(-1) - sorted_TV).gather(1, order_TV.argsort(-1))
        assert (before_TV.gather(1, torch.tensor(sample.token_ids)[:, None]) < 0.6 + 1e-5).all()


def test_the_same_seed_gives_the_same_samples(engine):
    def tokens(seed: int) -> list[list[int]]:
        return [s.token_ids for s in engine.generate(PROMPTS, 4, max_new_tokens=20, seed=seed).samples]

    first = tokens(1)
    assert tokens(2) != first
    assert tokens(1) == first


def test_samples_come_in_order_and_stop_at_stop_tokens(engine):
    rollouts = engine.generate(PROMPTS, 3, max_new_tokens=30, stop_token_ids=[16, 46])
    assert [s.prompt for s in rollouts.samples] == [i for i in range(len(PROMPTS)) for _ in range(3)]
    reasons = {"stop": 0, "length": 0}
    for sample in rollouts.samples:
        reasons[sample.finish_reason] += 1
        stopped = sample.finish_reason == "stop"
        body = sample.token_ids[:-1] if stopped else sample.token_ids
        assert not {16, 46} & set(body)
        assert stopped == (sample.token_ids[-1] in (16, 46))
        assert len(sample.logprobs) == len(sample.token_ids)
    assert reasons["stop"] > 10
    assert rollouts.generated_tokens == sum(len(s.token_ids) for s in rollouts.samples)


def test_prompts_that_do_not_fit_are_refused_before_the_engine_sees_them(engine):
    with pytest.raises(ValueError, match="prompt 1 has 250 tokens and max_new_tokens is 20.*max_model_len 256"):
        engine.generate([[1], [1] * 250], max_new_tokens=20)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        engine.generate([[]])
    assert engine.generate([[1]], max_new_tokens=4).generated_tokens == 4


def test_accept_statistics_count_this_call_only(engine):
    rollouts = engine.generate([[3, 5]], temperature=0.0, max_new_tokens=30)
    accept = rollouts.accept
    # The first token comes from the prompt's own pass; verifications emit the others, the last one perhaps too many.
    assert 29 <= accept.drafts + accept.accepted_tokens <= 29 + DRAFTED
    assert accept.accepted_tokens == sum(accept.accepted_per_position)
    assert accept.accepted_length == 1 + accept.accepted_tokens / accept.drafts
