"""Which NeMo-RL runs the front door takes: the checks of a run, and the documentation's table."""

from pathlib import Path

import pytest

from nemo_ext.config import ConfigError
from nemo_ext.nemo_rl import config, hooks, support
from nemo_ext.nemo_rl.patch_set import patch_sets


def policy(**draft) -> dict:
    """The parts of `policy` that the checks read, all well."""
    method = draft.get("speculator_type", "eagle3")
    return {
        "precision": "bfloat16",
        "draft": {"enabled": True, "engine": "nemo_ext", **draft},
        "megatron_cfg": {"enabled": True, "context_parallel_size": 1},
        "sequence_packing": {"enabled": True},
        "generation": {
            "backend": "vllm",
            "vllm_kwargs": {"speculative_config": {"method": method, "num_speculative_tokens": 3}},
        },
    }


def put(settings: dict, path: str, value) -> dict:
    """`settings` with the value at a dotted path."""
    *sections, key = path.split(".")
    at = settings
    for section in sections:
        at = at.setdefault(section, {})
    at[key] = value
    return settings


def refusal(settings: dict) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        config.check_run(settings)
    return list(raised.value.lines)


def test_the_documentation_has_the_table():
    page = (Path(__file__).parents[2] / "docs" / "nemo-rl.md").read_text()
    assert support.table() in page


def test_the_documentation_counts_the_inserted_lines():
    page = (Path(__file__).parents[2] / "docs" / "nemo-rl.md").read_text()
    for patches in patch_sets():
        count = sum(len(one.lines) for file in patches.files for one in file.insertions)
        assert len(patches.files) == 5 and f"{count} inserted lines in five files" in page


def test_versions_are_those_of_the_patches():
    assert sorted(support.VERSIONS) == [patches.version for patches in patch_sets()]


def with_what_does_not_work(limit: support.Limit) -> dict:
    if limit.setting == "draft.speculator_type":
        return policy(speculator_type="dspark")
    works = limit.works[-1]
    return put(policy(), limit.setting, not works if isinstance(works, bool) else "another")


@pytest.mark.parametrize("limit", support.LIMITS, ids=lambda limit: limit.feature)
@pytest.mark.parametrize("version", support.VERSIONS)
def test_a_limit_is_told_by_name_in_its_versions_alone(monkeypatch, limit, version):
    monkeypatch.setattr(config, "upstream_version", lambda: version)
    settings = with_what_does_not_work(limit)
    if version not in limit.versions:
        assert config.check_run(settings).enabled
        return
    line = refusal(settings)[0]
    assert line.startswith(f"policy.{limit.setting} is ") and limit.why in line


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_every_kind_of_draft_passes_where_the_version_is_not_known(kind):
    assert config.upstream_version() is None  # no NeMo-RL in this environment
    assert config.check_run(policy(speculator_type=kind)).speculator_type == kind


def test_a_draft_that_is_off_asks_nothing_of_the_rest():
    settings = policy(enabled=False) | {"precision": "float16", "generation": None}
    assert not config.check_run(settings).enabled


def test_context_parallelism_wants_packs():
    settings = put(put(policy(), "megatron_cfg.context_parallel_size", 2), "sequence_packing.enabled", False)
    assert "context_parallel_size is 2 but policy.sequence_packing.enabled is false" in refusal(settings)[0]


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("method", "dflash", "method is dflash but policy.draft.speculator_type is eagle3"),
        ("num_speculative_tokens", None, "num_speculative_tokens is null; set how many tokens to draft"),
        ("model", "elsewhere", "model is elsewhere but policy.draft.model_name is null"),
    ],
)
def test_what_vllm_serves_is_what_trains(key, value, told):
    assert told in refusal(put(policy(), f"generation.vllm_kwargs.speculative_config.{key}", value))[0]


def test_a_draft_that_nothing_serves_is_refused():
    assert "so nothing would serve the draft" in refusal(put(policy(), "generation.vllm_kwargs", {}))[0]


def test_the_engine_must_have_upstreams_extension():
    with pytest.raises(ConfigError, match="worker_extension_cls is mine.Extension"):
        hooks.engine_arguments({"worker_extension_cls": "mine.Extension"})
