"""Sizes of fresh drafts from published policy configs as they stand in `config.json`, and the rules one by one."""

from pathlib import Path

import pytest

from nemo_ext.config import ConfigError, DraftConfig
from nemo_ext.drafts.fresh_sizes import fresh_sizes
from nemo_ext.drafts.kinds import kind_of
from tests.fixtures_models import policy_config
from tests.fixtures_policies import POLICIES, shape_table, text_model

# (hidden, heads, key-value heads, head size, feed-forward), (base of the positions, epsilon, vocabulary)
SIZES = {
    "deepseek-v3": ((7168, 64, 8, 128, 18432), (1e4, 1e-6, 129280)),
    "gpt-oss-120b": ((2880, 64, 8, 64, 8704), (1.5e5, 1e-5, 201088)),
    "gpt-oss-20b": ((2880, 64, 8, 64, 8704), (1.5e5, 1e-5, 201088)),
    "llama-3.1-8b": ((4096, 32, 8, 128, 14336), (5e5, 1e-5, 128256)),
    "llama-3.3-70b": ((8192, 64, 8, 128, 28672), (5e5, 1e-5, 128256)),
    "nemotron-3-nano-30b-a3b": ((2688, 32, 2, 128, 8192), (1e4, 1e-5, 131072)),
    "nemotron-3-super-120b-a12b": ((4096, 32, 2, 128, 12288), (1e4, 1e-5, 131072)),
    "qwen3-235b-a22b": ((4096, 64, 4, 128, 12288), (1e6, 1e-6, 151936)),
    "qwen3-30b-a3b": ((2048, 32, 4, 128, 6144), (1e6, 1e-6, 151936)),
    "qwen3-8b": ((4096, 32, 8, 128, 12288), (1e6, 1e-6, 151936)),
    "qwen3.5-122b-a10b": ((3072, 32, 2, 256, 9216), (1e7, 1e-6, 248320)),
    "qwen3.5-35b-a3b": ((2048, 16, 2, 256, 6144), (1e7, 1e-6, 248320)),
    "qwen3.5-397b-a17b": ((4096, 32, 2, 256, 12288), (1e7, 1e-6, 248320)),
    "qwen3.5-9b": ((4096, 16, 4, 256, 12288), (1e7, 1e-6, 248320)),
}
_WIDTHS = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")


def settings(kind: str) -> DraftConfig:
    sizes = {} if kind == "eagle3" else {"gamma": 7, "mask_token_id": 7}
    return DraftConfig(enabled=True, speculator_type=kind, **sizes)


def test_every_published_config_is_held_to_its_sizes():
    assert sorted(SIZES) == POLICIES


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_fresh_draft_of_every_kind_has_these_sizes(name, kind):
    policy = text_model(name)
    shape = kind_of(settings(kind)).fresh_shape(settings(kind), policy)
    widths, (base, eps, vocab) = SIZES[name]
    assert tuple(getattr(shape, key) for key in _WIDTHS) == widths
    assert (shape.rope_theta, shape.rms_norm_eps, shape.vocab_size) == (base, eps, vocab)
    assert shape.max_position_embeddings == policy["max_position_embeddings"]
    assert shape.num_heads % shape.num_kv_heads == 0 and shape.tap_layers[-1] < policy["num_hidden_layers"]


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
@pytest.mark.parametrize("name", ["qwen3.5-9b", "gpt-oss-20b", "llama-3.1-8b", "deepseek-v3"])
def test_partial_and_scaled_positions_of_the_policy_stay_with_it(name, kind):
    """The trainer turns whole heads and scales no positions, so a draft must not be served otherwise."""
    served = kind_of(settings(kind)).fresh_shape(settings(kind), text_model(name)).to_hf()
    told = {**served, **(served.get("rope_parameters") or {})}
    assert told.get("rope_type", "default") == "default"
    assert not {"partial_rotary_factor", "rope_scaling", "factor", "mrope_section"} & told.keys()


@pytest.mark.parametrize("name", POLICIES)
def test_sizes_of_sizes_are_the_same(name):
    sizes = fresh_sizes(text_model(name))
    assert fresh_sizes(sizes) == sizes


def test_the_documentation_has_the_sizes():
    assert shape_table() in (Path(__file__).parents[2] / "docs" / "nemo-rl.md").read_text()


def test_a_plain_dense_policy_is_taken_as_it_is():
    policy = policy_config()
    assert fresh_sizes(policy) == policy


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads"), [(512, 4, 4), (2048, 16, 8), (5120, 64, 8), (6144, 64, 8), (7168, 64, 8)]
)
def test_a_policy_with_latent_attention_gets_heads_that_tensor_parallelism_divides(hidden, heads, kv_heads):
    policy = policy_config(hidden_size=hidden) | {"kv_lora_rank": 512, "head_dim": 64, "num_key_value_heads": 128}
    found = fresh_sizes(policy)
    assert (found["num_attention_heads"], found["num_key_value_heads"], found["head_dim"]) == (heads, kv_heads, 128)


def test_a_policy_without_attention_gets_the_same():
    policy = policy_config(hidden_size=2048) | {"num_attention_heads": None, "num_key_value_heads": None}
    assert fresh_sizes(policy)["num_attention_heads"] == 16


def test_what_a_dense_config_leaves_out_is_filled_in():
    policy = policy_config(hidden_size=128, num_attention_heads=4)
    del policy["num_key_value_heads"], policy["head_dim"], policy["intermediate_size"]
    found = fresh_sizes(policy)
    assert (found["num_key_value_heads"], found["head_dim"], found["intermediate_size"]) == (4, 32, 512)


@pytest.mark.parametrize(
    ("experts", "width"),
    [
        ({"num_experts": 8, "moe_intermediate_size": 64}, 128),  # a dense layer's width beside an expert's
        ({"n_routed_experts": 8, "moe_intermediate_size": 128}, 256),  # both names for an expert's
        ({"num_local_experts": 8}, 256),  # an expert's alone
        ({"num_experts": 0}, 128),
    ],
)
def test_the_width_of_one_expert_is_no_draft_s_width(experts, width):
    assert fresh_sizes(policy_config(hidden_size=64) | experts)["intermediate_size"] == width


@pytest.mark.parametrize("name", ["rms_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"])
def test_the_epsilon_goes_by_any_name(name):
    policy = policy_config()
    del policy["rms_norm_eps"]
    assert fresh_sizes(policy)["rms_norm_eps"] == 1e-6
    assert fresh_sizes(policy | {name: 3e-5})["rms_norm_eps"] == 3e-5


@pytest.mark.parametrize(
    ("rope", "base"),
    [
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}, 1e6),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "rope_theta": 1e6}}, 1e6),
        ({}, 1e4),
    ],
)
def test_the_base_of_the_positions_is_found_where_it_stands(rope, base):
    policy = {key: value for key, value in policy_config().items() if not key.startswith("rope")}
    assert fresh_sizes(policy | rope)["rope_theta"] == base


def test_a_config_without_sizes_is_told_in_a_line():
    policy = policy_config() | {"hidden_size": None}
    with pytest.raises(ConfigError) as raised:
        fresh_sizes(policy)
    assert raised.value.lines == (
        "policy.model_name: hidden_size is null in the policy's config, so a fresh draft's size is not known; name a draft "
        "folder as policy.draft.model_name",
    )
