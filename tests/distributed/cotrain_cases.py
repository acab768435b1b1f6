"""Settings and batches of joint steps on gloo ranks, and what it means that two layouts saw the same."""

import copy
from pathlib import Path

import pytest
import torch

from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_init import init_block
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_init import init_eagle3
from nemo_ext.local.batch import Sample, StepPlan
from nemo_ext.local.hf_folder import save_hf_folder
from tests.distributed.cotrain_ranks import joint_steps
from tests.fixtures_models import policy_config, policy_tensors

VOCAB = 64
# What float32 sums in another order may change. The first step's figures differ by rounding alone; later ones also by what
# Adam makes of a gradient entry near zero. Losses are about 4, draft gradient entries up to about 0.1.
FIRST_TOLERANCE = 1e-5
LATER_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 2e-5
GRPO = StepPlan("grpo")
# Block drafts, with the temperature that they are compared at.
BLOCKS = {"dflash": 1.0, "dspark": 0.7}


def save_models(root: Path, *, key_heads: int, draft_key_heads: int | None = None) -> dict[str, str]:
    """Writes and names the folders of a random policy of 4 heads; of EAGLE-3 drafts, one whole, one with a reduced
    vocabulary and two layers; of a DFlash draft with windows, and of a DSpark draft with a reduced vocabulary. The drafts
    have the policy's key heads unless told."""
    policy = policy_config(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=key_heads)
    save_hf_folder(root / "policy", policy, policy_tensors(policy))
    like = policy | {"num_key_value_heads": draft_key_heads or key_heads}
    for name, options in (
        ("draft", {}),
        ("reduced", {"draft_vocab_size": 24, "num_layers": 2, "norm_output": True, "fc_norm": True}),
    ):
        cfg = Eagle3Config.for_policy(like, (0, 1, 3), **options)
        ids = torch.arange(5, 5 + 24) if cfg.reduced_vocab else None
        save_hf_folder(root / name, cfg.to_hf(), init_eagle3(cfg, 1, ids))
    for name, options in (
        ("dflash", {"gamma": 3, "sliding_window": 5}),
        ("dspark", {"gamma": 4, "draft_vocab_size": 24, "markov_rank": 8}),
    ):
        cfg = BlockConfig.for_policy(name, like, (0, 1, 3), mask_token_id=63, num_layers=2, **options)
        tensors = init_block(cfg, 2, torch.arange(5, 5 + 24) if cfg.reduced_vocab else None)
        # Heads that begin at zero would leave some of the gradients zero.
        generator = torch.Generator().manual_seed(3)
        for tensor in tensors.values():
            if tensor.is_floating_point() and not tensor.any():
                tensor.normal_(std=0.3, generator=generator)
        save_hf_folder(root / name, cfg.to_hf(), tensors)
    return {name: str(root / name) for name in ("policy", "draft", "reduced", "dflash", "dspark")}


def make_batches() -> list[list[Sample]]:
    """Three global batches of samples as a sampler would give them: short, long and one-token answers, one left out."""
    generator = torch.Generator().manual_seed(5)

    def sample(prompt, answer):
        ids = torch.randint(VOCAB, (prompt + answer,), generator=generator).tolist()
        log_probs = (-3 - torch.rand(answer, generator=generator)).tolist()
        return Sample(ids[:prompt], ids[prompt:], log_probs, advantage=float(torch.randn((), generator=generator)))

    made = [
        [sample(p, a) for p, a in ((5, 9), (3, 1), (7, 2), (2, 12), (9, 4), (1, 6), (4, 7), (6, 3))] for _ in range(3)
    ]
    made[1][2].mask = 0.0
    return made


def settings(
    *, tp=1, dp=1, cp=1, pp=1, vpp=None, sp=False, packed=True, enabled=True, recompute=False, temperature=1.0,
    mb_tokens=40, residency="auto", kind="eagle3", clip=1e9, eps=1e-8,
):  # fmt: skip
    """A run's settings by layout. The draft's clip is out of the way unless given, so that whole gradients can be compared;
    `eps` is its Adam's. Of the longer samples not every row is an anchor."""
    eagle3 = {"ttt_pass_weights": [1.0, 0.8, 0.6], "mask_out_of_draft_vocab": True, "trunk_residency": residency}
    own = eagle3 if kind == "eagle3" else {"speculator_type": kind, "anchors_per_seq": 5}
    return {
        "policy": {
            "model_name": "unused",
            "train_global_batch_size": 8,
            "train_micro_batch_size": 2,
            "max_total_sequence_length": 64,
            "sequence_packing": {"enabled": packed, "train_mb_tokens": mb_tokens},
            "megatron_cfg": {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "virtual_pipeline_model_parallel_size": vpp,
                "context_parallel_size": cp,
                "sequence_parallel": sp,
                "activation_checkpointing": recompute,
                "optimizer": {"lr": 1e-3},
            },
            "draft": {
                "enabled": enabled,
                "loss_weight": 1.0,
                "optimizer": {"lr": 1e-3, "clip_grad": clip, "adam_eps": eps},
                **own,
            },
            "generation": {"temperature": temperature, "max_new_tokens": 16, "vllm_cfg": {"max_model_len": 64}},
        },
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 1, "seed": 1},
        "data": {"tasks": [{"name": "chain_sum"}], "warmup": {"policy_steps": 0, "draft_steps": 0, "batch_size": 1}},
        "logger": {"run_name": "test"},
        "cluster": {"gpus_per_node": tp * dp * cp * pp},
    }


def run(pool, start, batches, draft="draft", plan=GRPO, **layout):
    folder = start[draft] if draft else None
    kind = draft if draft in BLOCKS else "eagle3"
    seen = pool.run(joint_steps, settings(kind=kind, **layout), start["policy"], folder, copy.deepcopy(batches), plan)
    return next(each for each in seen if each is not None)


def assert_same(got, want):
    for step, (mine, theirs) in enumerate(zip(got.metrics, want.metrics, strict=True)):
        assert mine.keys() == theirs.keys()
        tolerance = LATER_TOLERANCE if step else FIRST_TOLERANCE
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, abs=tolerance, rel=tolerance), (step, key)
    assert got.gradients.keys() == want.gradients.keys() and got.gradients
    for name, gradient in want.gradients.items():
        if gradient.is_floating_point():
            assert gradient.abs().max() > 1e-4, f"{name} has no gradient to compare"
            torch.testing.assert_close(got.gradients[name], gradient, atol=GRADIENT_TOLERANCE, rtol=0, msg=name)
