"""The joint step on gloo ranks: the same draft for every layout, and a policy that the draft cannot touch."""

import copy
from dataclasses import replace

import pytest
import torch

from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_init import init_block
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_init import init_eagle3
from nemo_ext.local.batch import Sample, StepPlan
from nemo_ext.local.hf_folder import save_hf_folder
from tests.distributed.cotrain_ranks import joint_steps, resumed_steps
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


@pytest.fixture(scope="module")
def one_rank(ranks):
    return ranks(1)


@pytest.fixture(scope="module")
def two_ranks(ranks):
    return ranks(2)


@pytest.fixture(scope="module")
def four_ranks(ranks):
    return ranks(4)


@pytest.fixture(scope="module")
def eight_ranks(ranks):
    return ranks(8)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Folders of a random policy; of EAGLE-3 drafts, one whole, one with a reduced vocabulary and two layers; of a DFlash
    draft with windows, and of a DSpark draft with a reduced vocabulary."""
    root = tmp_path_factory.mktemp("start")
    policy = policy_config(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2)
    save_hf_folder(root / "policy", policy, policy_tensors(policy))
    for name, options in (
        ("draft", {}),
        ("reduced", {"draft_vocab_size": 24, "num_layers": 2, "norm_output": True, "fc_norm": True}),
    ):
        cfg = Eagle3Config.for_policy(policy, (0, 1, 3), **options)
        ids = torch.arange(5, 5 + 24) if cfg.reduced_vocab else None
        save_hf_folder(root / name, cfg.to_hf(), init_eagle3(cfg, 1, ids))
    for name, options in (
        ("dflash", {"gamma": 3, "sliding_window": 5}),
        ("dspark", {"gamma": 4, "draft_vocab_size": 24, "markov_rank": 8}),
    ):
        cfg = BlockConfig.for_policy(name, policy, (0, 1, 3), mask_token_id=63, num_layers=2, **options)
        tensors = init_block(cfg, 2, torch.arange(5, 5 + 24) if cfg.reduced_vocab else None)
        # Heads that begin at zero would leave some of the gradients zero.
        generator = torch.Generator().manual_seed(3)
        for tensor in tensors.values():
            if tensor.is_floating_point() and not tensor.any():
                tensor.normal_(std=0.3, generator=generator)
        save_hf_folder(root / name, cfg.to_hf(), tensors)
    return {name: str(root / name) for name in ("policy", "draft", "reduced", "dflash", "dspark")}


@pytest.fixture(scope="module")
def batches():
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
    mb_tokens=40, residency="auto", kind="eagle3",
):  # fmt: skip
    """A run's settings by layout. The draft's clip is out of the way, so that gradients can be compared. Of the longer
    samples not every row is an anchor."""
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
                "optimizer": {"lr": 1e-3, "clip_grad": 1e9},
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


@pytest.fixture(scope="module")
def references(one_rank, start, batches):
    """One rank, one microbatch a sample group; by draft folder and temperature."""
    return {
        key: run(one_rank, start, batches, draft=key[0], temperature=key[1])
        for key in (("draft", 1.0), ("reduced", 0.7), *BLOCKS.items())
    }


CASES = [("draft", 1.0), ("reduced", 0.7)]


@pytest.mark.parametrize(("draft", "temperature"), CASES)
@pytest.mark.parametrize("sp", [False, True])
def test_tp2_equals_tp1(two_ranks, start, batches, references, draft, temperature, sp):
    got = run(two_ranks, start, batches, draft=draft, temperature=temperature, tp=2, sp=sp)
    assert_same(got, references[draft, temperature])


@pytest.mark.parametrize(("draft", "temperature"), CASES)
def test_dp2_equals_dp1(two_ranks, start, batches, references, draft, temperature):
    got = run(two_ranks, start, batches, draft=draft, temperature=temperature, dp=2)
    assert_same(got, references[draft, temperature])


def test_tp2_dp2_equals_one_rank(four_ranks, start, batches, references):
    got = run(four_ranks, start, batches, draft="reduced", temperature=0.7, tp=2, dp=2)
    assert_same(got, references["reduced", 0.7])


@pytest.mark.parametrize(("draft", "temperature"), CASES)
@pytest.mark.parametrize("packed", [True, False])
def test_cp2_equals_cp1(two_ranks, start, batches, references, draft, temperature, packed):
    residency = "ring" if packed else "resident"
    got = run(two_ranks, start, batches, draft=draft, temperature=temperature, cp=2, packed=packed, residency=residency)
    assert_same(got, references[draft, temperature])


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 4},
        {"cp": 2, "tp": 2},
        {"cp": 2, "dp": 2},
        {"cp": 2, "tp": 2, "sp": True, "recompute": True, "residency": "ring"},
    ],
)
def test_four_ranks_with_cp_equal_one(four_ranks, start, batches, references, layout):
    got = run(four_ranks, start, batches, draft="reduced", temperature=0.7, **layout)
    assert_same(got, references["reduced", 0.7])


PIPELINES = [{"pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2, "recompute": True, "packed": False}]


@pytest.mark.parametrize("layout", PIPELINES)
def test_pipeline_of_two_equals_one_rank(two_ranks, start, batches, references, layout):
    got = run(two_ranks, start, batches, draft="reduced", temperature=0.7, **layout)
    assert_same(got, references["reduced", 0.7])


@pytest.mark.parametrize("layout", [{"pp": 4}, {"pp": 2, "cp": 2}, {"pp": 2, "tp": 2, "sp": True}, {"pp": 2, "dp": 2}])
def test_pipelines_on_four_ranks_equal_one_rank(four_ranks, start, batches, references, layout):
    got = run(four_ranks, start, batches, draft="reduced", temperature=0.7, **layout)
    assert_same(got, references["reduced", 0.7])


@pytest.mark.parametrize("layout", [{"packed": False}, {"mb_tokens": 1000}, {"mb_tokens": 1}])
def test_microbatches_and_padding_change_nothing(one_rank, start, batches, references, layout):
    assert_same(run(one_rank, start, batches, **layout), references["draft", 1.0])


def test_recompute_changes_no_bit(one_rank, start, batches, references):
    got, want = run(one_rank, start, batches, recompute=True), references["draft", 1.0]
    assert got.digests == want.digests
    assert all(torch.equal(got.weights[name], t) for name, t in want.weights.items())


@pytest.mark.parametrize("draft", BLOCKS)
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "sp": True},
        {"dp": 2},
        {"cp": 2},
        {"cp": 2, "packed": False, "recompute": True},
        {"pp": 2},
        {"pp": 2, "vpp": 2},
    ],
)
def test_a_block_draft_on_two_ranks_equals_one(two_ranks, start, batches, references, draft, layout):
    got = run(two_ranks, start, batches, draft=draft, temperature=BLOCKS[draft], **layout)
    assert_same(got, references[draft, BLOCKS[draft]])


@pytest.mark.parametrize("draft", BLOCKS)
@pytest.mark.parametrize("layout", [{"cp": 4}, {"cp": 2, "pp": 2}])
def test_a_block_draft_on_four_ranks_equals_one(four_ranks, start, batches, references, draft, layout):
    got = run(four_ranks, start, batches, draft=draft, temperature=BLOCKS[draft], **layout)
    assert_same(got, references[draft, BLOCKS[draft]])


@pytest.mark.parametrize("draft", ["dspark"])
def test_tp2_cp2_pp2_equals_one_rank(eight_ranks, start, batches, references, draft):
    got = run(eight_ranks, start, batches, draft=draft, temperature=BLOCKS[draft], tp=2, cp=2, pp=2, sp=True)
    assert_same(got, references[draft, BLOCKS[draft]])


@pytest.mark.parametrize("draft", BLOCKS)
@pytest.mark.parametrize("layout", [{"packed": False}, {"mb_tokens": 1}, {"recompute": True}])
def test_microbatches_and_recompute_leave_a_block_draft_alone(one_rank, start, batches, references, draft, layout):
    """With one sequence each, some microbatches have no anchor at all."""
    got = run(one_rank, start, batches, draft=draft, temperature=BLOCKS[draft], **layout)
    assert_same(got, references[draft, BLOCKS[draft]])


@pytest.mark.parametrize("draft", BLOCKS)
def test_anchors_follow_the_number_of_the_step(one_rank, start, batches, references, draft):
    later = replace(GRPO, number=7)
    got = run(one_rank, start, batches[:1], draft=draft, temperature=BLOCKS[draft], plan=later)
    first = references[draft, BLOCKS[draft]].metrics[0]
    assert got.metrics[0]["draft_rows_per_slot"][0] == first["draft_rows_per_slot"][0]
    assert abs(got.metrics[0]["draft_loss"] - first["draft_loss"]) > 1e-3


@pytest.fixture(scope="module")
def without_draft(ranks_of, start, batches):
    """Steps of a policy alone, by layout; each layout runs once."""
    seen = {}

    def steps(layout):
        key = tuple(layout.items())
        if key not in seen:
            seen[key] = run(ranks_of(layout), start, batches, draft=None, enabled=False, **layout)
        return seen[key]

    return steps


LAYOUTS = [{}, {"tp": 2}, {"dp": 2}, {"cp": 2}, *PIPELINES, {"packed": False}, {"recompute": True}]


@pytest.mark.parametrize(
    ("draft", "layout"),
    [
        *(("draft", layout) for layout in LAYOUTS),
        *((draft, layout) for draft in BLOCKS for layout in ({}, {"tp": 2}, {"dp": 2}, {"cp": 2}, {"pp": 2, "vpp": 2})),
    ],
)
def test_policy_digests_are_bitwise_those_without_a_draft(ranks_of, start, batches, without_draft, draft, layout):
    with_draft, without = run(ranks_of(layout), start, batches, draft=draft, **layout), without_draft(layout)
    assert with_draft.digests == without.digests
    assert len(set(without.digests)) == len(batches)  # the policy does move
    assert all(m["grad_norm"] == w["grad_norm"] for m, w in zip(with_draft.metrics, without.metrics, strict=True))


@pytest.fixture(scope="module")
def ranks_of(one_rank, two_ranks):
    return lambda layout: two_ranks if 2 in layout.values() else one_rank


@pytest.mark.parametrize(
    ("draft", "layout"),
    [*(("reduced", layout) for layout in ({}, {"tp": 2}, {"pp": 2})), ("dflash", {"tp": 2}), ("dspark", {"pp": 2})],
)
def test_resume_continues_bitwise(ranks_of, start, batches, tmp_path, draft, layout):
    kind = draft if draft in BLOCKS else "eagle3"
    args = (
        settings(kind=kind, **layout),
        start["policy"],
        start[draft],
        copy.deepcopy(batches),
        GRPO,
        str(tmp_path),
        2,
    )
    straight, resumed = next(each for each in ranks_of(layout).run(resumed_steps, *args) if each is not None)
    assert resumed[0] == straight[0]
    assert resumed[1].keys() == straight[1].keys()
    assert all(torch.equal(resumed[1][name], t) for name, t in straight[1].items())


@pytest.mark.parametrize(
    ("draft", "layout"), [("draft", {}), ("draft", {"pp": 2}), ("dflash", {}), ("dflash", {"pp": 2})]
)
def test_draft_alone_learns_and_leaves_the_policy(ranks_of, start, batches, draft, layout):
    got = run(
        ranks_of(layout), start, batches[:1] * 3, draft=draft, **layout, plan=StepPlan("supervised", train_policy=False)
    )
    assert len(set(got.digests)) == 1
    losses = [m["draft_loss"] for m in got.metrics]
    assert losses[0] > losses[1] > losses[2]
