"""Policy weights by Hugging Face name: shapes, tensor-parallel cuts, initial weights, digest, folders."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nemo_ext.local.hf_folder import read_hf_folder, save_hf_folder
from nemo_ext.local.hf_policy import check_policy_tensors, init_policy, policy_digest, policy_shapes, policy_units
from tests.fixtures_models import policy_config, policy_tensors


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_transformers(tied):
    config = policy_config(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert policy_shapes(config) == expected


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_cutting_over_tp_and_merging_gives_the_same_bits(tp_size):
    config = policy_config(vocab_size=67, hidden_size=96, num_attention_heads=8, num_key_value_heads=2)
    tensors = policy_tensors(config)
    for unit in policy_units(config):
        full = [tensors[name] for name in unit.shapes]
        shards = [unit.cut.shard(full, tp_size, rank) for rank in range(tp_size)]
        assert len({shard.shape for shard in shards}) == 1
        for before, after in zip(full, unit.cut.merge(shards), strict=True):
            assert torch.equal(before, after), unit.path


def test_a_rank_holds_whole_query_groups():
    config = policy_config(num_attention_heads=4, num_key_value_heads=2)
    tensors = policy_tensors(config)
    unit = next(unit for unit in policy_units(config) if unit.path == "layers.0.self_attention.linear_qkv")
    shard = unit.cut.shard([tensors[name] for name in unit.shapes], 2, 1)
    at, dim = "model.layers.0.self_attn.", config["head_dim"]
    expected = [
        tensors[at + "q_proj.weight"][2 * dim :],
        tensors[at + "k_proj.weight"][dim:],
        tensors[at + "v_proj.weight"][dim:],
    ]
    assert torch.equal(shard, torch.cat(expected))


def test_initial_weights_depend_on_the_seed_only():
    config = policy_config()
    assert policy_digest(init_policy(config, 3)) == policy_digest(init_policy(config, 3))
    assert policy_digest(init_policy(config, 3)) != policy_digest(init_policy(config, 4))
    check_policy_tensors(config, init_policy(config, 3))


def test_digest_sees_names_shapes_and_bytes_but_not_the_order():
    one, two = torch.arange(6.0).view(2, 3), torch.ones(2)
    digest = policy_digest({"a": one, "b": two})
    assert digest == policy_digest([("b", two), ("a", one)])
    assert digest != policy_digest({"a": one, "c": two})
    assert digest != policy_digest({"a": one.view(3, 2), "b": two})
    assert digest != policy_digest({"a": one, "b": torch.nextafter(two, 2 * two)})
    assert policy_digest({"a": one.bfloat16()}) == policy_digest({"a": one.t().contiguous().t().bfloat16()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "no tensor model.norm.weight"),
        (lambda t: t.update({"model.norm.bias": torch.zeros(64)}), "a tensor model.norm.bias"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(65)}), r"model.norm.weight has shape \(65,\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(change, message):
    config = policy_config()
    tensors = policy_tensors(config)
    change(tensors)
    with pytest.raises(ValueError, match=message):
        check_policy_tensors(config, tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_a_saved_folder(tmp_path, tied):
    config = policy_config(tie_word_embeddings=tied)
    tensors = policy_tensors(config)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "config.json").write_text("not the policy's")
    save_hf_folder(tmp_path / "policy", config, tensors, tokenizer)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", local_files_only=True)
    assert policy_digest(dict(model.named_parameters())) == policy_digest(tensors)
    read_config, read_tensors = read_hf_folder(tmp_path / "policy")
    assert read_config == config
    assert policy_digest(read_tensors) == policy_digest(tensors)
    assert (tmp_path / "policy" / "tokenizer.json").read_text() == "{}"


def test_a_folder_without_weights_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        read_hf_folder(tmp_path)
