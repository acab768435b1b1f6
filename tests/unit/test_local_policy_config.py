"""Megatron's configuration from a Hugging Face one: what is refused, and where the rotary base comes from."""

from types import SimpleNamespace

import pytest

from nemo_ext.local.policy import padded_vocab_size, rope_theta
from nemo_ext.local.policy import policy_config as megatron_config
from tests.fixtures_models import policy_config


@pytest.fixture
def groups():
    """Process groups of one rank, as far as a configuration looks at them."""
    one = SimpleNamespace(size=lambda: 1)
    return SimpleNamespace(tp=one, pp=one, cp=one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
    ],
)
def test_a_shape_that_is_not_built_is_refused(groups, change, message):
    with pytest.raises(ValueError, match=message):
        megatron_config({**policy_config(), **change}, groups)


def test_the_shape_is_the_hugging_face_one(groups):
    hf_config = policy_config(num_attention_heads=4, num_key_value_heads=2)
    config = megatron_config(hf_config, groups)
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (4, 64, 128)
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (4, 2, 32)
    assert config.calculate_per_token_loss and not config.add_bias_linear


def test_the_rotary_base_is_found_in_both_spellings():
    assert rope_theta({"rope_theta": 5e5, "rope_scaling": None}) == 5e5
    assert rope_theta({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}) == 1e6


@pytest.mark.parametrize(("tp_size", "padded"), [(1, 67), (2, 68), (4, 68), (8, 72)])
def test_the_vocabulary_is_padded_to_the_tp_size(tp_size, padded):
    assert padded_vocab_size({"vocab_size": 67}, tp_size) == padded
