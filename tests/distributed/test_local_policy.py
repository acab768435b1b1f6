"""The Megatron policy on gloo ranks: equal to transformers, and the same training step for every layout.

Shape legend: T rows of a pack, V vocabulary (this rank's columns where the logits are split).
"""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.distributed.local_policy_ranks import (
    clipped_norm,
    draft_beside_the_policy,
    export_twice,
    policy_logits,
    resume,
    train,
)
from tests.fixtures_models import policy_config, policy_tensors

# Vocabulary 67 is padded for TP 2; the last pack has sequences of one and two tokens.
CONFIG = policy_config(vocab_size=67, num_attention_heads=4, num_key_value_heads=2)
PACKS = [[5, 8, 3], [7, 2], [12], [2, 4, 1]]

# What float32 sums in another order may change over three steps of lr 1e-2 (losses are about 5, weights about 1).
LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4


def tokens_of(packs: list[list[int]]) -> list[list[torch.Tensor]]:
    """Random tokens for packs given as lengths of their sequences."""
    generator = torch.Generator().manual_seed(11)
    return [[torch.randint(0, 67, (length,), generator=generator) for length in pack] for pack in packs]


@pytest.fixture(scope="module")
def one_rank(ranks):
    return ranks(1)


@pytest.fixture(scope="module")
def two_ranks(ranks):
    return ranks(2)


@pytest.fixture(scope="module")
def trained(one_rank):
    """Three steps on one rank, the reference of every layout; by tied or untied embeddings."""
    return {tied: train_on(one_rank, tied=tied) for tied in (False, True)}


def train_on(pool, sizes=None, tied=False, **options):
    """Trains on the pool's ranks and returns (losses, gradient norms, weights, digest) as rank 0 saw them."""
    config = {**CONFIG, "tie_word_embeddings": tied}
    per_rank = pool.run(train, config, policy_tensors(config), tokens_of(PACKS), sizes or {}, options)
    assert len({result.digest for result in per_rank}) == 1, "ranks export different weights"
    return per_rank[0]


def assert_same_training(result, reference):
    assert result.losses == pytest.approx(reference.losses, abs=LOSS_TOLERANCE)
    assert result.grad_norms == pytest.approx(reference.grad_norms, rel=1e-4)
    for name, weight in reference.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=WEIGHT_TOLERANCE, msg=name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("size", "options"),
    [(1, {}), (2, {}), (2, {"sequence_parallel": True})],
    ids=["tp1", "tp2", "tp2-sequence-parallel"],
)
def test_logits_equal_transformers(one_rank, two_ranks, size, options, tied):
    config = {**CONFIG, "tie_word_embeddings": tied}
    tensors = policy_tensors(config)
    reference = Qwen3ForCausalLM(Qwen3Config(**config)).eval()
    reference.load_state_dict(tensors, strict=not tied)
    reference.tie_weights()
    pool = one_rank if size == 1 else two_ranks
    for pack in tokens_of(PACKS):
        by_sequence = pool.run(policy_logits, config, tensors, pack, {"tp": size}, options)[0]
        for tokens, logits_TV in zip(pack, by_sequence, strict=True):
            with torch.no_grad():
                expected_TV = reference(tokens[None]).logits[0]
            torch.testing.assert_close(logits_TV[:, :67], expected_TV, rtol=0, atol=1e-4)
            assert (logits_TV[:, 67:] < -1e8).all()


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_export_gives_back_what_was_loaded(two_ranks, sizes, tied):
    config = {**CONFIG, "tie_word_embeddings": tied}
    tensors = policy_tensors(config)
    for exported, again in two_ranks.run(export_twice, config, tensors, sizes):
        assert list(exported) == list(again)
        for name, tensor in tensors.items():
            assert torch.equal(exported[name], tensor), name
            assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_repeated_run_is_bitwise_the_same(one_rank, trained, tied):
    again = train_on(one_rank, tied=tied)
    assert again.losses == trained[tied].losses
    assert again.digest == trained[tied].digest


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}], ids=str)
def test_a_repeated_run_on_two_ranks_is_bitwise_the_same(two_ranks, sizes):
    assert train_on(two_ranks, sizes).digest == train_on(two_ranks, sizes).digest


def test_training_lowers_the_loss_and_moves_every_weight(trained):
    before = policy_tensors(CONFIG)
    assert trained[False].losses[-1] < trained[False].losses[0] - 0.5
    assert all(not torch.equal(trained[False].weights[name], before[name]) for name in before)


def test_recompute_is_bitwise_the_same(one_rank, trained):
    assert train_on(one_rank, recompute=True).digest == trained[False].digest


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 2}, {}),
        ({"tp": 2}, {"sequence_parallel": True, "recompute": True}),
        ({"dp": 2}, {}),
        ({"cp": 2}, {}),
        ({"pp": 2}, {}),
        ({"pp": 2}, {"recompute": True}),
        ({"pp": 2, "vpp": 2}, {}),
    ],
    ids=str,
)
def test_every_layout_trains_the_same(two_ranks, trained, sizes, options, tied):
    assert_same_training(train_on(two_ranks, sizes, tied, **options), trained[tied])


def test_bf16_with_main_parameters_follows_float32(one_rank, trained):
    result = train_on(one_rank, params_dtype=torch.bfloat16)
    assert result.losses == pytest.approx(trained[False].losses, abs=0.1)
    assert all(tensor.dtype == torch.bfloat16 for tensor in result.weights.values())


@pytest.mark.parametrize("params_dtype", [torch.float32, torch.bfloat16])
def test_resume_continues_bitwise(one_rank, tmp_path, params_dtype):
    config, packs = CONFIG, tokens_of(PACKS)
    whole, resumed = one_rank.run(resume, config, policy_tensors(config), packs, params_dtype, str(tmp_path))[0]
    assert resumed == whole


def test_norms_are_not_decayed_and_matrices_are(one_rank):
    decayed = train_on(one_rank, optimizer={"weight_decay": 0.5}, steps=1).weights
    plain = train_on(one_rank, optimizer={"weight_decay": 0.0}, steps=1).weights
    before = policy_tensors(CONFIG)
    for name in before:
        if before[name].dim() == 1:
            assert torch.equal(decayed[name], plain[name]), name
        else:
            torch.testing.assert_close(decayed[name], plain[name] - 1e-2 * 0.5 * before[name], rtol=0, atol=1e-6)


def test_warm_up_is_linear(one_rank):
    rates = train_on(one_rank, optimizer={"lr_warmup_iters": 4}, steps=6).learning_rates
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_clip_holds_and_none_clips_nothing(one_rank):
    arguments = (CONFIG, policy_tensors(CONFIG), tokens_of(PACKS))
    reported, used = one_rank.run(clipped_norm, *arguments, 0.25)[0]
    unclipped, used_unclipped = one_rank.run(clipped_norm, *arguments, None)[0]
    assert reported == pytest.approx(unclipped) and reported > 1
    assert used == pytest.approx(0.25, rel=1e-4)
    assert used_unclipped == pytest.approx(unclipped, rel=1e-5)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_draft_has_gradients_of_its_own(two_ranks, sizes):
    arguments = (CONFIG, policy_tensors(CONFIG), tokens_of(PACKS), sizes)
    results = two_ranks.run(draft_beside_the_policy, *arguments)
    alone = train_on(two_ranks, sizes, steps=1, sequence_parallel="tp" in sizes)
    assert {result["digest"] for result in results} == {alone.digest}
    with_draft = [result for result in results if "norm" in result]
    tp_size = sizes.get("tp", 1)
    assert len(with_draft) == tp_size
    for result in with_draft:
        assert result["after_policy"] == [1.0] * 4, "the policy's completion touched the draft's gradients"
        assert result["after_own"] == [float(tp_size)] * 4
        assert result["norm"] == pytest.approx(2.0 * tp_size)
