"""The chunked soft cross-entropy against a dense float64 reference, on one process."""

import pytest
import torch

from nemo_ext.losses import draft_shard_of_target_head, soft_cross_entropy
from tests.reference.vocab import overlap, student_log_probabilities, target_ids, teacher_probabilities

ROWS, TEACHERS, HIDDEN, VOCAB, DRAFT_VOCAB = 23, 17, 6, 29, 11


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    weight_N = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    weight_N[::4] = 0
    return {
        "student": normal(ROWS, HIDDEN).requires_grad_(),
        "head": normal(DRAFT_VOCAB, HIDDEN).requires_grad_(),
        "teacher": normal(TEACHERS, HIDDEN + 1),
        "teacher_head": normal(VOCAB, HIDDEN + 1),
        "rows": torch.randint(TEACHERS, (ROWS,), generator=generator),
        "weight": weight_N,
        "ids": ids,
        "d2t": ids - torch.arange(DRAFT_VOCAB),
    }


def dense(case, temperature):
    z_NV = (case["teacher"] @ case["teacher_head"].T)[case["rows"]]
    y_NU = case["student"] @ case["head"].T
    q_NU = teacher_probabilities(z_NV, case["d2t"], temperature)
    ce_N = -(q_NU * student_log_probabilities(y_NU, temperature)).sum(-1)
    return (case["weight"] * ce_N).sum(), ce_N.detach(), overlap(y_NU, z_NV, case["d2t"], temperature), y_NU, z_NV


def run(case, temperature, chunk_rows):
    logz_E = torch.logsumexp(case["teacher"] @ case["teacher_head"].T / temperature, -1)
    return soft_cross_entropy(
        case["student"],
        case["head"],
        case["teacher"],
        draft_shard_of_target_head(case["teacher_head"], case["ids"], VOCAB, None),
        case["rows"],
        case["weight"],
        temperature=temperature,
        teacher_logz_E=logz_E,
        chunk_rows=chunk_rows,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
def test_loss_gradients_and_acceptance_equal_dense(case, temperature, chunk_rows):
    want, ce_N, accept_N, y_NU, z_NV = dense(case, temperature)
    want_grads = torch.autograd.grad(want, (case["student"], case["head"]))
    got = run(case, temperature, chunk_rows)
    grads = torch.autograd.grad(3.0 * got.loss, (case["student"], case["head"]))
    seen = case["weight"] > 0
    torch.testing.assert_close(got.loss, want, rtol=0, atol=1e-10)
    for grad, want_grad in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, 3.0 * want_grad, rtol=0, atol=1e-10)
    torch.testing.assert_close(got.cross_entropy_N, torch.where(seen, ce_N, 0), rtol=0, atol=1e-10)
    torch.testing.assert_close(got.acceptance_N, torch.where(seen, accept_N, 0), rtol=0, atol=1e-10)
    best_N = target_ids(case["d2t"], VOCAB)[y_NU.argmax(-1)]
    greedy_N = torch.softmax(z_NV / temperature, -1).gather(-1, best_N[:, None]).squeeze(-1)
    torch.testing.assert_close(got.greedy_acceptance_N, torch.where(seen, greedy_N, 0), rtol=0, atol=1e-10)


def test_teacher_gets_no_gradient_and_no_weight_gives_a_connected_zero(case):
    case["teacher"].requires_grad_()
    case["weight"].zero_()
    got = run(case, 1.0, 8)
    student, head, teacher = torch.autograd.grad(
        got.loss, (case["student"], case["head"], case["teacher"]), allow_unused=True
    )
    assert got.loss == 0 and teacher is None
    assert not student.any() and not head.any()


def test_inference_computes_no_gradient(case):
    with torch.no_grad():
        got = run(case, 1.0, 8)
    torch.testing.assert_close(got.loss, dense(case, 1.0)[0].detach(), rtol=0, atol=1e-10)
    assert not got.loss.requires_grad
