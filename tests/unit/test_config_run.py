"""A whole run's settings: the example passes, and what cannot work together is told before anything starts."""

import json
from pathlib import Path

import pytest

from nemo_ext.config import ConfigError
from nemo_ext.local.settings_checks import HEAD_SIZES, load_run, notes
from tests.fixtures_models import policy_config, policy_tensors, write_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_cpu_eagle3.yaml"
SPECULATIVE = "policy.generation.vllm_kwargs.speculative_config"
# What the expected lines speak of, whatever the example is tuned to.
PINNED = (
    "policy.model.num_hidden_layers=6",
    "policy.model.num_attention_heads=4",
    "policy.model.num_key_value_heads=2",
    "policy.model.intermediate_size=256",
    "policy.model.vocab_size=320",
    "policy.max_total_sequence_length=128",
    "policy.generation.max_new_tokens=24",
    "policy.draft.aux_layer_indices=[1,3,5]",
    "policy.draft.ttt_steps=3",
    "policy.draft.draft_vocab_size=null",
    f"{SPECULATIVE}.num_speculative_tokens=3",
    "data.tasks=[{name: chain_sum}]",
    "data.warmup.batch_size=64",
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=4",
    "cluster.gpus_per_node=1",
)


def load(*overrides):
    return load_run(EXAMPLE, [*PINNED, *overrides])


def lines(*overrides):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return list(caught.value.lines)


def test_the_example_passes_and_its_policy_has_about_a_million_parameters():
    config = load_run(EXAMPLE)
    model = config.policy.model
    assert 0.5e6 < sum(t.numel() for t in policy_tensors(model.hf_config(0)).values()) < 2e6
    assert config.policy.draft.enabled and not notes(config)


def test_nulls_of_a_fresh_draft_are_filled_in():
    draft = load("policy.draft.aux_layer_indices=null", "policy.draft.num_layers=null").policy.draft
    assert (draft.aux_layer_indices, draft.num_layers, draft.norm_output, draft.fc_norm) == ([0, 2, 5], 1, False, False)
    assert draft.draft_vocab_size == 320


def test_a_fresh_policys_hf_config_is_what_transformers_reads(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = load().policy.model
    (tmp_path / "config.json").write_text(json.dumps(model.hf_config(eos_token_id=7)))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert read.model_type == "qwen3" and read.eos_token_id == 7
    assert (read.head_dim, read.num_key_value_heads, read.vocab_size) == (model.head_dim, 2, model.vocab_size)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["policy.megatron_cfg.pipeline_model_parallel_size=4", "cluster.gpus_per_node=4"],
         "policy.megatron_cfg.pipeline_model_parallel_size * virtual_pipeline_model_parallel_size is 4, which does not "),
        (["policy.megatron_cfg.virtual_pipeline_model_parallel_size=2"],
         "policy.megatron_cfg.virtual_pipeline_model_parallel_size is 2 but pipeline_model_parallel_size is 1"),
        (["policy.megatron_cfg.sequence_parallel=true"],
         "policy.megatron_cfg.sequence_parallel is true but tensor_model_parallel_size is 1"),
        (["policy.megatron_cfg.tensor_model_parallel_size=2"],
         "cluster.gpus_per_node is 1, not a multiple of tensor * pipeline * context parallel size = 2; set 2 or a"),
        (["policy.train_global_batch_size=7"],
         "policy.train_global_batch_size is 7, but grpo.num_prompts_per_step * grpo.num_generations_per_prompt = "),
        (["data.warmup.batch_size=63", "cluster.gpus_per_node=2"],
         "data.warmup.batch_size is 63, not a multiple of the 2 data-parallel replicas"),
        (["policy.generation.vllm_cfg.max_model_len=4096"],
         "policy.generation.vllm_cfg.max_model_len is 4096, more than policy.max_total_sequence_length"),
        (["policy.generation.max_new_tokens=4096"], "policy.generation.max_new_tokens is 4096, which leaves no room"),
        (["policy.sequence_packing.train_mb_tokens=5"], "policy.sequence_packing.train_mb_tokens is 5, less than one"),
        (["policy.model.max_position_embeddings=64"],
         "policy.max_total_sequence_length is 128, more than the policy's max_position_embeddings 64; set 64 or less"),
        ([f"{SPECULATIVE}=null"], f"policy.draft.enabled is true but {SPECULATIVE} is null"),
        ([f"{SPECULATIVE}.method=dflash"],
         f"{SPECULATIVE}.method is dflash but policy.draft.speculator_type is eagle3; set both alike"),
        ([f"{SPECULATIVE}.method=eagle"], f"{SPECULATIVE}.method is eagle; it must be one of eagle3, dflash, dspark"),
        ([f"{SPECULATIVE}.num_speculative_tokens=0"], f"{SPECULATIVE}.num_speculative_tokens is 0; it must be >= 1"),
        ([f"{SPECULATIVE}.model=/elsewhere"],
         f"{SPECULATIVE}.model is /elsewhere but policy.draft.model_name is null; leave the former out"),
        (["policy.generation.temperature=0"], "policy.generation.temperature is 0; it must be > 0"),
        (["policy.model.head_dim=16"], "policy.model: head_dim is 16; vLLM's CPU attention takes 32, 64, 80, "),
        (["policy.model.num_attention_heads=3"],
         "policy.model: num_attention_heads is 3, not a multiple of num_key_value_heads 2"),
        (["policy.draft.aux_layer_indices=[1,6]"], "policy.draft.aux_layer_indices is [1, 6], but the policy has 6 l"),
        (["policy.draft.draft_vocab_size=9999"], "policy.draft.draft_vocab_size is 9999, more than the policy's"),
        (["policy.model=null"], "policy.model_name and policy.model: both are null"),
        (["policy.model_name=/nowhere"], "policy.model_name and policy.model: both are set"),
        (["policy.model=null", "policy.model_name=/nowhere"], "policy.model_name is /nowhere: no such folder"),
        (["policy.draft.model_name=/nowhere"], "policy.draft.model_name is /nowhere: no such folder"),
        (["data.tasks[0].name=chain_summ"], "data.tasks[0].name is chain_summ; did you mean chain_sum?"),
        (["data.tasks=[{name: chain_sum, config: {max_term: 2}}]"],
         "data.tasks[0].config.max_term is not a setting of chain_sum; did you mean max_terms?"),
        (["data.tasks=[{name: chain_sum, config: {min_terms: 0}}]"],
         'data.tasks[0].config is {"min_terms": 0}, which chain_sum refuses: min_terms must be positive'),
        (["data.tasks=[]"], "data.tasks is []; it must have at least 1 entry"),
        (["grpo.num_generations_per_prompt=1"], "grpo.num_generations_per_prompt is 1; it must be >= 2"),
        (["grpo.sed=1"], "grpo.sed is not a setting; did you mean seed?"),
        (["cluster.gpus_per_node=100000"], "cluster.gpus_per_node is 100000; it must be <= 256"),
        (["policy.megatron_cfg.pipeline_model_parallel_size=4", "cluster.gpus_per_node=4"],
         "policy.megatron_cfg.pipeline_model_parallel_size * virtual_pipeline_model_parallel_size is 4, which does not "
         "divide the policy's num_hidden_layers (6); these do: 1, 2, 3, 6"),
        (["polcy=1"], "polcy is not a setting; did you mean policy?"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_a_line(overrides, says):
    found = lines(*overrides)
    assert len(found) == 1
    assert found[0].startswith(says), found


def test_tensor_parallelism_must_cut_evenly():
    (line,) = lines("policy.megatron_cfg.tensor_model_parallel_size=4", "cluster.gpus_per_node=4")
    assert line == (
        "policy.megatron_cfg.tensor_model_parallel_size is 4, which does not divide "
        "the policy's num_key_value_heads (2); sizes that fit: 1, 2"
    )


def test_several_troubles_are_told_at_once():
    found = lines(
        "policy.model.head_dim=16",
        f"{SPECULATIVE}=null",
        "data.tasks[0].name=nothing_like_it",
        "policy.draft.model_name=/no",
    )
    assert [line.split(" ")[0] for line in found] == [
        "policy.draft.enabled",
        "data.tasks[0].name",
        "policy.draft.model_name",
    ]


def test_more_drafted_tokens_than_passes_is_allowed_and_noted():
    (note,) = notes(load(f"{SPECULATIVE}.num_speculative_tokens=5"))
    assert "num_speculative_tokens is 5, policy.draft.ttt_steps is 3" in note


def test_a_frozen_draft_and_no_draft_are_runs_too():
    assert not load("policy.draft.enabled=false").policy.draft.enabled
    plain = load("policy.draft.enabled=false", f"{SPECULATIVE}=null")
    assert plain.policy.generation.vllm_kwargs.speculative_config is None


@pytest.mark.e2e
def test_head_sizes_are_those_of_vllms_cpu_backend():
    backend = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    assert tuple(backend.CPUAttentionBackend.get_supported_head_sizes()) == HEAD_SIZES


@pytest.fixture
def policy_folder(tmp_path):
    config = policy_config()
    folder = write_model(tmp_path / "policy", config, policy_tensors(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def named(folder, *more):
    return ["policy.model=null", f"policy.model_name={folder}", "policy.draft.aux_layer_indices=null", *more]


def test_a_policy_folder_gives_the_shape(policy_folder):
    assert load(*named(policy_folder)).policy.draft.aux_layer_indices == [0, 1, 3]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_policy_folder_without_a_file_is_refused(policy_folder, file):
    (policy_folder / file).unlink()
    (line,) = lines(*named(policy_folder))
    assert line.startswith(f"policy.model_name is {policy_folder}: it has no {file}")


def test_pickled_policy_weights_are_refused(policy_folder):
    (policy_folder / "model.safetensors").rename(policy_folder / "pytorch_model.bin")
    (line,) = lines(*named(policy_folder))
    assert "pickles, which can run code" in line


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llama"}, "model_type is llama; this trainer has qwen3 only"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is yarn; this trainer has default only"),
        ({"hidden_size": None}, "hidden_size is null in config.json; it must be a number"),
        ({"head_dim": 48}, "head_dim is 48; vLLM's CPU attention takes 32"),
    ],
)
def test_a_policy_that_the_trainer_does_not_have_is_refused(policy_folder, change, says):
    path = policy_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (line,) = lines(*named(policy_folder))
    assert line.startswith(f"policy.model_name is {policy_folder}: ") and says in line
