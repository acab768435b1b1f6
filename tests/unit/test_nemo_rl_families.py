"""Published policy configs x kinds of draft x versions: a draft to start from, or the one line that says why not."""

from pathlib import Path

import pytest

from nemo_ext.config import ConfigError
from nemo_ext.nemo_rl import config, draft_folder, families, hooks
from nemo_ext.nemo_rl.support import MAIN, V070, VERSIONS
from tests.fixtures_policies import POLICIES, leave_weights_out, published, text_model, write_policy
from tests.unit.test_nemo_rl_support import policy as settings

KINDS = tuple(families.KINDS)
LINES = {
    "taps": "whose hidden states vLLM 0.20.0, the engine of NeMo-RL v0.7.0, does not hand to drafts; use NeMo-RL "
    "main-7ea279abf (vLLM 0.25.1), or set policy.draft.enabled to false",
    "latent": "policy.draft.speculator_type is dflash, for which vLLM 0.20.0, the engine of NeMo-RL v0.7.0, wants non-causal "
    "attention in the policy's layers too",
    "kind": "policy.draft.speculator_type is dspark; the vLLM of v0.7.0 does not serve it",
    "multimodal": "that lays out its rows by itself; drafts train beside text models only, so set policy.draft.enabled to "
    "false",
}


def run(folder: str, kind: str) -> dict:
    """`policy` of a run with a fresh draft beside the policy in the folder."""
    sizes = {} if kind == "eagle3" else {"gamma": 7, "mask_token_id": 7}
    return settings(speculator_type=kind, **sizes) | {"model_name": folder, "max_total_sequence_length": 8192}


def of_version(monkeypatch, version: str | None) -> None:
    monkeypatch.setattr(config, "upstream_version", lambda: version)
    monkeypatch.setattr(draft_folder, "upstream_version", lambda: version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gets_a_draft_or_is_told_why_not(tmp_path, monkeypatch, name, kind, version):
    of_version(monkeypatch, version)
    leave_weights_out(monkeypatch)
    policy = run(write_policy(tmp_path / "policy", published(name)), kind)
    architecture = published(name)["architectures"][0]
    family = next(family for family in families.FAMILIES if architecture in family.architectures)
    why = family.blocked(kind, version)
    if why:
        with pytest.raises(ConfigError) as raised:
            hooks.prepare_run(policy, str(tmp_path / "run"))
        assert len(raised.value.lines) == 1 and LINES[why] in raised.value.lines[0]
        assert not (tmp_path / "run").exists()
        return
    hooks.prepare_run(policy, str(tmp_path / "run"))
    draft = config.draft_settings(policy)
    _, shape = draft_folder.draft_of_folder(policy["draft"]["model_name"], draft, policy)
    assert shape.hidden_size == published(name)["hidden_size"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in POLICIES if name.startswith("qwen3.5")])
def test_the_text_model_alone_is_a_policy_where_the_engine_is_not_known(tmp_path, monkeypatch, name, kind):
    leave_weights_out(monkeypatch)
    policy = run(write_policy(tmp_path / "policy", text_model(name)), kind)
    hooks.prepare_run(policy, str(tmp_path / "run"))
    of_version(monkeypatch, MAIN)
    with pytest.raises(
        ConfigError, match=r"whose hidden states vLLM 0.25.1, .* does not hand to drafts; set policy.draft"
    ):
        draft_folder.starting_folder(config.draft_settings(policy), policy, str(tmp_path / "run"))


def test_an_architecture_that_is_not_listed_is_left_to_the_engine():
    assert families.refusal(["OlmoForCausalLM"], "eagle3", V070) is None
    assert families.refusal(None, "eagle3", MAIN) is None


def test_a_version_that_is_not_known_is_not_held_against_a_run():
    assert families.refusal(["NemotronHForCausalLM"], "eagle3", None) is None


def test_an_architecture_is_listed_once():
    names = [name for family in families.FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))


def test_the_documentation_has_the_table():
    assert families.table() in (Path(__file__).parents[2] / "docs" / "nemo-rl.md").read_text()


def test_a_run_longer_than_the_policys_config_says_gets_a_draft_as_long(tmp_path, monkeypatch):
    leave_weights_out(monkeypatch)
    policy = run(write_policy(tmp_path / "policy", published("qwen3-8b")), "eagle3") | {
        "max_total_sequence_length": 131072,
        "hf_config_overrides": {
            "rope_scaling": {
                "rope_type": "yarn",
                "rope_theta": 1000000,
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            }
        },
    }
    hooks.prepare_run(policy, str(tmp_path / "run"))
    draft = config.draft_settings(policy)
    _, shape = draft_folder.draft_of_folder(policy["draft"]["model_name"], draft, policy)
    assert (shape.max_position_embeddings, shape.rope_theta) == (131072, 1e6)


def test_a_config_that_transformers_cannot_read_is_told_in_a_line(tmp_path):
    folder = write_policy(tmp_path, {"model_type": "of_tomorrow", "architectures": ["OfTomorrowForCausalLM"]})
    with pytest.raises(ConfigError) as raised:
        draft_folder.policy_hf_config({"model_name": folder})
    (line,) = raised.value.lines
    assert line.startswith(f"policy.model_name is {folder}, whose config transformers ") and "of_tomorrow" in line
    assert line.endswith("give a folder that brings its own configuration code, or a transformers that knows the model")
