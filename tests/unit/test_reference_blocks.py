"""Self-checks of the DFlash and DSpark reference: Qwen3 itself, what may not leak, labels and losses by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.reference.block_losses import (
    BlockTargets,
    block_targets,
    decay_gamma,
    dense_dflash_loss,
    dense_dspark_loss,
    dspark_metrics,
    slot_weights,
)
from tests.reference.blocks import dense_dflash, dense_dspark_heads, dspark_greedy_draft, head_logits

torch.set_num_threads(1)

SEQ_LENS = [5, 8]
T, H, TAPS, R, V, LAYERS, ROWS = sum(SEQ_LENS), 10, 2, 3, 9, 2, 4
CFG = {
    "num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope_theta": 100.0, "rms_norm_eps": 1e-5,
    "windows": [None, None], "causal": [False, False],
}  # fmt: skip


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def weights():
    A, G, D = CFG["num_heads"], CFG["num_kv_heads"], CFG["head_dim"]
    shapes, norms = {"fc": (H, TAPS * H)}, {"hidden_norm": H, "norm": H}
    for index in range(LAYERS):
        prefix = f"layers.{index}"
        shapes |= {f"{prefix}.self_attn.q_proj": (A * D, H), f"{prefix}.self_attn.o_proj": (H, A * D)}
        shapes |= {f"{prefix}.self_attn.{name}_proj": (G * D, H) for name in "kv"}
        shapes |= {f"{prefix}.mlp.gate_proj": (12, H), f"{prefix}.mlp.up_proj": (12, H)}
        shapes |= {f"{prefix}.mlp.down_proj": (H, 12)}
        norms |= {f"{prefix}.{name}": H for name in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"{prefix}.self_attn.{name}_norm": D for name in "qk"}
    made = {f"{name}.weight": 0.4 * normal(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    return made | {f"{n}.weight": 1 + 0.3 * normal(size, seed=99 + i) for i, (n, size) in enumerate(norms.items())}


@pytest.fixture
def heads():
    return {
        "markov_head.markov_w1.weight": normal(V, R, seed=301),
        "markov_head.markov_w2.weight": normal(V, R, seed=302),
        "confidence_head.proj.weight": normal(1, H + R, seed=303),
        "confidence_head.proj.bias": normal(1, seed=304),
    }


@pytest.fixture
def pack():
    """taps, embeddings, mask embedding"""
    return normal(T, TAPS * H, seed=201), normal(T, H, seed=202), normal(H, seed=203)


@pytest.fixture
def scored():
    """Student logits and confidence of three blocks of four slots, teacher, targets with masked tails."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    targets = BlockTargets(mask, torch.arange(12).reshape(3, 4) % V, torch.arange(12).reshape(3, 4) % V,
                           torch.arange(12).reshape(3, 4))  # fmt: skip
    return normal(3, 4, V, seed=401), normal(3, 4, seed=402), normal(T, V, seed=403), targets


@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, 2)])
def test_a_block_at_the_start_is_qwen3(weights, pack, causal, window):
    """At anchor 0 there is no trunk: the block is a Qwen3 decoder over its rows."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=4, hidden_size=H, intermediate_size=12, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-5, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )  # fmt: skip
    model = transformers.Qwen3Model(config).double()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["embed_tokens.weight"] and sorted(unexpected) == ["fc.weight", "hidden_norm.weight"]
    taps, embeddings, mask_embedding = pack
    rows = torch.stack([embeddings[5]] + [mask_embedding] * (ROWS - 1))
    distance = torch.arange(ROWS)[:, None] - torch.arange(ROWS)[None]
    visible = (distance >= 0) & (distance < (window or ROWS)) if causal else torch.ones_like(distance).bool()
    bias = torch.zeros(1, 1, ROWS, ROWS, dtype=torch.float64).masked_fill(~visible, float("-inf"))
    expected = model(inputs_embeds=rows[None], attention_mask={"full_attention": bias}).last_hidden_state
    cfg = CFG | {"windows": [window] * LAYERS, "causal": [causal] * LAYERS}
    hidden = dense_dflash(weights, cfg, taps, embeddings, mask_embedding, SEQ_LENS, [1], [0], ROWS)
    # Qwen3 keeps its cosines in float32.
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-6)


def test_trunk_keys_by_formula(weights, pack):
    """One layer, one row, anchor 2: the row sees the trunk rows at positions 0 and 1, and itself at position 2."""
    taps, embeddings, mask_embedding = pack
    cfg = CFG | {"num_layers": 1}
    hidden = dense_dflash(weights, cfg, taps, embeddings, mask_embedding, SEQ_LENS, [1], [2], 1)[0, 0]
    w = {name.removeprefix("layers.0.").removesuffix(".weight"): tensor for name, tensor in weights.items()}

    def normed(x, name):
        return F.rms_norm(x, x.shape[-1:], w[name], 1e-5)

    def turned(x, position):
        angle = position * torch.tensor([100.0 ** (-2 * k / 6) for k in range(3)]).double()
        pairs = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    first, second = (normed(w["fc"] @ taps[row], "hidden_norm") for row in (5, 6))
    own = normed(embeddings[7], "input_layernorm")
    q = turned(normed((w["self_attn.q_proj"] @ own).reshape(4, 6), "self_attn.q_norm"), 2)
    keys, values = [], []
    for x, position in ((first, 0), (second, 1), (own, 2)):
        keys.append(turned(normed((w["self_attn.k_proj"] @ x).reshape(2, 6), "self_attn.k_norm"), position))
        values.append((w["self_attn.v_proj"] @ x).reshape(2, 6))
    k, v = (torch.stack(x, dim=1).repeat_interleave(2, dim=0) for x in (keys, values))
    out = F.scaled_dot_product_attention(q[:, None], k, v)[:, 0]
    r = embeddings[7] + w["self_attn.o_proj"] @ out.flatten()
    u = normed(r, "post_attention_layernorm")
    r = r + w["mlp.down_proj"] @ (F.silu(w["mlp.gate_proj"] @ u) * (w["mlp.up_proj"] @ u))
    torch.testing.assert_close(hidden, normed(r, "norm"))


def test_a_block_depends_on_what_serving_has(weights, pack):
    taps, embeddings, mask_embedding = (x.requires_grad_() for x in pack)
    hidden = dense_dflash(weights, CFG, taps, embeddings, mask_embedding, SEQ_LENS, [1], [3], ROWS)
    tap_grad, embedding_grad = torch.autograd.grad(hidden[0, 2].square().sum(), (taps, embeddings))
    assert tap_grad.any(dim=1).nonzero().flatten().tolist() == [5, 6, 7]
    assert embedding_grad.any(dim=1).nonzero().flatten().tolist() == [8]


def test_each_layer_has_its_own_window_and_direction(weights, pack):
    """Window 2 in both layers: row 3 reaches no trunk row through two layers; a full second layer reaches all three."""
    taps, embeddings, mask_embedding = pack
    taps.requires_grad_(), mask_embedding.requires_grad_()
    reached, looks_ahead = [], []
    for windows, causal in (([2, 2], [True, True]), ([2, None], [True, False])):
        cfg = CFG | {"windows": windows, "causal": causal}
        hidden = dense_dflash(weights, cfg, taps, embeddings, mask_embedding, [T], [0], [3], ROWS)
        grad = torch.autograd.grad(hidden[0, 3].square().sum(), taps, retain_graph=True)[0]
        reached.append(grad.any(dim=1).nonzero().flatten().tolist())
        looks_ahead.append(bool(torch.autograd.grad(hidden[0, 0].square().sum(), mask_embedding)[0].any()))
    assert reached == [[], [0, 1, 2]] and looks_ahead == [False, True]


def test_every_weight_learns(weights, heads, pack):
    weights = {name: tensor.requires_grad_() for name, tensor in (weights | heads).items()}
    sequences, positions = [0, 1, 1], [3, 0, 5]
    ids, head = torch.arange(T) % V, normal(V, H, seed=9)
    hidden = dense_dflash(weights, CFG, *pack, SEQ_LENS, sequences, positions, ROWS)
    targets = block_targets(ids, torch.ones(T), SEQ_LENS, sequences, positions, ROWS)
    logits, confidence = dense_dspark_heads(weights, hidden, targets.previous_ids, head)
    dense_dspark_loss(logits, confidence, normal(T, V, seed=10), targets)[0].backward()
    assert all(bool(tensor.grad.abs().sum() > 0) for tensor in weights.values())


def test_no_blocks_is_a_connected_zero(weights, pack):
    fc = weights["fc.weight"].requires_grad_()
    hidden = dense_dflash(weights, CFG, *pack, SEQ_LENS, [], [], ROWS)
    assert hidden.shape == (0, ROWS, H)
    targets = block_targets(torch.arange(T), torch.ones(T), SEQ_LENS, [], [], ROWS)
    loss, _, counts = dense_dflash_loss(head_logits(hidden, normal(V, H)), normal(T, V), targets)
    loss.backward()
    assert loss.item() == 0.0 and counts.tolist() == [0.0] * ROWS and fc.grad.abs().sum() == 0.0


def test_block_targets_by_hand():
    """Second document: ids 20..27, token 4 is a hole; the first block ends at it, the second at the document's end."""
    ids = torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23, 24, 25, 26, 27])
    mask = torch.ones(T)
    mask[5 + 4] = 0
    targets = block_targets(ids, mask, SEQ_LENS, [1, 1, 0], [1, 5, 2], 4, anchor_valid=[True, True, False])
    assert targets.mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert targets.label_ids[:2, :2].tolist() == [[22, 23], [26, 27]]
    assert targets.previous_ids[:2, :2].tolist() == [[21, 22], [25, 26]]
    assert targets.teacher_rows[:2, :2].tolist() == [[6, 7], [10, 11]]


def test_slot_weights_by_hand():
    assert [decay_gamma(size) for size in (4, 8, 9, 10, 13, 16, 32)] == [4.0, 4.0, 4.5, 5.0, 6.0, 7.0, 7.0]
    assert slot_weights(3, 4.0).tolist() == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])
    assert slot_weights(2).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_dflash_loss_by_loop(scored, temperature):
    logits, _, teacher, targets = scored
    weights, denominators = slot_weights(4, 5.0), [7, 5, 3, 2]
    soft = hard = 0.0
    for n, s in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)):
        row, target = logits[n, s] / temperature, teacher[4 * n + s] / temperature
        soft = soft + weights[s] * F.cross_entropy(row, target.softmax(0))
        hard = hard + weights[s] * F.cross_entropy(row, targets.label_ids[n, s])
    total = sum(w * d for w, d in zip(weights.tolist(), denominators, strict=True))
    arguments = {"weights_S": weights, "temperature": temperature, "denominators_S": denominators}
    torch.testing.assert_close(dense_dflash_loss(logits, teacher, targets, **arguments)[0], soft / total)
    torch.testing.assert_close(dense_dflash_loss(logits, teacher, targets, hard=True, **arguments)[0], hard / total)


def test_losses_over_a_reduced_vocabulary(scored):
    """Draft vocabulary {1, 2, 6}: the soft target is renormalised over it, a label outside costs nothing."""
    logits, _, teacher, targets = scored
    logits, d2t, kept = logits[..., :3], torch.tensor([1, 1, 4]), [1, 2, 6]
    _, soft, counts = dense_dflash_loss(logits, teacher, targets, d2t_U=d2t)
    expected = [F.cross_entropy(logits[n, 0], teacher[4 * n][kept].softmax(0)) for n in (0, 1)]
    torch.testing.assert_close(soft[0], sum(expected))
    # Labels are 0, 1, 2, 3 in the first block and 4, 5 in the second.
    _, hard, hard_counts = dense_dflash_loss(logits, teacher, targets, d2t_U=d2t, hard=True)
    log_p = logits[0].log_softmax(-1)
    torch.testing.assert_close(
        hard, torch.stack([torch.zeros_like(log_p[0, 0]), -log_p[1, 0], -log_p[2, 1], hard[0] * 0])
    )
    assert counts.tolist() == hard_counts.tolist() == [2, 2, 1, 1]


def test_dspark_heads_by_hand(heads):
    hidden, head, previous = normal(2, 3, H, seed=1), normal(V, H, seed=2), torch.tensor([[0, 1, 2], [8, 7, 6]])
    logits, confidence = dense_dspark_heads(heads, hidden, previous, head)
    markov = heads["markov_head.markov_w1.weight"][7]
    torch.testing.assert_close(logits[1, 1], head @ hidden[1, 1] + heads["markov_head.markov_w2.weight"] @ markov)
    weight, bias = heads["confidence_head.proj.weight"][0], heads["confidence_head.proj.bias"][0]
    torch.testing.assert_close(confidence[1, 1], weight[:H] @ hidden[1, 1] + weight[H:] @ markov + bias)
    no_markov = heads | {"confidence_head.proj.weight": weight[None, :H]}
    confidence = dense_dspark_heads(no_markov, hidden, previous, head, confidence_with_markov=False)[1]
    torch.testing.assert_close(confidence[1, 1], weight[:H] @ hidden[1, 1] + bias)


def test_greedy_draft_is_its_own_teacher_forcing(heads):
    hidden, head = normal(4, H, seed=1), normal(V, H, seed=2)
    drafted = dspark_greedy_draft(heads, hidden, 5, head)
    logits, _ = dense_dspark_heads(heads, hidden[None], torch.tensor([[5, *drafted[:-1]]]), head)
    assert logits[0].argmax(-1).tolist() == drafted
    parallel, _ = dense_dspark_heads(heads, hidden[None], torch.tensor([[5] * 4]), head)
    assert parallel[0].argmax(-1).tolist() != drafted
    reduced = heads | {"markov_head.markov_w2.weight": heads["markov_head.markov_w2.weight"][[1, 2, 6]]}
    drafted = dspark_greedy_draft(reduced, hidden, 5, head[[1, 2, 6]], torch.tensor([1, 1, 4]))
    logits, _ = dense_dspark_heads(reduced, hidden[None], torch.tensor([[5, *drafted[:-1]]]), head[[1, 2, 6]])
    assert [[1, 2, 6][best] for best in logits[0].argmax(-1)] == drafted


def test_dspark_loss_by_loop(scored):
    logits, confidence, teacher, targets = scored
    expected = total = 0.0
    for n, s in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)):
        p, q = logits[n, s].softmax(0), teacher[4 * n + s].softmax(0)
        acceptance = torch.minimum(p, q).sum()
        bce = F.binary_cross_entropy_with_logits(confidence[n, s], acceptance)
        row = -0.1 * p[targets.label_ids[n, s]].log() + 0.9 * (p - q).abs().sum() + bce
        expected, total = expected + math.exp(-s / 4) * row, total + math.exp(-s / 4)
    loss, terms, counts = dense_dspark_loss(logits, confidence, teacher, targets)
    torch.testing.assert_close(loss, expected / total)
    assert counts.tolist() == [2, 2, 1, 1] and set(terms) == {"ce", "tv", "confidence"}
    torch.testing.assert_close(dense_dspark_loss(logits, confidence, teacher, targets, temperature=0.7)[0],
                               dense_dspark_loss(logits / 0.7, confidence, teacher / 0.7, targets)[0])  # fmt: skip


def test_tv_gradient_by_formula(scored):
    logits, confidence, teacher, targets = scored
    logits.requires_grad_()
    dense_dspark_loss(logits, None, teacher, targets, ce_alpha=0.0, tv_alpha=1.0, denominators_S=[1, 0, 0, 0])[
        0
    ].backward()
    p, q = logits[0, 2].softmax(0).detach(), teacher[2].softmax(0)
    sigma = (p - q).sign()
    torch.testing.assert_close(logits.grad[0, 2], math.exp(-0.5) * p * (sigma - (sigma * p).sum()))


def test_confidence_does_not_train_the_backbone_through_its_target(scored):
    logits, confidence, teacher, targets = scored
    logits.requires_grad_(), confidence.requires_grad_()
    dense_dspark_loss(logits, confidence, teacher, targets, ce_alpha=0.0, tv_alpha=0.0)[0].backward()
    assert logits.grad.abs().sum() == 0.0 and bool((confidence.grad[targets.mask] != 0).all())


def test_metrics_by_hand():
    """Vocabulary of two; acceptance 0.9 and 0.5 in the first block, 0.7 then a masked slot in the second."""
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]).double()
    p = torch.tensor([[[0.6, 0.4], [1.0, 1e-300]], [[0.2, 0.8], [0.3, 0.7]]]).double()
    rows = torch.tensor([[0, 1], [2, 3]])
    targets = BlockTargets(torch.tensor([[1, 1], [1, 0]]).bool(), rows * 0, rows * 0, rows)
    confidence = torch.zeros(2, 2).double()
    metrics = dspark_metrics(p.log(), confidence, q.log(), targets)
    assert metrics["accept_rate"].tolist() == pytest.approx([0.8, 0.5])
    assert metrics["accept_rate_full_mass"].tolist() == pytest.approx([0.8, 0.5])
    assert metrics["greedy_accept_rate"].tolist() == pytest.approx([0.5, 0.5])
    assert float(metrics["tau"]) == pytest.approx(1 + ((0.9 + 0.9 * 0.5) + 0.7) / 2)
    w = math.exp(-0.25)
    assert float(metrics["confidence_bias"]) == pytest.approx((-0.4 - 0.2 + 0.0 * w) / (2 + w))
    assert float(metrics["confidence_abs_error"]) == pytest.approx((0.4 + 0.2 + 0.0 * w) / (2 + w))
    assert float(metrics["confidence_cumprod_bias"]) == pytest.approx((-0.4 - 0.2 + w * (0.25 - 0.45)) / (2 + w))


def test_metrics_over_a_reduced_vocabulary():
    """Draft vocabulary {0, 2} of 3 with target mass 0.3 and 0.2: renormalised 0.6 and 0.4."""
    q, p = torch.tensor([[0.3, 0.5, 0.2]]).double(), torch.tensor([[[0.1, 0.9]]]).double()
    zero = torch.zeros(1, 1, dtype=torch.long)
    targets = BlockTargets(zero == 0, zero, zero, zero)
    metrics = dspark_metrics(p.log(), None, q.log(), targets, d2t_U=torch.tensor([0, 1]))
    assert metrics["accept_rate"].item() == pytest.approx(0.1 + 0.4)
    assert metrics["accept_rate_full_mass"].item() == pytest.approx(0.1 + 0.2)
    assert metrics["greedy_accept_rate"].item() == pytest.approx(0.2)


def test_head_transforms_by_hand():
    hidden, head = torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[3.0, -1.0]]).double()
    assert head_logits(hidden, head).item() == pytest.approx(1.0)
    assert head_logits(hidden, head, multiplier=0.5, softcap=2.0).item() == pytest.approx(0.5 * 2 * math.tanh(0.5))
