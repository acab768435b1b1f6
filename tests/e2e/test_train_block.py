"""The whole trainer with block drafts on a small scale: DFlash on two data-parallel ranks, DSpark on two pipeline stages."""

import pytest

from nemo_ext.cli import main
from nemo_ext.local.hf_folder import read_hf_folder
from tests.e2e.conftest import Model
from tests.e2e.test_train import EXAMPLE, train
from tests.train_is_serve import assert_block_is_served, block_draft

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
LAYOUTS = {
    "dflash": ("policy.draft.gamma=4", "cluster.gpus_per_node=2"),
    "dspark": ("policy.draft.gamma=4", "cluster.gpus_per_node=2", "policy.megatron_cfg.pipeline_model_parallel_size=2"),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def go(kind, tmp_path_factory):
    """go(name, steps, *settings): a run in the module's folder `go.root`; its metrics."""
    root = tmp_path_factory.mktemp(f"train_{kind}")

    def run(name, steps, *more):
        example = EXAMPLE.with_name(f"grpo_cpu_{kind}.yaml")
        return train(root, name, steps, *LAYOUTS[kind], *more, example=example)

    run.root = root
    return run


@pytest.fixture(scope="module")
def straight(go):
    """Three steps in one go."""
    return go("straight", 3)


def test_a_run_has_its_metrics_and_report(straight, go, kind):
    assert [m["weights_version"] for m in straight] == [1, 2, 3]
    assert len({m["policy_sha256"] for m in straight}) == 3
    gamma = len(straight[0]["draft_loss_per_slot"])
    assert len(straight[0]["acceptance_per_position"]) == gamma > 1
    assert all(m["draft_loss"] > 0 and m["draft_grad_norm"] > 0 and m["accepted_length"] >= 1 for m in straight)
    assert all(("dspark_confidence_loss" in m) == (kind == "dspark") for m in straight)
    # The trainer's log-probabilities are the sampler's.
    assert all(abs(m["ratio_mean"] - 1) < 1e-3 and m["sampler_kl"] < 1e-5 for m in straight)
    assert "Draft loss per slot" in (go.root / "straight" / "report.html").read_text()


def test_a_stopped_run_goes_on_bitwise(straight, go):
    go("stopped", 2)
    resumed = go("stopped", 3)
    for key in ("policy_sha256", "reward_mean", "accepted_length", "draft_loss", "draft_grad_norm"):
        assert [m[key] for m in resumed] == [m[key] for m in straight], key


def test_the_export_serves_what_was_trained(straight, go, start_engine):
    assert main(["export", str(go.root / "straight"), "--to", str(go.root / "out")]) == 0
    (policy_config, policy), (config, tensors) = (read_hf_folder(go.root / "out" / n) for n in ("policy", "draft"))
    engine = start_engine(
        Model(go.root / "out" / "policy", policy_config, policy),
        Model(go.root / "out" / "draft", config, tensors),
        max_model_len=64,
    )
    assert_block_is_served(engine, block_draft(config, tensors), policy)
