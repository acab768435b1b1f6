"""DFlash and DSpark with their objective against the dense float64 reference: loss, every draft gradient, metrics."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from nemo_ext.cotrain import Draw
from nemo_ext.drafts.block_hf import export_block, load_block
from nemo_ext.layout import PackedLayout
from nemo_ext.losses import LossTerms
from tests.reference.block_losses import dspark_metrics
from tests.unit.block_cases import (
    SHAPES,
    dense_loss,
    export_gradients,
    make_draft,
    make_objective,
    make_pack,
    make_tensors,
    run_objective,
)

LENGTHS = [7, 1, 2, 13, 4, 0]
PER_SEQUENCE = ("taps", "hidden", "mask", "ids")
DRAW = Draw([40, 41, 7, 9, 100, 3], step=5)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """Megatron's parallel layers want a process group, also of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def leaves(tensors):
    return {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7, "loss_weighting": "exp"},
    "recompute": {"recompute": True, "chunk_rows": 1000},
    "hard": {"terms": LossTerms(hard_labels=True)},
    "other-weights": {"terms": LossTerms(0.3, 0.7, True), "confidence_alpha": 0.4},
}
CASES = [(name, key) for name in SHAPES for key in OPTIONS if (key != "hard") or SHAPES[name].kind == "dflash"]
CASES = [(n, k) for n, k in CASES if k != "other-weights" or SHAPES[n].confidence_head]


@pytest.mark.parametrize(("name", "key"), CASES)
@pytest.mark.parametrize("pad_multiple", [1, 4])
def test_loss_and_all_gradients_equal_dense(name, key, pad_multiple):
    cfg = SHAPES[name]
    tensors = make_tensors(cfg)
    draft = make_draft(cfg, tensors, dist.group.WORLD)
    pack = make_pack(LENGTHS)
    objective = make_objective(draft, **OPTIONS[key])
    got = run_objective(objective, pack, PackedLayout(LENGTHS, pad_multiple=pad_multiple), DRAW, pack.head_VH)
    got.loss.backward()

    reference = leaves(tensors)
    want = dense_loss(cfg, reference, pack, objective, DRAW)
    want.loss.backward()
    torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=1e-10)
    grads = export_gradients(draft, export_block(draft))
    assert grads.keys() == {n for n, t in reference.items() if t.is_floating_point()}
    for each, grad in grads.items():
        assert reference[each].grad.abs().max() > 1e-7, f"{each} has no gradient to compare"
        torch.testing.assert_close(grad, reference[each].grad, rtol=0, atol=1e-10, msg=each)


@pytest.mark.parametrize("name", SHAPES)
def test_metrics_equal_dense(name):
    cfg = SHAPES[name]
    tensors = make_tensors(cfg)
    draft = make_draft(cfg, tensors, dist.group.WORLD)
    pack = make_pack(LENGTHS)
    objective = make_objective(draft, temperature=0.8, loss_weighting="exp")
    got = run_objective(objective, pack, PackedLayout(LENGTHS), DRAW, pack.head_VH)
    metrics = objective.metrics(got.sums())
    dense = dense_loss(cfg, tensors, pack, objective, DRAW)
    decay = None if cfg.gamma == 1 else -1.0 / torch.tensor(objective.slot_weights[1]).log()
    want = dspark_metrics(
        dense.logits, dense.confidence, dense.teacher, dense.targets, gamma_d=decay, d2t_U=tensors.get("d2t"),
        temperature=0.8,
    )  # fmt: skip

    def same(key, value):
        torch.testing.assert_close(torch.tensor(metrics[key]).double(), value.detach(), rtol=0, atol=1e-6, msg=key)

    same("draft_acceptance_per_slot", want["accept_rate_full_mass"])
    same("draft_greedy_acceptance_per_slot", want["greedy_accept_rate"])
    same("draft_rows_per_slot", dense.targets.mask.sum(0).double())
    if not cfg.reduced_vocab:
        same("draft_expected_accepted_length", want["tau"])
    if cfg.confidence_head:
        for key in ("abs_error", "bias", "cumprod_bias"):
            same(f"dspark_confidence_{key}", want[f"confidence_{key}"])
    if cfg.kind == "dflash":
        same("draft_loss", dense.loss)
    else:
        total = 0.1 * metrics["dspark_ce_loss"] + 0.9 * metrics["dspark_tv_loss"]
        total += metrics.get("dspark_confidence_loss", 0.0)
        assert total == pytest.approx(float(dense.loss), abs=1e-6)


@pytest.mark.parametrize("name", ["dflash-window", "dspark"])
def test_microbatches_add_up_to_the_whole_pack(name):
    """Sequences one by one and in another order: the same blocks, loss, sums and gradients."""
    cfg = SHAPES[name]
    found = []
    for parts in ([[0, 1, 2, 3, 4, 5]], [[3], [5, 0], [4, 2, 1]]):
        draft = make_draft(cfg, make_tensors(cfg), dist.group.WORLD)
        objective, whole = make_objective(draft), make_pack(LENGTHS)
        cut = [replace(whole, **{k: [getattr(whole, k)[i] for i in p] for k in PER_SEQUENCE}) for p in parts]
        draws = [Draw([DRAW.sample_ids[i] for i in part], DRAW.step) for part in parts]
        layouts = [PackedLayout(pack.lengths, pad_multiple=2) for pack in cut]
        batches = list(zip(cut, layouts, draws, strict=True))
        denominator = objective.denominator(sum(objective.plan.count(y, y.pack(p.mask), d) for p, y, d in batches))
        losses = [run_objective(objective, p, y, d, whole.head_VH, denominator) for p, y, d in batches]
        sum(each.loss for each in losses).backward()
        found.append((sum(each.sums() for each in losses), export_gradients(draft, export_block(draft))))
    (sums, grads), (other_sums, other_grads) = found
    torch.testing.assert_close(other_sums, sums, rtol=0, atol=1e-10)
    for each, grad in grads.items():
        torch.testing.assert_close(other_grads[each], grad, rtol=0, atol=1e-10, msg=each)


@pytest.mark.parametrize("name", ["dflash", "dflash-causal-reduced", "dspark"])
def test_nothing_trained_is_a_zero_connected_to_every_parameter(name):
    cfg = SHAPES[name]
    draft = make_draft(cfg, make_tensors(cfg), dist.group.WORLD)
    pack = make_pack(LENGTHS, trained=0.0)
    objective = make_objective(draft)
    got = run_objective(objective, pack, PackedLayout(LENGTHS), DRAW, pack.head_VH)
    got.loss.backward()
    assert got.loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in draft.parameters())
    metrics = objective.metrics(got.sums())
    assert metrics["draft_loss"] == 0 and metrics["draft_expected_accepted_length"] == 1


def test_the_policy_gets_no_gradient():
    cfg = SHAPES["dspark"]
    draft = make_draft(cfg, make_tensors(cfg), dist.group.WORLD)
    pack = make_pack(LENGTHS)
    for tensor in (pack.table_VH, pack.head_VH, *pack.taps, *pack.hidden):
        tensor.requires_grad_()
    run_objective(make_objective(draft), pack, PackedLayout(LENGTHS), DRAW, pack.head_VH).loss.backward()
    assert all(t.grad is None for t in (pack.table_VH, pack.head_VH, *pack.taps, *pack.hidden))


@pytest.mark.parametrize("name", ["dflash-causal-reduced", "dspark"])
def test_export_of_a_load_is_the_same_tensors(name):
    cfg = SHAPES[name]
    tensors = make_tensors(cfg)
    exported = dict(export_block(make_draft(cfg, tensors, dist.group.WORLD)))
    assert exported.keys() - {"t2d"} == tensors.keys()
    assert all(torch.equal(exported[each], tensors[each]) for each in tensors)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "layers.1.self_attn.k_norm.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is not part of this DSpark draft"),
        (lambda t: t.update({"markov_head.markov_w1.weight": torch.zeros(2, 2)}), "markov_w1.weight has shape"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(32, 16)}), "lm_head.weight is not part of this DSpark"),
    ],
)
def test_a_wrong_tensor_is_named(change, says):
    cfg = SHAPES["dspark"]
    tensors = make_tensors(cfg)
    draft = make_draft(cfg, tensors, dist.group.WORLD)
    change(tensors)
    with pytest.raises(ValueError, match=says):
        load_block(draft, tensors)


def test_the_confidence_head_stays_float32_beside_bfloat16():
    cfg = SHAPES["dspark"]
    draft = make_draft(cfg, make_tensors(cfg), dist.group.WORLD, dtype=torch.bfloat16)
    wide = {name for name, p in draft.named_parameters() if p.dtype == torch.float32}
    assert wide == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    pack = make_pack(LENGTHS)
    for key in ("taps", "hidden"):
        setattr(pack, key, [x.bfloat16() for x in getattr(pack, key)])
    pack.table_VH, pack.head_VH = pack.table_VH.bfloat16(), pack.head_VH.bfloat16()
    got = run_objective(make_objective(draft), pack, PackedLayout(LENGTHS), DRAW, pack.head_VH)
    got.loss.backward()
    want = dense_loss(cfg, make_tensors(cfg), make_pack(LENGTHS), make_objective(draft), DRAW)
    assert float(got.loss) == pytest.approx(float(want.loss), rel=0.03)
