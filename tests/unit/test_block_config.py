"""A block draft's config.json: as vLLM reads it, as other trainers write it, and there and back."""

from dataclasses import replace

import pytest
import torch

from nemo_ext.config import ConfigError
from nemo_ext.drafts.block_config import FULL, SLIDING, BlockConfig
from nemo_ext.drafts.block_formats import vllm_form, vllm_names
from nemo_ext.drafts.block_import import import_block_draft
from nemo_ext.drafts.block_init import init_block
from nemo_ext.drafts.block_shapes import block_shapes
from tests.fixtures_block_drafts import block_draft_config, random_block_draft
from tests.fixtures_models import policy_config, policy_tensors
from tests.unit.block_cases import SHAPES, make_config

POLICY = policy_config()


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_survives_its_hugging_face_form(name):
    assert BlockConfig.from_hf(SHAPES[name].to_hf()) == SHAPES[name]


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_keeps_what_is_written(name):
    """vLLM reads the file through transformers' Qwen3Config, which has opinions on windows."""
    transformers = pytest.importorskip("transformers")
    written = SHAPES[name].to_hf()
    config = transformers.Qwen3Config.from_dict(dict(written))
    for key in ("layer_types", "sliding_window", "dflash_config", "block_size", "draft_vocab_size", "head_dim"):
        assert getattr(config, key) == written[key], key
    assert BlockConfig.from_hf(config.to_dict() | {"architectures": written["architectures"]}) == SHAPES[name]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 7},
        {"window": 7, "causal": False},
        {"draft_vocab_size": 32, "num_key_value_heads": 1},
        {"method": "dspark"},
        {"method": "dspark", "sample_from_anchor": False, "confidence_with_markov": False},
        {"method": "dspark", "confidence_head": False, "draft_vocab_size": 32, "window": 3},
    ],
)
def test_a_served_folder_is_read(options):
    config = block_draft_config(POLICY, gamma=4, **options)
    shape = BlockConfig.from_hf(vllm_form(config))
    assert shape.gamma == 4 and shape.block_size == config["block_size"]
    assert shape.tap_layers == (0, 1, 2) and shape.kind == options.get("method", "dflash")
    assert [shape.window(i) for i in range(2)] == [options.get("window")] * 2
    causal = options.get("causal", "window" in options)
    assert [shape.causal_in_block(i) for i in range(2)] == [causal] * 2
    tensors = random_block_draft(config)
    named = {n: tuple(tensors[n].shape) for n in vllm_names(shape, tensors) if n != "d2t"}
    assert named == block_shapes(shape)


@pytest.mark.parametrize(
    ("config", "types", "window", "causal"),
    [
        ({}, [FULL, FULL], None, [False, False]),
        ({"layer_types": None}, [FULL, FULL], None, [False, False]),
        ({"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 9}}, [SLIDING] * 2, 9, [False] * 2),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 9, "causal": True}}, [SLIDING] * 2, 9, [True] * 2),
        ({"layer_types": [FULL, SLIDING], "use_sliding_window": True, "sliding_window": 5}, [FULL, SLIDING], 5,
         [False, True]),
        ({"layer_types": [SLIDING, SLIDING], "use_sliding_window": True, "sliding_window": 5,
          "dflash_config": {"swa_window_size": 6}}, [SLIDING] * 2, 6, [True] * 2),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, [FULL, SLIDING], 9,
         [False, True]),
        ({"dflash_config": {"causal": True}}, [FULL, FULL], None, [True, True]),
        ({"dflash_config": {"causal": True}, "is_causal": False}, [FULL, FULL], None, [False, False]),
        ({"use_sliding_window": True, "sliding_window": 5}, [FULL, FULL], None, [False, False]),
    ],
)  # fmt: skip
def test_layers_are_resolved_as_vllm_does(config, types, window, causal):
    base = make_config("dflash").to_hf()
    del base["dflash_config"]["causal"]  # which only says what the layers' types say anyway
    block = base["dflash_config"] | config.pop("dflash_config", {})
    shape = BlockConfig.from_hf(base | config | {"dflash_config": block})
    assert list(shape.layer_types) == types and shape.sliding_window == window
    assert [shape.causal_in_block(i) for i in range(2)] == causal


@pytest.mark.parametrize(
    ("kind", "config", "says"),
    [
        ("dflash", {"block_size": 1}, "block_size is 1; it must be the rows of a block"),
        ("dflash", {"block_size": None}, "block_size is null; it must be the rows of a block"),
        ("dflash", {"dflash_config": {}, "mask_token_id": None}, "mask_token_id is null; it must be a token of the policy"),
        ("dflash", {"dflash_config": {"mask_token_id": 32}}, "mask_token_id is 32; it must be a token of the policy, 0 to 31"),
        ("dflash", {"dflash_config": {"mask_token_id": 3}, "target_layer_ids": []}, "target_layer_ids is missing"),
        ("dflash", {"dflash_config": {"mask_token_id": 3}, "target_layer_ids": [2, 0]}, "target_layer_ids is [2, 0]; vLLM"),
        ("dflash", {"dflash_config": {"mask_token_id": 3}, "target_layer_ids": [1, 1]}, "target_layer_ids is [1, 1]; vLLM"),
        ("dflash", {"target_layer_ids": [0, 1]}, "dflash_config.target_layer_ids says layers [0, 2, 3] and target_layer_ids"),
        ("dflash", {"layer_types": [SLIDING, FULL]}, "layer_types has sliding_attention but the window is null; give"),
        ("dflash", {"layer_types": [FULL]}, "layer_types is ['full_attention']; it must have"),
        ("dflash", {"layer_types": ["chunked_attention"] * 2}, "layer_types is ['chunked_attention', 'chunked_attention']"),
        ("dflash", {"architectures": ["Qwen3ForCausalLM"]}, "architectures is ['Qwen3ForCausalLM']; a block draft here is"),
        ("dspark", {"markov_rank": None}, "markov_rank is null; a DSpark draft has a Markov head of rank 1 or more"),
        ("dspark", {"markov_head_type": "gated"}, "markov_head_type is gated; vLLM serves vanilla only"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_served_is_told(kind, config, says):
    written = make_config(kind).to_hf()
    del written["eagle_aux_hidden_state_layer_ids"]  # the same layers once more
    with pytest.raises(ConfigError) as caught:
        BlockConfig.from_hf(written | config)
    assert says in str(caught.value)


def speculators(kind="dflash", **changes):
    """A config.json as the speculators library writes it."""
    layers = {"model_type": "qwen3", "layer_types": [FULL, SLIDING], "sliding_window": 6, "use_sliding_window": True}
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
        layers[key] = make_config("dflash").to_hf()[key]
    layers |= {"intermediate_size": 20, "vocab_size": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
    layers["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000.0}
    config = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": kind, "transformer_layer_config": layers,
        "draft_vocab_size": 32, "block_size": 5, "aux_hidden_state_layer_ids": [1, 3, 4], "mask_token_id": 3,
        "sliding_window_non_causal": False, "sample_from_anchor": False, "target_hidden_size": None,
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"speculative_tokens": 4}]},
    }  # fmt: skip
    if kind == "dspark":
        config |= {"architectures": ["DSparkSpeculator"], "sample_from_anchor": True, "block_size": 4, "markov_rank": 5}
        config |= {"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
    return config | changes


def test_speculators_dflash():
    shape = BlockConfig.from_hf(vllm_form(speculators()))
    want = make_config("dflash", layer_types=(FULL, SLIDING), sliding_window=6)
    assert shape == want  # taps count from one there; full layers look both ways, sliding ones back
    both = BlockConfig.from_hf(vllm_form(speculators(sliding_window_non_causal=True)))
    assert [both.causal_in_block(i) for i in range(2)] == [False, False]


def test_speculators_dspark():
    want = make_config("dspark", layer_types=(FULL, SLIDING), sliding_window=6)
    assert BlockConfig.from_hf(vllm_form(speculators("dspark"))) == want
    bonus = BlockConfig.from_hf(vllm_form(speculators("dspark", sample_from_anchor=False, block_size=5)))
    assert bonus == replace(want, sample_from_anchor=False)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (speculators("eagle3"), "speculators_model_type is eagle3; a block draft here is dflash or dspark"),
        (speculators(sample_from_anchor=True), "sample_from_anchor is true; vLLM serves DFlash with the anchor as the bonus"),
        (speculators(mask_token_id=None), "mask_token_id is null"),
        (make_config("dflash").to_hf() | {"dflash_config": {"projector_type": "domino"}}, "projector_type is domino"),
    ],
)  # fmt: skip
def test_another_trainers_config_that_cannot_be_served_is_told(config, says):
    with pytest.raises(ConfigError) as caught:
        BlockConfig.from_hf(vllm_form(config))
    assert says in str(caught.value)


def test_specforge_dspark():
    """SpecForge keeps the heads' settings in `dflash_config` and drafts as many tokens as a block has rows."""
    want = make_config("dspark")
    config = make_config("dflash").to_hf() | {"architectures": ["DSparkDraftModel"], "block_size": 4}
    config["dflash_config"] |= {
        "projector_type": "dspark", "attention_mode": "gqa", "markov_rank": 5, "markov_head_type": "vanilla",
        "confidence_head_alpha": 1.0, "confidence_head_with_markov": True,
    }  # fmt: skip
    assert BlockConfig.from_hf(vllm_form(config)) == want
    config["dflash_config"]["enable_confidence_head"] = False
    without = BlockConfig.from_hf(vllm_form(config))
    assert without == replace(want, confidence_head=False, confidence_with_markov=False)
    del config["dflash_config"]["enable_confidence_head"], config["dflash_config"]["confidence_head_alpha"]
    assert BlockConfig.from_hf(vllm_form(config)) == without


def test_specforge_dflash_is_vllms_form():
    config = make_config("dflash").to_hf() | {"auto_map": {}, "num_target_layers": 4}
    assert vllm_form(config) == config


def test_import_drops_copies_of_the_policys_tensors():
    policy = policy_tensors(POLICY)
    shape = BlockConfig.for_policy("dspark", POLICY, [0, 1], gamma=3, mask_token_id=0, markov_rank=4)
    tensors = init_block(shape, 0)
    embedding, head = policy["model.embed_tokens.weight"], policy["lm_head.weight"]
    brought = {f"logit_head.{n}" if "markov" in n else n: t.bfloat16() for n, t in tensors.items()}
    brought |= {"embed_tokens.weight": embedding.bfloat16(), "lm_head.weight": head.bfloat16()}
    brought |= {"verifier_norm.weight": torch.ones(64), "t2d": torch.ones(64, dtype=torch.bool)}
    config, got = import_block_draft(shape.to_hf(), brought, embedding, head)
    assert BlockConfig.from_hf(config) == shape and got.keys() == tensors.keys()
    assert all(t.dtype == torch.float32 and torch.equal(t, tensors[n].bfloat16().float()) for n, t in got.items())
    for name, what in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "head")):
        with pytest.raises(ConfigError, match=f"tensor {name} is not the policy's {what}"):
            import_block_draft(shape.to_hf(), brought | {name: -brought[name]}, embedding, head)


def test_import_keeps_a_reduced_vocabulary_whole():
    shape = BlockConfig.for_policy("dflash", POLICY, [0, 1], gamma=3, mask_token_id=0, draft_vocab_size=8)
    tensors = init_block(shape, 0, torch.arange(8) * 2)
    _, got = import_block_draft(shape.to_hf(), {n: t for n, t in tensors.items() if n != "t2d"})
    assert got.keys() == tensors.keys() and all(torch.equal(got[n], t) for n, t in tensors.items())
    assert got["d2t"].dtype == torch.int64


def test_a_fresh_draft_has_the_policys_shape_and_starts_without_a_bias():
    shape = BlockConfig.for_policy("dspark", POLICY, [0, 3], gamma=5, mask_token_id=1, num_layers=2, sliding_window=8)
    tensors = init_block(shape, 3)
    assert {n: tuple(t.shape) for n, t in tensors.items()} == block_shapes(shape)
    assert shape.layer_types == (SLIDING, SLIDING) and shape.block_size == 5 and shape.markov_rank == 64
    assert not tensors["markov_head.markov_w2.weight"].any() and not tensors["confidence_head.proj.weight"].any()
    assert tensors["markov_head.markov_w1.weight"].norm(dim=1).mean() == pytest.approx(1, abs=0.1)
    assert all(torch.equal(t, init_block(shape, 3)[n]) for n, t in tensors.items())
    assert not torch.equal(tensors["fc.weight"], init_block(shape, 4)["fc.weight"])


def test_a_fresh_reduced_head_starts_from_the_policys_rows():
    shape = BlockConfig.for_policy("dflash", POLICY, [0], gamma=2, mask_token_id=1, draft_vocab_size=8)
    head, ids = policy_tensors(POLICY)["lm_head.weight"], torch.tensor([1, 4, 9, 10, 11, 20, 30, 63])
    tensors = init_block(shape, 3, ids, head)
    assert torch.equal(tensors["lm_head.weight"], head[ids])
    assert (
        torch.equal(tensors["d2t"] + torch.arange(8), ids)
        and tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    )
