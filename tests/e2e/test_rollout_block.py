"""Rollouts with block drafts, DFlash and DSpark, on vLLM's V1 CPU runner: exact, refreshed in place."""

import pytest
import torch

from nemo_ext.rollout.errors import RefreshError
from nemo_ext.rollout.manifest import manifest_of
from tests import fixtures_block_drafts as drafts
from tests import fixtures_models as models
from tests.e2e.block_capture import capture_blocks
from tests.e2e.conftest import Model, stream
from tests.e2e.test_rollout_block_capture import assert_follows_contract
from tests.e2e.test_rollout_distribution import VOCABULARY, p_value, sample

pytestmark = pytest.mark.e2e
PROMPTS = [[3 + i % 3, 5, 2, 4, 1][: 1 + i % 5] for i in range(16)]


@pytest.fixture(scope="module")
def policy(make_policy):
    """Few tokens, and layers strong enough that drafts which look at the last token only are often wrong."""
    return make_policy(seed=3, mixing=0.5, vocab_size=VOCABULARY, silent_mask=True)


@pytest.fixture(scope="module")
def plain_greedy(start_engine, policy):
    return start_engine(policy).generate(PROMPTS, temperature=0.0, max_new_tokens=40)


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def served(request, start_engine, policy, make_block_draft, plain_greedy):
    """(engine, draft)"""
    if request.param == "dflash":
        draft = make_block_draft(policy, tensors=drafts.copying_dflash)
    else:
        rank = policy.config["hidden_size"]
        draft = make_block_draft(policy, tensors=drafts.bigram_dspark, method="dspark", markov_rank=rank)
    return start_engine(policy, draft, max_num_seqs=256, weights_version=7), draft


def test_greedy_with_draft_equals_greedy_without(served, plain_greedy):
    engine, _ = served
    drafted = engine.generate(PROMPTS, temperature=0.0, max_new_tokens=40)
    assert [s.token_ids for s in drafted.samples] == [s.token_ids for s in plain_greedy.samples]
    assert drafted.accept.accepted_length > 1.3
    assert drafted.weights_version == 7


def test_samples_follow_the_policys_distribution(served, policy):
    engine, draft = served
    # The proposer of our own at another temperature too, which scales what each slot is drawn from.
    for temperature in (1.0, 0.7) if "markov_rank" in draft.config else (1.0,):
        rollouts = sample(engine, temperature)
        assert 1.3 < rollouts.accept.accepted_length < 4
        assert p_value(rollouts, policy, temperature) > 1e-3


def refreshed(draft: Model, seed: int) -> Model:
    """The draft with other, random weights."""
    return Model(draft.folder, draft.config, drafts.random_block_draft(draft.config, seed=seed))


def derived(tensors: dict, layers: int) -> dict[str, torch.Tensor]:
    """What vLLM makes of the weights for the trunk: keys and values of all layers in one, and the norms of the keys."""
    at = [f"layers.{i}.self_attn." for i in range(layers)]
    projections = [tensors[f"{layer}{part}_proj.weight"] for layer in at for part in "kv"]
    return {
        "draft.model._fused_kv_weight": torch.cat(projections),
        "draft.model._k_norm_weights": torch.stack([tensors[layer + "k_norm.weight"] for layer in at]),
    }


def test_a_refresh_is_exact_in_place_and_what_is_drafted_follows(served, policy):
    engine, draft = served
    new_policy = Model(policy.folder, policy.config, models.policy_tensors(policy.config, seed=5))
    new_draft = refreshed(draft, seed=77)
    runner = engine._llm.collective_rpc(lambda worker: worker)[0].model_runner
    pointers = [
        getattr(runner.drafter.model.model, name).data_ptr() for name in ("_fused_kv_weight", "_k_norm_weights")
    ]
    whole = stream(new_policy.tensors, new_draft.tensors)
    shuffled = [whole[i] for i in torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))]
    engine.refresh(8, iter(shuffled), manifest_of(whole), bucket_bytes=20_000)
    expected = dict(whole) | derived(new_draft.tensors, draft.config["num_hidden_layers"])
    got = engine.read_weights(list(expected))
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert pointers == [
        getattr(runner.drafter.model.model, name).data_ptr() for name in ("_fused_kv_weight", "_k_norm_weights")
    ]
    blocks, _ = capture_blocks(engine, PROMPTS[:3], max_new_tokens=8)
    for block in blocks:
        assert_follows_contract(block, new_draft, new_policy)


def test_a_refresh_of_a_draft_without_a_head_brings_none(served, policy):
    engine, draft = served
    digest = engine.state_digest()
    with_head = {**draft.tensors, "lm_head.weight": torch.zeros_like(policy.tensors["lm_head.weight"])}
    with pytest.raises(RefreshError, match="not expected: draft.lm_head.weight"):
        engine.refresh(9, stream(policy.tensors, with_head))
    assert engine.state_digest() == digest


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_refresh_in_bfloat16_leaves_the_targets_head_alone(start_engine, make_policy, make_block_draft, method):
    """With a reduced vocabulary, hence a head of the draft's own. vLLM keeps the confidence head in float32."""
    policy = make_policy(mixing=1.0)
    draft = make_block_draft(policy, method=method, draft_vocab_size=32)
    engine = start_engine(policy, draft, dtype="bfloat16")
    new = refreshed(draft, seed=78).tensors | models.vocabulary_maps(draft.config, torch.arange(10, 42))
    engine.refresh(1, stream(policy.tensors, new))
    expected = dict(stream(policy.tensors, new)) | derived(new, draft.config["num_hidden_layers"])
    del expected["draft.t2d"]
    got = engine.read_weights(list(expected))
    for name, tensor in expected.items():
        keeps_type = "confidence_head" in name or not tensor.is_floating_point()
        assert torch.equal(got[name], tensor if keeps_type else tensor.bfloat16()), name
    drafted = {token for block in capture_blocks(engine, PROMPTS[:3], 8)[0] for token in block.token_ids[-4:]}
    assert drafted <= set(range(10, 42))


def test_the_cpu_proposer_refuses_where_vllm_serves_dspark_itself():
    from nemo_ext.rollout.dspark_cpu_proposer import refuse_where_vllm_serves

    refuse_where_vllm_serves(torch.device("cpu"), use_v2_model_runner=False)
    with pytest.raises(ValueError, match="V2 runner on cuda"):
        refuse_where_vllm_serves(torch.device("cuda"), use_v2_model_runner=True)
    with pytest.raises(ValueError, match="V2 runner on cpu"):
        refuse_where_vllm_serves(torch.device("cpu"), use_v2_model_runner=True)


def test_only_dspark_is_let_through_to_the_v1_runner(start_engine, make_policy, make_block_draft):
    """Drafts that mix windows and full attention need the V2 runner, and vLLM still says so."""
    policy = make_policy()
    draft = make_block_draft(policy, window=6)
    mixed = {**draft.config, "layer_types": ["sliding_attention", "full_attention"]}
    models.write_model(draft.folder, mixed, draft.tensors)
    with pytest.raises(ValueError, match="mixed sliding/full"):
        start_engine(policy, draft)


def test_the_context_norm_probe_finds_the_stock_kernel_wrong_and_the_correction_right():
    from nemo_ext.rollout.context_norm_fix import grouped_norm_is_wrong, norm_by_layer

    k_LTGD = torch.randn(2, 3, 1, 32, generator=torch.Generator().manual_seed(0))
    weights_LD = torch.stack([torch.ones(32), torch.full((32,), 2.0)])
    exact_LTGD = k_LTGD * k_LTGD.square().mean(-1, keepdim=True).rsqrt() * weights_LD[:, None, None]
    assert torch.allclose(norm_by_layer(k_LTGD, weights_LD, 0.0), exact_LTGD, atol=1e-6)
    if not grouped_norm_is_wrong():
        pytest.skip("this vLLM's kernel needs no correction")
