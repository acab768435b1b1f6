"""Settings of runs with block drafts: the examples pass, and what cannot work is a line before anything starts."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from nemo_ext.config import ConfigError
from nemo_ext.local import warmup
from nemo_ext.local.hf_folder import read_hf_folder
from nemo_ext.local.settings_checks import load_run, notes
from nemo_ext.local.tokenizer import load_tokenizer
from nemo_ext.local.yaml_config import load_yaml
from tests.fixtures_block_drafts import block_draft_config, random_block_draft
from tests.fixtures_models import write_model

EXAMPLES = Path(__file__).parents[2] / "examples"
SPECULATIVE = "policy.generation.vllm_kwargs.speculative_config"
PINNED = (
    "policy.draft.gamma=4",
    "policy.draft.num_layers=2",
    "policy.draft.aux_layer_indices=[0,1,3]",
    "policy.draft.mask_token_id=319",
)


def load(kind, *overrides):
    return load_run(EXAMPLES / f"grpo_cpu_{kind}.yaml", [*PINNED, *overrides])


def lines(kind, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(kind, *overrides)
    return list(caught.value.lines)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_an_example_passes_and_its_mask_token_is_one_that_no_text_has(kind, tmp_path):
    config = load_run(EXAMPLES / f"grpo_cpu_{kind}.yaml", [f"data.warmup.cache_dir={tmp_path}"])
    draft, generation = config.policy.draft, config.policy.generation
    assert draft.enabled and draft.speculator_type == generation.vllm_kwargs.speculative_config.method == kind
    assert not notes(config)
    tokenizer = load_tokenizer(warmup.initial(config).policy)
    assert tokenizer.convert_ids_to_tokens(draft.mask_token_id).startswith("<|unused_")


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_an_example_shows_only_what_differs(kind):
    def leaves(section, path=()):
        for key, value in section.items():
            yield from leaves(value, (*path, key)) if isinstance(value, dict) else [((*path, key), value)]

    own = OmegaConf.to_container(OmegaConf.load(EXAMPLES / f"grpo_cpu_{kind}.yaml"))
    base = dict(leaves(load_yaml(EXAMPLES / own.pop("defaults"))))
    assert [path for path, value in leaves(own) if base.get(path) == value] == []


@pytest.mark.parametrize(
    ("kind", "overrides", "says"),
    [
        ("dflash", ["policy.draft.gamma=null", f"{SPECULATIVE}.num_speculative_tokens=4"],
         "policy.draft.gamma is null and policy.draft.model_name is null, so the block's size is not known; set how many"),
        ("dspark", ["policy.draft.mask_token_id=null"],
         "policy.draft.mask_token_id is null and policy.draft.model_name is null, so the mask token is not known; set a"),
        ("dspark", ["policy.draft.mask_token_id=320"],
         "policy.draft.mask_token_id is 320, outside the policy's vocabulary of 320; set a token id from 0 to 319"),
        ("dflash", [f"{SPECULATIVE}.num_speculative_tokens=5"],
         f"{SPECULATIVE}.num_speculative_tokens is 5, but a block of this draft has 4 tokens (policy.draft.gamma); set 4"),
        ("dflash", ["policy.draft.aux_layer_indices=[0,4]"],
         "policy.draft.aux_layer_indices is [0, 4], but the policy has 4 layers; the highest index is 3"),
        ("dflash", ["policy.draft.aux_layer_indices=[3,1]"],
         "policy.draft.aux_layer_indices is [3, 1]; vLLM sorts layers and drops repeats, so give [1, 3]"),
        ("dflash", ["policy.draft.draft_vocab_size=321"],
         "policy.draft.draft_vocab_size is 321, more than the policy's vocabulary of 320"),
        ("dflash", ["policy.draft.ttt_steps=4"],
         "policy.draft.ttt_steps is 4, which is a setting of eagle3 and not of speculator_type dflash"),
        ("dspark", ["policy.draft.hard_labels=true"],
         "policy.draft.hard_labels is true, which is a setting of dflash and not of speculator_type dspark"),
        ("dflash", ["policy.draft.markov_rank=8"],
         "policy.draft.markov_rank is 8, which is a setting of dspark and not of speculator_type dflash"),
        ("dflash", [f"{SPECULATIVE}.method=dspark"],
         f"{SPECULATIVE}.method is dspark but policy.draft.speculator_type is dflash; set both alike"),
        ("dspark", [f"{SPECULATIVE}=null"], f"policy.draft.enabled is true but {SPECULATIVE} is null"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_a_line(kind, overrides, says):
    found = lines(kind, *overrides)
    assert len(found) == 1
    assert found[0].startswith(says), found


def test_blocks_cut_short_by_the_engine_are_noted():
    (note,) = notes(load("dflash", f"{SPECULATIVE}.num_speculative_tokens=3"))
    assert "num_speculative_tokens is 3, policy.draft.gamma is 4: vLLM makes blocks smaller" in note
    assert not notes(load("eagle3", "policy.draft.gamma=null", "policy.draft.mask_token_id=null"))


def test_tensor_parallelism_must_cut_a_block_draft_evenly():
    (line,) = lines(
        "dspark", "policy.draft.draft_vocab_size=81", "policy.megatron_cfg.tensor_model_parallel_size=2",
        "cluster.gpus_per_node=2",
    )  # fmt: skip
    assert line == (
        "policy.megatron_cfg.tensor_model_parallel_size is 2, which does not divide policy.draft.draft_vocab_size (81); "
        "sizes that fit: 1"
    )


@pytest.fixture
def folder(tmp_path):
    """Writes a draft for the examples' policy, after changes to its config; 4 layers, 128 wide."""

    def write(change=None, **settings):
        policy = load("dflash").policy.model.hf_config(0)
        config = block_draft_config(policy, num_attention_heads=4, **settings)
        return write_model(tmp_path / "draft", config | (change or {}), random_block_draft(config))

    return write


def from_folder(path, *more):
    nulls = ("gamma", "mask_token_id", "aux_layer_indices", "num_layers", "markov_rank")
    return [
        f"policy.draft.model_name={path}",
        f"{SPECULATIVE}.num_speculative_tokens=3",
        *(f"policy.draft.{key}=null" for key in nulls),
        *more,
    ]


def test_a_draft_may_have_fewer_key_heads_than_ranks(folder):
    layout = ("policy.megatron_cfg.tensor_model_parallel_size=2", "cluster.gpus_per_node=2")
    assert load("dflash", *from_folder(folder(num_key_value_heads=1, gamma=3), *layout)).policy.draft.enabled


def test_nulls_follow_the_checkpoint(folder):
    draft = load("dspark", *from_folder(folder(method="dspark", gamma=3, window=7))).policy.draft
    assert (draft.gamma, draft.mask_token_id, draft.sliding_window, draft.markov_rank) == (3, 0, 7, 16)
    assert (draft.aux_layer_indices, draft.num_layers, draft.draft_vocab_size) == ([0, 1, 2], 2, 320)


@pytest.mark.parametrize(
    ("kind", "settings", "change", "more", "says"),
    [
        ("dflash", {}, {}, ["policy.draft.gamma=5"],
         "has block_size 5, which drafts 4 tokens; set 4 or null, or use another draft"),
        ("dflash", {"gamma": 2}, {}, [], "num_speculative_tokens is 3, but a block of this draft has 2 tokens"),
        ("dspark", {}, {}, ["policy.draft.markov_rank=8"], "policy.draft.markov_rank is 8 but the draft in "),
        ("dflash", {}, {}, ["policy.draft.sliding_window=8"], "policy.draft.sliding_window is 8 but the draft in "),
        ("dflash", {"window": 6}, {"sliding_window": None}, [], "layer_types has sliding_attention but the window is null"),
        ("dflash", {"window": 6}, {"layer_types": ["sliding_attention", "full_attention"]}, [],
         "vLLM serves a mixture on GPUs only, so use a draft whose layers are all of one type"),
        ("dflash", {}, {"head_dim": 48}, [], "head_dim is 48; vLLM's CPU attention takes 32"),
        ("dflash", {"method": "dspark"}, {}, [], "policy.draft.speculator_type is dflash but the draft in "),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_told(folder, kind, settings, change, more, says):
    settings = {"method": kind} | settings
    path = folder(change, **settings)
    if "head_dim" in change:
        config = json.loads((path / "config.json").read_text())
        write_model(path, config, random_block_draft(config))
    found = lines(kind, *from_folder(path, *more))
    assert len(found) == 1 and says in found[0], found


def start_of(config, cache):
    config.data.warmup.cache_dir = str(cache)
    return warmup.initial(config)


def test_a_fresh_reduced_draft_starts_from_the_policys_head_and_fits_its_policy(tmp_path):
    start = start_of(load("dspark", "policy.draft.draft_vocab_size=80"), tmp_path)
    (_, policy), (_, draft) = read_hf_folder(start.policy), read_hf_folder(start.draft)
    kept = draft["t2d"].nonzero().flatten()
    assert len(kept) == 80 and torch.equal(kept, draft["d2t"] + torch.arange(80))
    assert torch.equal(draft["lm_head.weight"], policy["lm_head.weight"][kept])
    assert load("dspark", *from_folder(start.draft)).policy.draft.draft_vocab_size == 80


def test_an_imported_draft_is_the_folders_under_vllms_names(folder, tmp_path):
    path = folder(method="dspark", gamma=3, draft_vocab_size=64)
    start = start_of(load("dspark", *from_folder(path)), tmp_path / "cache")
    (config, got), (_, given) = read_hf_folder(start.draft), read_hf_folder(path)
    assert (config["block_size"], config["torch_dtype"]) == (3, "float32")
    assert got.keys() == given.keys() and all(torch.equal(got[name], given[name]) for name in given)


def test_the_cached_warm_up_is_another_for_another_block_and_the_same_for_what_a_kind_does_not_read(tmp_path):
    def folder_of(kind, *overrides):
        config = load(kind, *overrides)
        config.data.warmup.cache_dir = str(tmp_path)
        return warmup.initial(config).draft

    eagle3 = ("policy.draft.gamma=null", "policy.draft.mask_token_id=null")
    found = [folder_of("dflash"), folder_of("dspark"), folder_of("eagle3", *eagle3)]
    found += [folder_of("dflash", "policy.draft.gamma=3"), folder_of("dspark", "policy.draft.markov_rank=8")]
    assert len(set(found)) == 5
    assert folder_of("dflash", "policy.draft.ttt_steps=3", "policy.draft.tap_transport=shm") == found[0]
