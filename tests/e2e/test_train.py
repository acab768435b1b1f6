"""The whole trainer on a small scale: Ray, Megatron ranks, real vLLM."""

import json
from pathlib import Path

import pytest
import torch

from nemo_ext.cli import main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_cpu_eagle3.yaml"
KEYS = (
    "step reward_mean accepted_length acceptance_rate acceptance_per_position draft_loss draft_loss_per_pass policy_loss "
    "grad_norm draft_grad_norm rollout_s rollout_tokens rollout_tokens_per_s train_s refresh_s step_s weights_version "
    "policy_sha256"
).split()


def train(root: Path, name: str, steps: int, *more: str, example: Path = EXAMPLE) -> list[dict]:
    """A run of a few small steps through the command line; its metrics."""
    settings = [
        f"logger.log_dir={root}",
        f"logger.run_name={name}",
        f"grpo.max_num_steps={steps}",
        f"data.warmup.cache_dir={root}/cache",
        "data.warmup.policy_steps=3",
        "data.warmup.draft_steps=3",
        "data.warmup.batch_size=8",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        *more,
    ]
    assert main(["train", str(example), *settings]) == 0
    return [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def straight(root):
    """Four steps in one go, on two data-parallel ranks."""
    return train(root, "straight", 4, "cluster.gpus_per_node=2")


def test_a_run_has_its_metrics_report_and_versions(straight, root):
    assert [m["step"] for m in straight] == [0, 1, 2, 3]
    assert [m["weights_version"] for m in straight] == [1, 2, 3, 4]
    assert all(set(KEYS) <= m.keys() for m in straight)
    assert len({m["policy_sha256"] for m in straight}) == 4
    assert len(straight[0]["acceptance_per_position"]) == len(straight[0]["draft_loss_per_pass"]) == 3
    # The trainer's log-probabilities are the sampler's.
    assert all(abs(m["ratio_mean"] - 1) < 1e-3 and m["sampler_kl"] < 1e-5 for m in straight)
    assert "accepted" in (root / "straight" / "report.html").read_text().lower()


def test_a_stopped_run_goes_on_bitwise(straight, root):
    train(root, "stopped", 2, "cluster.gpus_per_node=2")
    resumed = train(root, "stopped", 4, "cluster.gpus_per_node=2")
    for key in ("policy_sha256", "reward_mean", "accepted_length", "draft_loss", "draft_grad_norm"):
        assert [m[key] for m in resumed] == [m[key] for m in straight], key


def test_other_settings_do_not_go_on(straight, root, capsys):
    with pytest.raises(AssertionError):
        train(root, "straight", 4, "cluster.gpus_per_node=2", "policy.draft.ttt_steps=2")
    assert "policy.draft.ttt_steps is 2, but the run in" in capsys.readouterr().err


def test_export_loads_in_transformers_and_vllm(straight, root, start_engine):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.e2e.conftest import Model

    assert main(["export", str(root / "straight"), "--to", str(root / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(root / "out" / "policy").eval()
    tokenizer = AutoTokenizer.from_pretrained(root / "out" / "policy")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Spell this word backward: abc"}], return_dict=False
    )
    engine = start_engine(
        Model(root / "out" / "policy", {}, {}), Model(root / "out" / "draft", {}, {}), max_model_len=96
    )
    greedy = engine.generate([ids], temperature=0.0, max_new_tokens=8)
    with torch.no_grad():
        want = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(ids) :]
    assert greedy.samples[0].token_ids == want.tolist()
    assert greedy.accept.drafts > 0
