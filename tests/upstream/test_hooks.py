"""The inserted lines in the patched checkout: each takes upstream's path unless the draft is ours and on."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from nemo_ext.config import ConfigError
from nemo_ext.nemo_rl import hooks
from tests.upstream.signatures import changed
from tests.upstream.worker import master_config, policy_settings

# isort: split
from nemo_rl.algorithms import grpo
from nemo_rl.distributed.ray_actor_environment_registry import get_actor_python_env
from nemo_rl.models.generation.vllm import vllm_worker
from nemo_rl.models.policy import lm_policy
from nemo_rl.models.policy.utils import resolve_policy_worker_cls

OFF = [None, {"enabled": False}, {"enabled": True}, {"enabled": True, "engine": "upstream"}]
OURS = {"enabled": True, "engine": "nemo_ext", "loss_weight": 0.1}
DISABLED = OURS | {"enabled": False}


def with_draft(draft, **policy) -> dict:
    settings = policy_settings("none", {}, sizes={}, **policy)
    settings.pop("draft")
    return settings if draft is None else settings | {"draft": dict(draft)}


@pytest.mark.parametrize("draft", [*OFF, DISABLED])
@pytest.mark.parametrize("quant", [None, "INT8"])
def test_the_policy_worker_is_upstreams(draft, quant):
    expected = "nemo_rl.modelopt.models.policy.workers.megatron_quant_policy_worker.MegatronQuantPolicyWorker"
    found = resolve_policy_worker_cls(hooks.MEGATRON_WORKER, with_draft(draft, quant_cfg=quant))
    assert found == (expected if quant else hooks.MEGATRON_WORKER)


def test_the_policy_worker_is_ours():
    assert resolve_policy_worker_cls(hooks.MEGATRON_WORKER, with_draft(OURS)) == hooks.POLICY_WORKER
    with pytest.raises(ConfigError, match="plain Megatron policies only"):
        resolve_policy_worker_cls(hooks.MEGATRON_WORKER, with_draft(OURS, quant_cfg="INT8"))
    with pytest.raises(ConfigError, match="plain Megatron policies only"):
        resolve_policy_worker_cls(
            "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker", with_draft(OURS)
        )


def test_our_worker_runs_in_megatrons_environment():
    assert get_actor_python_env(hooks.POLICY_WORKER) == get_actor_python_env(hooks.MEGATRON_WORKER)


def make_policy(policy: dict) -> None:
    """`Policy.__init__` up to its first need of a machine."""
    lm_policy.Policy(mock.MagicMock(), policy, mock.MagicMock())


@pytest.mark.parametrize("draft", [{"enabled": True}, {"enabled": True, "engine": "upstream"}])
def test_upstreams_own_draft_keeps_its_limits(draft, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    with pytest.raises(ValueError, match="does not support sequence packing"):
        make_policy(with_draft(draft, sequence_packing={"enabled": True}))


@pytest.mark.parametrize("draft", [None, {"enabled": False}, DISABLED, OURS])
def test_our_draft_does_not_have_them(draft, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    policy = with_draft(draft, sequence_packing={"enabled": True})
    policy["generation"][hooks.ENGINE] = "nemo_ext"
    with pytest.raises(RuntimeError, match="TORCH_CUDA_ARCH_LIST is not set"):  # the next check after the draft's
        make_policy(policy)


def test_a_draft_in_a_run_that_was_not_prepared_is_refused():
    with pytest.raises(ConfigError, match="trains drafts in GRPO"):
        make_policy(with_draft(OURS))


class Prepared(Exception):
    """Raised by a stand-in for `prepare_run`."""


@pytest.mark.parametrize("draft", [*OFF, DISABLED, OURS])
def test_setup_prepares_our_runs_alone(draft, monkeypatch):
    seen = []

    def prepare(policy, checkpoint_dir):
        seen.append((policy, checkpoint_dir))
        raise Prepared

    monkeypatch.setattr(hooks, "prepare_run", prepare)
    config = grpo.MasterConfig(**master_config({"policy": {"megatron_cfg": {"enabled": True}}}))
    config.policy.pop("draft")
    if draft is not None:
        config.policy["draft"] = dict(draft)
    # Without a dataset setup ends soon after, in an error of its own.
    with pytest.raises(Prepared if draft in (DISABLED, OURS) else Exception) as raised:
        grpo.setup(config, mock.MagicMock(), None, None)
    assert isinstance(raised.value, Prepared) == bool(seen)
    if seen:
        assert seen == [(config.policy, config.checkpointing["checkpoint_dir"])]


def engine_arguments(marker: dict, folder: str, monkeypatch) -> dict:
    """What upstream's generation worker hands to vLLM."""
    vllm = SimpleNamespace(SamplingParams=object, __spec__=None)
    logger = SimpleNamespace(init_logger=lambda name: mock.MagicMock(), __spec__=None)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.logger", logger)
    for where in (vllm_worker, vllm_worker.BaseVllmGenerationWorker):  # a method in older commits
        monkeypatch.setattr(where, "_apply_vllm_patches", lambda *args, **kwargs: None, raising=False)
    taken = {}

    class Worker(vllm_worker.BaseVllmGenerationWorker):
        def _create_engine(self, llm_kwargs):
            taken.update(llm_kwargs)

    config = master_config({"policy": {"model_name": folder}})["policy"]["generation"]
    config |= {"model_name": folder, **marker}
    config["vllm_cfg"]["load_format"] = "dummy"
    config["vllm_cfg"]["skip_tokenizer_init"] = True
    worker = object.__new__(Worker)
    worker._init_config(config, [0], 1.0, 0, None)
    worker._load_model([0], 0)
    return taken


def test_the_engine_is_upstreams(folders, monkeypatch):
    taken = engine_arguments({}, folders[0], monkeypatch)
    assert (taken["worker_extension_cls"], taken["load_format"]) == (hooks.UPSTREAM_EXTENSION, "dummy")


def test_the_engine_is_ours(folders, monkeypatch):
    taken = engine_arguments({hooks.ENGINE: "nemo_ext"}, folders[0], monkeypatch)
    assert (taken["worker_extension_cls"], taken["load_format"]) == (hooks.WORKER_EXTENSION, "auto")
    plain = engine_arguments({}, folders[0], monkeypatch)
    same = set(plain) - {"worker_extension_cls", "load_format"}
    assert set(taken) == set(plain) and all(taken[name] == plain[name] for name in same)


def test_everything_of_upstreams_that_is_overridden_or_called_is_as_it_was_written_for():
    assert changed() == []
