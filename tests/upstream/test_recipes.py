"""The recipes as NeMo-RL loads them, held against its own schema and this package's checks, and started as far as they go
without a process: with the policies' published configs, up to the draft's folder and shape.
"""

from pathlib import Path

import pytest

from nemo_ext.config import ConfigError
from nemo_ext.nemo_rl import draft_folder
from nemo_ext.nemo_rl.config import check_run, draft_settings, upstream_version
from nemo_ext.nemo_rl.families import FAMILIES, KINDS
from nemo_ext.nemo_rl.hooks import prepare_run
from tests.fixtures_policies import (
    POLICIES,
    leave_weights_out,
    published,
    text_model,
    write_policy,
    write_public_eagle3,
)
from tests.upstream.worker import UPSTREAM

# isort: split
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.models.generation.interfaces import GenerationConfig
from nemo_rl.models.policy import PolicyConfig
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf
from pydantic import TypeAdapter

WHY_NOT = {
    "kind": "speculator_type is dspark; the vLLM of v0.7.0 does not serve it",
    "multimodal": "a multimodal model .* that lays out its rows by itself",
    "taps": "whose hidden states vLLM .* does not hand to drafts",
    "latent": "wants non-causal attention in the policy's layers too",
}

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "nemo_rl").glob("*.yaml"))


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request, monkeypatch):
    """The whole run, as `examples/run_grpo.py` reads it."""
    monkeypatch.setenv("NEMO_RL", str(UPSTREAM))
    register_omegaconf_resolvers()
    return OmegaConf.to_container(load_config(request.param), resolve=True)


def test_the_whole_recipe_fits_upstreams_schema(recipe):
    MasterConfig(**recipe)
    TypeAdapter(PolicyConfig).validate_python(recipe["policy"])
    TypeAdapter(GenerationConfig).validate_python(recipe["policy"]["generation"])


def test_the_schema_would_notice_a_wrong_value(recipe):
    recipe["policy"]["megatron_cfg"]["context_parallel_size"] = "four"
    with pytest.raises(ValueError, match="context_parallel_size"):
        MasterConfig(**recipe)


def test_it_passes_the_checks_of_this_version_or_is_refused_by_name(recipe):
    policy = recipe["policy"]
    if policy["draft"]["speculator_type"] == "dspark" and upstream_version() == "v0.7.0":
        with pytest.raises(ConfigError, match="speculator_type is dspark; the vLLM of v0.7.0 does not serve it"):
            check_run(policy)
        return
    assert check_run(policy).enabled


def test_the_layout_fills_the_cluster(recipe):
    megatron, cluster = recipe["policy"]["megatron_cfg"], recipe["cluster"]
    model = (
        megatron["tensor_model_parallel_size"]
        * megatron["context_parallel_size"]
        * megatron["pipeline_model_parallel_size"]
    )
    gpus = cluster["gpus_per_node"] * cluster["num_nodes"]
    assert gpus % model == 0
    experts = megatron["expert_model_parallel_size"] * megatron["expert_tensor_parallel_size"]
    assert (gpus // megatron["pipeline_model_parallel_size"]) % experts == 0
    unit = recipe["policy"]["make_sequence_length_divisible_by"]
    assert unit % megatron["tensor_model_parallel_size"] == 0
    assert megatron["context_parallel_size"] == 1 or unit % (2 * megatron["context_parallel_size"]) == 0


def why_not(policy: dict, kind: str) -> str | None:
    """What a run with this kind of draft beside the policy is told at this version."""
    architecture = policy["architectures"][0]
    (family,) = [family for family in FAMILIES if architecture in family.architectures]
    why = family.blocked(kind, upstream_version())
    return WHY_NOT[why] if why else None


def started(policy: dict, folder: Path, monkeypatch):
    """The draft's shape of a run that is prepared like a run of `grpo.setup`, after what it was told was told.

    The policy's folder has its published config alone, a draft by name is a public one, and weights are left out.
    """
    name, kind = policy["model_name"], policy["draft"]["speculator_type"]
    leave_weights_out(monkeypatch)
    monkeypatch.setattr(draft_folder, "_download", lambda _: write_public_eagle3(folder / "public", published(name)))
    policy["model_name"] = write_policy(folder / "policy", published(name))
    if told := why_not(published(name), kind):
        with pytest.raises(ConfigError, match=told) as raised:
            prepare_run(policy, str(folder / "run"))
        assert len(raised.value.lines) == 1
        return None
    prepare_run(policy, str(folder / "run"))
    assert policy["generation"]["vllm_kwargs"]["speculative_config"]["model"] == policy["draft"]["model_name"]
    return draft_folder.draft_of_folder(policy["draft"]["model_name"], draft_settings(policy), policy)[1]


def test_it_starts_with_its_policys_published_config(recipe, tmp_path, monkeypatch):
    policy, config = recipe["policy"], published(recipe["policy"]["model_name"])
    shape = started(policy, tmp_path, monkeypatch)
    if shape is None:
        return
    assert (shape.hidden_size, shape.vocab_size) == (config["hidden_size"], config["vocab_size"])
    assert shape.tap_layers[-1] < config["num_hidden_layers"]
    assert shape.max_position_embeddings >= policy["max_total_sequence_length"]
    # The engine cuts the draft as it cuts the policy.
    assert shape.num_heads % policy["generation"]["vllm_cfg"]["tensor_parallel_size"] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gets_a_draft_or_is_told_why_not(name, kind, tmp_path, monkeypatch):
    register_omegaconf_resolvers()
    config = OmegaConf.to_container(load_config(UPSTREAM / "examples/configs/grpo_math_1B_megatron.yaml"), resolve=True)
    policy, sizes = config["policy"], {} if kind == "eagle3" else {"gamma": 7, "mask_token_id": 7}
    policy["model_name"] = name
    policy["draft"] = {"enabled": True, "engine": "nemo_ext", "speculator_type": kind, **sizes}
    policy["generation"]["vllm_kwargs"] = {"speculative_config": {"method": kind, "num_speculative_tokens": 3}}
    shape = started(policy, tmp_path, monkeypatch)
    assert shape is None or shape.hidden_size == published(name)["hidden_size"]


@pytest.mark.parametrize("name", [name for name in POLICIES if text_model(name) != published(name)])
def test_every_text_model_alone_is_a_policy(name, tmp_path):
    config = draft_folder.policy_hf_config({"model_name": write_policy(tmp_path, text_model(name))})
    assert config["num_hidden_layers"] == text_model(name)["num_hidden_layers"]
