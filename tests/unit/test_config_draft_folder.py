"""A draft folder against policy and YAML: one that fits passes, and each way not to fit is a line that names it."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_ext.config import ConfigError, DraftConfig
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_folder import check_draft_folder, eagle3_shapes
from nemo_ext.drafts.eagle3_init import init_eagle3
from nemo_ext.drafts.safetensors_header import read_header
from tests.fixtures_models import draft_config, policy_config, random_draft, write_model

POLICY = policy_config()


@pytest.fixture
def make(tmp_path):
    """Writes a draft folder after changes to its config, and to its tensors (None takes one away)."""

    def _make(config=None, tensors=None, **settings):
        whole = draft_config(POLICY, **settings)
        given = random_draft(whole) | (tensors or {})
        given = {name: tensor for name, tensor in given.items() if tensor is not None}
        return write_model(tmp_path / "draft", whole | (config or {}), given)

    return _make


def check(folder, max_length=128, **keys):
    return check_draft_folder(folder, POLICY, DraftConfig(**keys), max_length=max_length)


def lines(folder, **keys):
    with pytest.raises(ConfigError) as caught:
        check(folder, **keys)
    return [line.removeprefix(f"policy.draft.model_name is {folder}: ") for line in caught.value.lines]


def test_a_fitting_folder_passes_with_its_own_shape(make):
    shape = check(make(draft_vocab_size=32, taps=(1, 3), norm_before_residual=True, fc_norm=True, norm_before_fc=True))
    assert (shape.draft_vocab_size, shape.tap_layers, shape.num_layers) == (32, (0, 2), 1)
    assert (shape.norm_before_residual, shape.fc_norm, shape.norm_before_fc) == (True, True, True)


def test_both_names_of_the_first_layer_are_read(make):
    folder = make()
    tensors = {n.replace("midlayer.", "layers.0."): t for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    check(folder)


@pytest.mark.parametrize(
    "flags", [{}, {"num_layers": 2, "draft_vocab_size": 32}, {"fc_norm": True, "norm_before_fc": True}]
)
def test_expected_shapes_are_those_of_a_fresh_draft(flags):
    shape = replace(Eagle3Config.for_policy(POLICY, [0, 1, 3]), **flags)
    fresh = init_eagle3(shape, 0, torch.arange(shape.draft_vocab_size))
    assert eagle3_shapes(shape) == {n: tuple(t.shape) for n, t in fresh.items() if n not in ("d2t", "t2d")}


def test_the_header_is_what_safetensors_reads(make):
    file = make(draft_vocab_size=32) / "model.safetensors"
    header, tensors = read_header(file), load_file(file)
    assert {n: e.shape for n, e in header.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert (header["fc.weight"].dtype, header["d2t"].dtype, header["t2d"].dtype) == ("F32", "I64", "BOOL")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hidden_size": None}, "hidden_size is null in config.json; it must be a number"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is ['LlamaForCausalLM'] in config.json; an EAGLE-3"),
        ({"attention_bias": True}, "attention_bias is true in config.json; the trainer has false only"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu in config.json; the trainer has silu only"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type is llama3 in config.json; the trainer has default"),
        ({"vocab_size": 99, "draft_vocab_size": 64}, "vocab_size is 99, the policy's is 64"),
        ({"target_hidden_size": 96}, "target_hidden_size is 96, the policy's hidden_size is 64"),
        ({"max_position_embeddings": 100}, "max_position_embeddings is 100 in config.json, less than the run's 128"),
        ({"num_aux_hidden_states": 2}, "num_aux_hidden_states is 2 in config.json; 3 layers are tapped"),
        ({"eagle_aux_hidden_state_layer_ids": [1]}, "eagle_aux_hidden_state_layer_ids is [1] in config.json and [1"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false in config.json"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_a_line(make, config, says):
    assert lines(make(config))[0].startswith(says)


@pytest.mark.parametrize(
    ("taps", "says"),
    [
        ((1, 2, 5), "eagle_aux_hidden_state_layer_ids is [1, 2, 5], but the policy has 4 layers; the highest id is 4"),
        ((2, 1), "eagle_aux_hidden_state_layer_ids is [2, 1] in the draft's config.json; it must list"),
        ((0, 1), "eagle_aux_hidden_state_layer_ids is [0, 1] in the draft's config.json; it must list"),
    ],
)
def test_taps_that_the_policy_or_vllm_has_not_are_a_line(make, taps, says):
    (line,) = lines(make(taps=taps))
    assert line.startswith(says)


def test_the_last_layers_output_may_be_tapped(make):
    assert check(make(taps=(1, 4))).tap_layers == (0, 3)


def test_another_width_is_named(make):
    wide = policy_config(hidden_size=96)
    folder = make()
    with pytest.raises(
        ConfigError, match="hidden_size is 64, the policy's is 96; a draft here is as wide as its policy"
    ):
        check_draft_folder(folder, wide, DraftConfig(), max_length=128)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"fc.weight": None}, "tensor fc.weight is missing"),
        ({"lm_head.weight": None}, "tensor lm_head.weight is missing; without it vLLM serves the policy's head"),
        ({"midlayer.hidden_norm.weight": None}, "tensor layers.0.hidden_norm.weight is missing"),
        ({"fc.weight": torch.zeros(64, 9)}, "tensor fc.weight has shape [64, 9]; by config.json it must be [64, 192]"),
        ({"norm.weight": torch.zeros(64, dtype=torch.int8)}, "tensor norm.weight is I8; it must be one of F32, BF16"),
        ({"nrom.weight": torch.zeros(64)}, "tensor nrom.weight is not part of this draft; did you mean norm.weight?"),
        ({"model.norm.weight": torch.zeros(64)}, "tensor names begin with 'model.', which vLLM refuses"),
        ({"embed_tokens.weight": torch.zeros(64, 64)}, "tensor embed_tokens.weight would be served instead of the"),
        ({"d2t": torch.zeros(64, dtype=torch.int64)}, "tensor d2t is not part of this draft"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_a_line(make, tensors, says):
    (line,) = lines(make(tensors=tensors))
    assert line.startswith(says)


@pytest.mark.parametrize(
    ("d2t", "says"),
    [
        (None, "tensor d2t is missing, though draft_vocab_size 32 is not vocab_size 64"),
        (torch.zeros(32), "tensor d2t is F32 [32]; it must be I64 [32]"),
        (torch.zeros(31, dtype=torch.int64), "tensor d2t is I64 [31]; it must be I64 [32]"),
        (
            torch.arange(32) * 2,
            "tensor d2t maps draft token 22 to 66, outside the policy's 64 tokens; d2t is an offset",
        ),
        (-torch.arange(32), "tensor d2t maps two draft tokens to one policy token"),
    ],
)
def test_a_reduced_vocabulary_needs_a_right_map_and_its_own_head(make, d2t, says):
    (line,) = lines(make(tensors={"d2t": d2t}, draft_vocab_size=32))
    assert line.startswith(says)


def test_a_reduced_vocabulary_without_a_head_is_refused(make):
    (line,) = lines(make(tensors={"lm_head.weight": None}, draft_vocab_size=32))
    assert line.startswith("tensor lm_head.weight is missing")


def test_everything_wrong_is_told_at_once(make):
    found = lines(make(tensors={"fc.weight": None, "norm.weight": torch.zeros(3), "d2t": None}, draft_vocab_size=32))
    assert [line.split()[1] for line in found] == ["fc.weight", "norm.weight", "d2t"]


@pytest.mark.parametrize(
    ("settings", "keys", "says"),
    [
        ({}, {"num_layers": 2}, "policy.draft.num_layers is 2 but the draft in "),
        ({}, {"aux_layer_indices": [1, 2, 3]}, "policy.draft.aux_layer_indices is [1, 2, 3] but the draft in "),
        ({}, {"draft_vocab_size": 32}, "policy.draft.draft_vocab_size is 32 but the draft in "),
        ({"fc_norm": True}, {"fc_norm": False}, "policy.draft.fc_norm is false but the draft in "),
        ({"norm_output": True}, {}, "policy.draft.norm_output is null but the draft in "),
        ({"norm_output": True}, {"norm_output": False}, "policy.draft.norm_output is false but the draft in "),
    ],
)
def test_yaml_that_contradicts_the_checkpoint_is_a_line(make, settings, keys, says):
    (line,) = lines(make(**settings), **keys)
    assert line.startswith(says)


def test_yaml_that_agrees_passes_and_tap_indices_are_one_below_vllms_ids(make):
    folder = make(norm_output=True, taps=(1, 2, 3))
    shape = check(folder, norm_output=True, aux_layer_indices=[0, 1, 2], num_layers=1, draft_vocab_size=64)
    assert shape.norm_output and shape.tap_layers == (0, 1, 2)


def test_pickles_are_refused_by_name(make):
    folder = make()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert lines(folder) == ["pytorch_model.bin is a pickle, which can run code; convert it to model.safetensors"]


def test_what_is_no_folder_of_a_draft_is_named(make, tmp_path):
    assert lines(tmp_path / "none")[0].startswith("no such folder")
    folder = make()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    assert lines(folder) == ["model.safetensors: it is cut short"]
    (folder / "model.safetensors").write_bytes(b"PK\x03\x04 not a safetensors file at all")
    assert lines(folder) == ["model.safetensors: it is not a safetensors file, or it is cut short"]
    (folder / "model.safetensors").unlink()
    assert lines(folder) == ["it has no model.safetensors; save the draft as one safetensors file"]
    (folder / "config.json").write_text("{")
    (folder / "model.safetensors").write_bytes(whole)
    assert lines(folder)[0].startswith("config.json is not JSON")
    (folder / "config.json").unlink()
    assert lines(folder) == ["it has no config.json; give a Hugging Face folder"]


def test_the_folder_that_this_package_writes_passes(tmp_path):
    shape = Eagle3Config.for_policy(POLICY, [0, 1, 3], draft_vocab_size=32)
    ids = torch.arange(32) * 2
    folder = write_model(tmp_path / "draft", json.loads(json.dumps(shape.to_hf())), init_eagle3(shape, 0, ids))
    assert check(folder) == shape


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"rope_theta": "x"}, "rope_theta is x in the draft's config.json; it must be a number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000 in config.json; it must be <= 128"),
    ],
)
def test_a_config_of_no_draft_is_a_line(make, config, line):
    assert lines(make(config)) == [line]


def test_a_config_that_is_no_section_is_a_line(make):
    folder = make()
    (folder / "config.json").write_text("[]")
    assert lines(folder) == ["config.json is []; it must hold a section of keys"]
