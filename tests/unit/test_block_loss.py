"""The chunked loss of block drafts against dense autograd, on one process, and the benchmark of the two."""

import json

import pytest
import torch
import torch.nn.functional as F

from nemo_ext.config import ConfigError
from nemo_ext.losses import LogitTransform, LossTerms, Teacher, bench, block_loss, slot_weights
from nemo_ext.losses import measure as loss_measure
from tests.reference.block_losses import decay_gamma

ROWS, TEACHERS, HIDDEN, RANK, VOCAB = 23, 17, 6, 4, 29
TERMS = [LossTerms(), LossTerms(hard_labels=True), LossTerms(0.1, 0.9, True), LossTerms(0.5, 0.9), LossTerms(0.0, 1.0)]


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight_N = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    weight_N[::4] = 0
    labels_N = torch.randint(VOCAB, (ROWS,), generator=generator)
    labels_N[5] = -1
    return {
        "student": normal(ROWS, HIDDEN).requires_grad_(),
        "head": normal(VOCAB, HIDDEN).requires_grad_(),
        "markov": normal(ROWS, RANK).requires_grad_(),
        "markov_head": normal(VOCAB, RANK).requires_grad_(),
        "teacher": normal(TEACHERS, HIDDEN + 1).requires_grad_(),
        "teacher_head": normal(VOCAB, HIDDEN + 1).requires_grad_(),
        "rows": torch.randint(TEACHERS, (ROWS,), generator=generator),
        "labels": labels_N,
        "weight": weight_N,
    }


def dense(case, terms):
    y_NV = 0.8 * (case["student"] @ case["head"].T + case["markov"] @ case["markov_head"].T) / 0.7
    z_EV = (case["teacher"] @ case["teacher_head"].T).detach()
    q_NV = (1.1 * 3.0 * torch.tanh(z_EV / 3.0) / 0.7).softmax(-1)[case["rows"]]
    soft_N, p_NV = F.cross_entropy(y_NV, q_NV, reduction="none"), y_NV.softmax(-1)
    hard_N = F.cross_entropy(y_NV, case["labels"], reduction="none", ignore_index=-1)
    l1_N = (p_NV - q_NV).abs().sum(-1)
    row_N = terms.cross_entropy * (hard_N if terms.hard_labels else soft_N) + terms.total_variation * l1_N
    greedy_N = q_NV.gather(-1, p_NV.argmax(-1, keepdim=True)).squeeze(-1)
    figures = (hard_N if terms.hard_labels else soft_N, l1_N, torch.minimum(p_NV, q_NV).sum(-1), greedy_N)
    return (case["weight"] * row_N).sum(), [x.detach() for x in figures]


def run(case, terms, chunk_rows):
    teacher = Teacher(
        case["teacher"].detach(), case["teacher_head"].detach(), case["rows"], case["labels"], LogitTransform(1.1, 3.0)
    )
    return block_loss(
        case["student"], case["head"], teacher, case["weight"], terms, markov_NR=case["markov"],
        markov_head_UR=case["markov_head"], logit_scale=0.8, temperature=0.7, chunk_rows=chunk_rows,
    )  # fmt: skip


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
def test_loss_gradients_and_figures_equal_dense(case, terms, chunk_rows):
    leaves = [case[name] for name in ("student", "head", "markov", "markov_head")]
    want, (ce_N, l1_N, overlap_N, greedy_N) = dense(case, terms)
    wanted = torch.autograd.grad(want, leaves)
    got = run(case, terms, chunk_rows)
    grads = torch.autograd.grad(3.0 * got.loss, leaves)
    torch.testing.assert_close(got.loss, want, rtol=0, atol=1e-10)
    for grad, want_grad in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, 3.0 * want_grad, rtol=0, atol=1e-10)
    seen = case["weight"] > 0
    for figure, want_figure in (
        (got.cross_entropy_N, ce_N), (got.total_variation_N, l1_N), (got.overlap_N, overlap_N),
        (got.acceptance_N, overlap_N), (got.greedy_acceptance_N, greedy_N),
    ):  # fmt: skip
        torch.testing.assert_close(figure, torch.where(seen, want_figure, 0), rtol=0, atol=1e-10)


def test_a_frozen_head_gets_no_gradient_and_no_weight_gives_connected_zeros(case):
    case["head"].requires_grad_(False)
    case["weight"].zero_()
    got = run(case, TERMS[2], 8)
    got.loss.backward()
    assert got.loss == 0 and case["head"].grad is None and case["teacher"].grad is None
    assert all(not case[name].grad.any() for name in ("student", "markov", "markov_head"))


def test_inference_computes_no_gradient(case):
    with torch.no_grad():
        got = run(case, TERMS[2], 8)
    torch.testing.assert_close(got.loss, dense(case, TERMS[2])[0].detach(), rtol=0, atol=1e-10)
    assert not got.loss.requires_grad


@pytest.mark.parametrize("gamma", [1, 3, 7, 8, 9, 12, 15, 31])
def test_slot_weights_decay_by_block_size(gamma):
    decay = torch.tensor(decay_gamma(gamma + 1))
    want = torch.exp(-torch.arange(gamma) / decay)
    torch.testing.assert_close(torch.tensor(slot_weights("dflash", gamma, "exp")), want)
    torch.testing.assert_close(
        torch.tensor(slot_weights("dspark", gamma, "exp")), torch.exp(-torch.arange(gamma) / 4.0)
    )
    assert slot_weights("dflash", gamma, "uniform") == slot_weights("dspark", gamma, "uniform") == [1.0] * gamma


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_benchmarks_forms_are_the_same_loss(kind):
    work = loss_measure.Work(kind, rows=50, vocab=300, hidden=16, markov_rank=8, chunk_rows=7)
    found = [loss_measure.measure(work, form, threads=1) for form in ("chunked", "one_chunk", "dense")]
    assert [m.loss for m in found] == pytest.approx([found[0].loss] * 3, rel=1e-5)
    assert [m.gradient_norm for m in found] == pytest.approx([found[0].gradient_norm] * 3, rel=1e-5)


def test_the_benchmark_prints_json(capsys, monkeypatch):
    monkeypatch.setattr(bench, "_alone", lambda work, form, threads: loss_measure.Measure(
        work.rows * 1.0, work.rows * 0.5, work.rows * (10 if form == "dense" else 1) + 1000, 2.0, 3.0
    ))  # fmt: skip
    assert bench.main(["--rows", "80", "--dense-rows", "20", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["memory"] == {
        "goal": 0.125, "ratio": 1080 / 1800, "chunked_bytes": 1080, "dense_bytes": 1800, "dense_extrapolated": True
    }  # fmt: skip
    assert figures["time"]["ratio"] == 1.0 and figures["same"] == {"loss": 0.0, "gradient_norm": 0.0}
    assert bench.main(["--rows", "80", "--dense-rows", "80"]) == 0
    assert "(measured)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rows", "0"], "--rows is 0; use 1 or more"),
        (["--dense-rows", "9000"], "--dense-rows is 9000; use 2 to --rows 8192"),
        (["--markov-rank", "8"], "--markov-rank is 8, which dflash does not have"),
        (["--draft", "eagle"], "invalid choice: 'eagle'"),
    ],
)
def test_arguments_that_cannot_be_run_are_told(argv, says):
    with pytest.raises(ConfigError, match=says):
        bench.main(argv)
