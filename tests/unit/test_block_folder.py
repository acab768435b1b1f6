"""A block-draft folder against policy and YAML: one that fits passes, and each way not to fit is a line that names it."""

from types import SimpleNamespace

import pytest
import torch

from nemo_ext.config import ConfigError
from nemo_ext.drafts.block_folder import check_block_folder
from tests.fixtures_block_drafts import block_draft_config, random_block_draft
from tests.fixtures_models import policy_config, write_model

POLICY = policy_config()
NOTHING_SAID = dict.fromkeys(
    ("num_layers", "aux_layer_indices", "draft_vocab_size", "mask_token_id", "sliding_window", "markov_rank", "gamma")
)


@pytest.fixture
def make(tmp_path):
    """Writes a draft folder after changes to its config, and to its tensors (None takes one away)."""

    def _make(config=None, tensors=None, **settings):
        whole = block_draft_config(POLICY, **settings)
        given = random_block_draft(whole) | (tensors or {})
        given = {name: tensor for name, tensor in given.items() if tensor is not None}
        return write_model(tmp_path / "draft", whole | (config or {}), given)

    return _make


def check(folder, max_length=128, method="dflash", policy=POLICY, **said):
    draft = SimpleNamespace(**NOTHING_SAID | {"speculator_type": method} | said)
    return check_block_folder(folder, policy, draft, max_length=max_length)


def lines(folder, **said):
    with pytest.raises(ConfigError) as caught:
        check(folder, **said)
    return [line.removeprefix(f"policy.draft.model_name is {folder}: ") for line in caught.value.lines]


@pytest.mark.parametrize("method", ["dflash", "dspark"])
@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 32}, {"window": 9}, {"num_key_value_heads": 1}])
def test_a_fitting_folder_passes(make, method, options):
    shape = check(make(method=method, **options), method=method)
    assert (shape.kind, shape.gamma, shape.draft_vocab_size) == (method, 4, options.get("draft_vocab_size", 64))


def test_what_the_yaml_says_may_agree(make):
    said = {"num_layers": 2, "aux_layer_indices": [0, 1, 2], "draft_vocab_size": 64, "mask_token_id": 0, "gamma": 4}
    check(make(method="dspark"), method="dspark", markov_rank=16, **said)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hidden_size": None}, "hidden_size is null in config.json; it must be a number"),
        ({"attention_bias": True}, "attention_bias is true in config.json; the trainer has false only"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu in config.json; the trainer has silu only"),
        ({"is_neox_style": False}, "is_neox_style is false in config.json; the trainer has true only"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is yarn in config.json; the trainer has default only"),
        ({"vocab_size": 99, "draft_vocab_size": 64}, "vocab_size is 99, the policy's is 64"),
        ({"target_hidden_size": 96}, "target_hidden_size is 96, the policy's hidden_size is 64"),
        ({"max_position_embeddings": 100}, "max_position_embeddings is 100 in config.json, less than the run's 128"),
        ({"block_size": 1}, "in the draft's config.json, block_size is 1"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "in the draft's config.json, architectures is"),
        ({"dflash_config": {"target_layer_ids": [0, 1, 2]}}, "in the draft's config.json, mask_token_id is null"),
        ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1, 4]}}, "target_layer_ids is [0, 1, 4], but the"),
        ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 0, 2]}}, "in the draft's config.json, target_layer"),
        ({"dflash_config": {"attention_value_scale": 0.5}}, "dflash_config.attention_value_scale is 0.5 in config.json"),
        ({"layer_types": ["sliding_attention"] * 2}, "in the draft's config.json, layer_types has sliding_attention but"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_a_line(make, config, says):
    assert lines(make(config))[0].startswith(says)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"fc.weight": None}, "tensor fc.weight is missing"),
        ({"layers.1.self_attn.k_norm.weight": None}, "tensor layers.1.self_attn.k_norm.weight is missing"),
        ({"fc.weight": torch.zeros(64, 9)}, "tensor fc.weight has shape [64, 9]; by config.json it must be [64, 192]"),
        ({"norm.weight": torch.zeros(64, dtype=torch.int8)}, "tensor norm.weight is I8; it must be one of F32, BF16"),
        ({"nrom.weight": torch.zeros(64)}, "tensor nrom.weight is not part of this draft; did you mean norm.weight?"),
        ({"model.norm.weight": torch.zeros(64)}, "tensor names begin with 'model.', which vLLM refuses"),
    ],
)
def test_a_tensor_that_does_not_fit_is_a_line(make, tensors, says):
    (line,) = lines(make(tensors=tensors))
    assert line.startswith(says)


def test_copies_of_the_policys_tensors_may_lie_there(make):
    check(make(tensors={"embed_tokens.weight": torch.zeros(64, 64), "lm_head.weight": torch.zeros(64, 64)}))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"markov_head.markov_w2.weight": None}, "tensor markov_head.markov_w2.weight is missing"),
        ({"markov_head.markov_w1.weight": torch.zeros(64, 8)}, "tensor markov_head.markov_w1.weight has shape [64, 8]; by"),
        ({"confidence_head.proj.weight": torch.zeros(1, 64)}, "tensor confidence_head.proj.weight has shape [1, 64]; by"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_a_line(make, tensors, says):
    (line,) = lines(make(method="dspark", tensors=tensors), method="dspark")
    assert line.startswith(says)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"d2t": None}, "tensor d2t is missing, though draft_vocab_size 32 is not vocab_size 64"),
        ({"lm_head.weight": None}, "tensor lm_head.weight is missing"),
        ({"d2t": torch.zeros(32)}, "tensor d2t is F32 [32]; it must be I64 [32]"),
        ({"d2t": torch.full((32,), 40)}, "tensor d2t maps draft token 24 to 64, outside the policy's 64 tokens"),
        ({"d2t": -torch.arange(32)}, "tensor d2t maps two draft tokens to one policy token"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_a_line(make, tensors, says):
    (line,) = lines(make(draft_vocab_size=32, tensors=tensors))
    assert line.startswith(says)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (
            {"gamma": 16},
            "policy.draft.gamma is 16 but the draft in {} has block_size 5, which drafts 4 tokens; set 4 or",
        ),
        ({"mask_token_id": 7}, "policy.draft.mask_token_id is 7 but the draft in {} has 0; set 0 or null"),
        ({"sliding_window": 7}, "policy.draft.sliding_window is 7 but the draft in {} has null; set null"),
        ({"aux_layer_indices": [0, 1]}, "policy.draft.aux_layer_indices is [0, 1] but the draft in {} has [0, 1, 2]"),
        ({"method": "dspark"}, "policy.draft.speculator_type is dspark but the draft in {} is dflash; set that"),
    ],
)
def test_a_yaml_that_contradicts_the_folder_is_a_line(make, said, says):
    folder = make()
    (line,) = lines(folder, **said)
    assert line.startswith(says.format(folder))


def test_another_markov_rank_is_named(make):
    (line,) = lines(make(method="dspark"), method="dspark", markov_rank=8)
    assert line.startswith("policy.draft.markov_rank is 8 but the draft in")


def test_everything_is_told_at_once(make):
    told = lines(make(config={"vocab_size": 99, "draft_vocab_size": 64}, tensors={"norm.weight": None}), gamma=2)
    assert len(told) >= 3


def test_a_mask_embedding_of_its_own_is_refused(make):
    folder = make()
    (folder / "mask_embedding.pt").write_bytes(b"")
    (line,) = lines(folder)
    assert line.startswith("mask_embedding.pt would be served instead of the policy's embedding of the mask token")


def test_no_folder_and_no_weights_are_told(make, tmp_path):
    assert lines(tmp_path / "nowhere")[0].startswith("no such folder")
    folder = make()
    (folder / "model.safetensors").unlink()
    assert lines(folder)[0].startswith("it has no model.safetensors")
