"""Self-checks of the EAGLE-3 reference: what serving would compute, what may not leak, losses by hand."""

import math

import pytest
import torch

from tests.reference.eagle3 import dense_eagle3_ttt, dense_soft_ce_loss, supervised_rows
from tests.reference.layers import rms_norm, rope
from tests.reference.vocab import draft_ids, overlap, target_ids

torch.set_num_threads(1)

L, H, TAPS, V, U, PASSES, LAYERS = 7, 8, 2, 11, 5, 4, 2
CFG = {
    "num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope_theta": 100.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
FLAGS = [
    {},
    {"norm_output": True},
    {"norm_before_residual": True},
    {"fc_norm": True},
    {"norm_before_fc": True},
    {"norm_output": True, "norm_before_residual": True, "fc_norm": True},
]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def weights():
    A, G, D = CFG["num_heads"], CFG["num_kv_heads"], CFG["head_dim"]
    shapes = {"fc": (H, TAPS * H), "lm_head": (U, H)}
    norms = {"norm": H, "input_norm": TAPS * H, "fc_norm.0": H, "fc_norm.1": H}
    for index in range(LAYERS):
        prefix = "midlayer" if index == 0 else f"layers.{index}"
        width = 2 * H if index == 0 else H
        shapes |= {f"{prefix}.self_attn.q_proj": (A * D, width), f"{prefix}.self_attn.o_proj": (H, A * D)}
        shapes |= {f"{prefix}.self_attn.{name}_proj": (G * D, width) for name in "kv"}
        shapes |= {f"{prefix}.mlp.gate_proj": (12, H), f"{prefix}.mlp.up_proj": (12, H)}
        shapes |= {f"{prefix}.mlp.down_proj": (H, 12)}
        norms |= {f"{prefix}.{name}": H for name in ("input_layernorm", "post_attention_layernorm")}
    norms["midlayer.hidden_norm"] = H
    made = {f"{name}.weight": 0.4 * normal(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    return made | {f"{n}.weight": 1 + 0.3 * normal(size, seed=99 + i) for i, (n, size) in enumerate(norms.items())}


@pytest.fixture
def document():
    return normal(L, TAPS * H, seed=201), normal(L, H, seed=202)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_pass_d_equals_serving(weights, document, flags):
    """Serving prefills rows 0..i on true features, then appends its own output as the next row's feature. With that
    chain written out as one longer document, pass d of row i is row i + d - 1 of a single causal pass."""
    taps, embeddings = document
    cfg = CFG | flags
    trained = dense_eagle3_ttt(weights, cfg, taps, embeddings, PASSES)
    no_fc = {"fc.weight": torch.eye(H, dtype=torch.float64)}
    plain = {name: flag for name, flag in cfg.items() if name not in ("fc_norm", "norm_before_fc")}
    norms = [name for name in ("norm_before_fc", "fc_norm") if flags.get(name)]
    features = taps
    if "norm_before_fc" in norms:
        features = rms_norm(features, weights["input_norm.weight"], 1e-5)
    if "fc_norm" in norms:
        halves = features.split(H, dim=1)
        features = torch.cat(
            [rms_norm(half, weights[f"fc_norm.{n}.weight"], 1e-5) for n, half in enumerate(halves)], dim=1
        )
    features = features @ weights["fc.weight"].T
    for i in range(L - 2):
        chain = features[: i + 1]
        for d in range(1, min(PASSES, L - 2 - i) + 1):
            padded = torch.cat([chain, chain[:1]])
            (hidden, logits) = dense_eagle3_ttt(weights | no_fc, plain, padded, embeddings[: i + d + 1], 1)[0]
            torch.testing.assert_close(trained[d - 1][0][i], hidden[i + d - 1])
            torch.testing.assert_close(trained[d - 1][1][i], logits[i + d - 1])
            fed = rms_norm(hidden, weights["norm.weight"], 1e-5) if flags.get("norm_output") else hidden
            chain = torch.cat([chain, fed[i + d - 1 : i + d]])


def test_a_row_depends_on_its_past_only(weights, document):
    taps, embeddings = (x.requires_grad_() for x in document)
    i, d = 2, 3
    hidden, _ = dense_eagle3_ttt(weights, CFG, taps, embeddings, d)[d - 1]
    tap_grad, embedding_grad = torch.autograd.grad(hidden[i].square().sum(), (taps, embeddings))
    assert [bool(row.any()) for row in tap_grad] == [True] * 3 + [False] * 4
    # Row j pairs with token j + 1, so the first token is never read.
    assert [bool(row.any()) for row in embedding_grad] == [False] + [True] * 5 + [False]


def test_every_weight_learns_through_all_passes(weights, document):
    weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    cfg = CFG | {"fc_norm": True, "norm_before_fc": True}
    results = dense_eagle3_ttt(weights, cfg, *document, PASSES)
    loss, _, counts = dense_soft_ce_loss(
        [logits for _, logits in results], normal(L, V, seed=5), torch.tensor([0, 1, 1, 3, 6]), torch.ones(L)
    )
    loss.backward()
    assert counts.tolist() == [L - d - 1 for d in range(1, PASSES + 1)]
    assert all(bool(tensor.grad.abs().sum() > 0) for tensor in weights.values())


def test_supervised_rows_by_hand():
    mask = torch.tensor([0, 0, 1, 0, 1])
    assert supervised_rows(mask, 3).int().tolist() == [[1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]


def test_supervised_rows_outside_the_draft_vocabulary():
    teacher = torch.zeros(5, 4)
    teacher[range(5), [0, 1, 2, 3, 0]] = 1.0
    # Draft vocabulary {1, 3}: the teacher's best token is in it at rows 1 and 3, which rows 0 and 2 learn from.
    supervised = supervised_rows(
        torch.ones(5), 1, teacher_LV=teacher, d2t_U=torch.tensor([1, 2]), mask_out_of_draft_vocab=True
    )
    assert supervised.int().tolist() == [[1, 0, 1, 0, 0]]


def test_loss_by_hand():
    """Three tokens, two passes, draft vocabulary {0, 2} of 3: only row 0 of pass 1 counts, and its teacher is row 1."""
    teacher = torch.tensor([[9.0, 9.0, 9.0], [math.log(3.0), 50.0, 0.0], [9.0, 9.0, 9.0]]).double()
    student = torch.full((3, 2), 7.0).double()
    student[0] = torch.tensor([0.0, math.log(4.0)])
    loss, numerators, counts = dense_soft_ce_loss(
        [student, student], teacher, torch.tensor([0, 1]), torch.ones(3), pass_weights=[2.0, 1.0], denominators=[5, 3]
    )
    expected = 0.75 * math.log(5.0) + 0.25 * math.log(5.0 / 4.0)
    assert numerators.tolist() == pytest.approx([expected, 0.0])
    assert counts.tolist() == [1.0, 0.0]
    assert float(loss) == pytest.approx(2.0 * expected / (2.0 * 5 + 1.0 * 3))


def test_temperature_divides_both_sides():
    y, z, mask = normal(L, V, seed=7), normal(L, V, seed=8), torch.ones(L)
    warm = dense_soft_ce_loss([y], z, None, mask, temperature=0.7)[0]
    torch.testing.assert_close(warm, dense_soft_ce_loss([y / 0.7], z / 0.7, None, mask)[0])
    assert float(warm) != float(dense_soft_ce_loss([y], z / 0.7, None, mask)[0])


def test_loss_gradient_is_student_minus_teacher():
    y, z = normal(L, V, seed=7).requires_grad_(), normal(L, V, seed=8).requires_grad_()
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1])
    dense_soft_ce_loss([y], z, None, mask)[0].backward()
    m = torch.tensor([0, 1, 0, 1, 1, 0, 0]).double()[:, None]
    torch.testing.assert_close(y.grad, m * (y.softmax(-1) - z.roll(-1, 0).softmax(-1)).detach() / 3)
    assert z.grad is None


def test_nothing_supervised_is_a_connected_zero():
    y = normal(2, V, seed=7).requires_grad_()
    loss, _, counts = dense_soft_ce_loss([y, y], normal(2, V), None, torch.ones(2))
    loss.backward()
    assert loss.item() == 0.0 and counts.tolist() == [0.0, 0.0] and y.grad.abs().sum() == 0.0


def test_rope_is_a_rotation_by_position():
    x = normal(3, 2, 6, seed=1)
    position = torch.tensor([0, 1, 5])
    turned = rope(x, position, {"rope_theta": 100.0})
    angle = position[:, None].double() * torch.tensor([100.0 ** (-2 * k / 6) for k in range(3)]).double()
    complex_pairs = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(turned, torch.cat([complex_pairs.real, complex_pairs.imag], dim=-1))
    served = rope(x, position, {"inv_freq": torch.tensor([100.0 ** (-2 * k / 6) for k in range(3)])})
    assert 0 < float((served - turned).abs().max()) < 1e-5 and served.dtype == torch.float64


def test_rms_norm_is_torch_s():
    x, weight = normal(4, 6), normal(6, seed=3)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), torch.nn.functional.rms_norm(x, (6,), weight, 1e-3))


def test_draft_vocabulary_maps():
    d2t = torch.tensor([1, 1, 4])
    assert target_ids(d2t, 8).tolist() == [1, 2, 6]
    assert draft_ids(torch.tensor([0, 1, 2, 6, 7]), d2t, 8).tolist() == [-1, 0, 1, 2, -1]
    # Half of the target's mass lies outside the draft vocabulary, so a perfect draft is accepted half the time.
    z = torch.log(torch.tensor([0.5, 0.3, 0.2])).double()
    assert float(overlap(z[1:], z, torch.tensor([1, 1]))) == pytest.approx(0.5)


@pytest.mark.parametrize("before", [False, True])
def test_first_row_by_formula(weights, document, before):
    """Row 0 sees only itself in pass 1, so its attention is its own value, whatever q and k are."""
    taps, embeddings = document
    cfg = CFG | {"num_layers": 1, "norm_before_residual": before}
    hidden, logits = dense_eagle3_ttt(weights, cfg, taps, embeddings, 1)[0]
    w = {name.removeprefix("midlayer.").removesuffix(".weight"): tensor for name, tensor in weights.items()}

    def normed(x, name):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], w[name], 1e-5)

    feature = w["fc"] @ taps[0]
    feature_normed = normed(feature, "hidden_norm")
    v = w["self_attn.v_proj"] @ torch.cat([normed(embeddings[1], "input_layernorm"), feature_normed])
    r = feature_normed if before else feature
    r = r + w["self_attn.o_proj"] @ v.reshape(2, 6).repeat_interleave(2, dim=0).flatten()
    u = normed(r, "post_attention_layernorm")
    g = r + w["mlp.down_proj"] @ (torch.nn.functional.silu(w["mlp.gate_proj"] @ u) * (w["mlp.up_proj"] @ u))
    torch.testing.assert_close(hidden[0], g)
    torch.testing.assert_close(logits[0], w["lm_head"] @ normed(g, "norm"))
