"""Speculation leaves the sampled distribution as it is: chi-square against exact probabilities, and the correction
of vLLM's CPU sampler that this needs."""

import itertools

import pytest
import torch

from nemo_ext.rollout.engine import Rollouts
from nemo_ext.rollout.sampler_fix import expansion_is_wrong
from tests.e2e.conftest import DRAFTED, exact_logits

pytestmark = pytest.mark.e2e
VOCABULARY, LENGTH, SAMPLES, PROMPT = 6, 4, 8192, [3, 5]


@pytest.fixture(scope="module")
def policy(make_policy):
    """Layers strong enough that the bigram draft is often wrong."""
    return make_policy(seed=3, mixing=0.5, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def engine(start_engine, policy, make_draft):
    return start_engine(policy, make_draft(policy), max_num_seqs=256)


def sample(engine, temperature: float) -> Rollouts:
    return engine.generate([PROMPT], SAMPLES, temperature=temperature, max_new_tokens=LENGTH, seed=11)


def p_value(rollouts: Rollouts, policy, temperature: float) -> float:
    """Of the observed counts of all VOCABULARY**LENGTH sequences; those expected under 5 times are one cell."""
    sequences = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    logits_STV = exact_logits(policy, policy.tensors, [PROMPT + list(ids) for ids in sequences]).double()
    logp_STV = (logits_STV / temperature).log_softmax(-1)[:, len(PROMPT) - 1 : -1]
    expected_S = SAMPLES * logp_STV.gather(2, torch.tensor(sequences)[..., None]).sum((1, 2)).exp()
    index = {ids: i for i, ids in enumerate(sequences)}
    cells = torch.tensor([index[tuple(s.token_ids)] for s in rollouts.samples])
    observed_S = torch.bincount(cells, minlength=len(sequences)).double()
    big_S = expected_S >= 5
    observed = torch.cat([observed_S[big_S], observed_S[~big_S].sum()[None]])
    expected = torch.cat([expected_S[big_S], expected_S[~big_S].sum()[None]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(observed) - 1.0, dtype=torch.float64)
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_follow_the_policys_distribution(engine, policy, temperature):
    rollouts = sample(engine, temperature)
    # Both branches of rejection sampling are taken.
    assert 1.3 < rollouts.accept.accepted_length < DRAFTED
    assert p_value(rollouts, policy, temperature) > 1e-3


def test_a_wrong_temperature_in_the_rejection_sampler_is_noticed(engine, policy, monkeypatch):
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(
        rejection_sampler, "expand_batch_to_tokens", lambda x_B, cu_B, n, **replacing: x_B.new_full((n,), 1.1)
    )
    assert p_value(sample(engine, 1.0), policy, 1.0) < 1e-6


def test_the_probe_finds_the_stock_function_wrong_and_the_correction_right(engine, monkeypatch):
    from vllm.v1.sample import rejection_sampler

    assert not expansion_is_wrong(rejection_sampler)
    stock = getattr(rejection_sampler.expand_batch_to_tokens, "__wrapped__", None)
    if stock is None:
        pytest.skip("this vLLM's sampler needs no correction")
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", stock)
    assert expansion_is_wrong(rejection_sampler)
