"""The recipes as NeMo-RL loads them, held against its own schema and this package's checks."""

from pathlib import Path

import pytest

from nemo_ext.config import ConfigError
from nemo_ext.nemo_rl.config import check_run, upstream_version
from tests.upstream.worker import UPSTREAM

# isort: split
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.models.generation.interfaces import GenerationConfig
from nemo_rl.models.policy import PolicyConfig
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf
from pydantic import TypeAdapter

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
