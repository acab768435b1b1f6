"""The EAGLE-3 draft and its objective against the dense float64 reference: loss and every draft gradient."""

import pytest
import torch
import torch.distributed as dist

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_ext.config import ConfigError
from nemo_ext.cotrain import Eagle3Objective, TargetOutputs, draft_metrics
from nemo_ext.drafts.eagle3 import Eagle3Draft
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_hf import export_eagle3, load_eagle3
from nemo_ext.drafts.eagle3_init import init_eagle3
from nemo_ext.drafts.layers import SharedHeadLinear, local_key_heads
from nemo_ext.layout import PackedLayout
from tests.reference.eagle3 import dense_eagle3_ttt, dense_soft_ce_loss

HIDDEN, VOCAB, TAPS, PASSES = 16, 31, (0, 2, 3), 3
LENGTHS = [7, 1, 2, 9, 4]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """Megatron's parallel layers want a process group, also of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_config(**changes):
    settings = dict(
        hidden_size=HIDDEN, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=6, intermediate_size=20, vocab_size=VOCAB,
        draft_vocab_size=VOCAB, tap_layers=TAPS, rope_theta=1000.0, rms_norm_eps=1e-6, max_position_embeddings=64,
    )  # fmt: skip
    return Eagle3Config(**settings | changes)


def make_draft(cfg, seed=0):
    megatron = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, params_dtype=torch.float64, use_cpu_initialization=True
    )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB, generator=generator)[: cfg.draft_vocab_size].sort().values
    tensors = init_eagle3(cfg, seed, ids if cfg.reduced_vocab else None)
    # Norm weights away from one, so that a norm that is skipped or doubled is seen.
    tensors = {
        name: t.double() * (1 + 0.3 * torch.randn(t.shape, generator=generator)) if t.is_floating_point() else t
        for name, t in tensors.items()
    }
    draft = Eagle3Draft(cfg, megatron, dist.group.WORLD)
    load_eagle3(draft, tensors)
    return draft, tensors


def make_pack(layout, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def rows(size):
        return [torch.randn(n, size, generator=generator, dtype=torch.float64) for n in LENGTHS]

    mask = [(torch.rand(n, generator=generator) < 0.7).double() for n in LENGTHS]
    table = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    ids = [torch.randint(VOCAB, (n,), generator=generator) for n in LENGTHS]
    head = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    return {
        "taps": rows(len(TAPS) * HIDDEN),
        "hidden": rows(HIDDEN),
        "mask": mask,
        "ids": ids,
        "table": table,
        "head": head,
    }


def objective_loss(draft, pack, layout, weights, temperature, mask_out, recompute=False):
    objective = Eagle3Objective(
        draft, pass_weights=weights, temperature=temperature, mask_out_of_draft_vocab=mask_out, recompute=recompute,
        chunk_rows=5,
    )  # fmt: skip
    rows_E = objective.halo(layout).rows
    hidden_TH = layout.pack(pack["hidden"])
    target = TargetOutputs(
        taps_TK=layout.pack(pack["taps"]),
        embeds_EH=pack["table"][layout.pack(pack["ids"])[rows_E]],
        hidden_TH=hidden_TH,
        logits_TV=hidden_TH @ pack["head"].T,
        head_VH=pack["head"],
    )
    mask_R = layout.pack(pack["mask"])
    denominator = objective.denominator(objective.count(layout, mask_R))
    return objective.loss(layout, mask_R, target, denominator)


def dense_loss(tensors, cfg, pack, weights, temperature, mask_out):
    """All documents, normalised by the counts over all of them."""
    reference = vars(cfg) | {"num_layers": cfg.num_layers}
    numerators, counts = 0.0, 0.0
    for taps, hidden, mask, ids in zip(pack["taps"], pack["hidden"], pack["mask"], pack["ids"], strict=True):
        passes = dense_eagle3_ttt(tensors, reference, taps, pack["table"][ids], len(weights))
        logits = [y for _, y in passes]
        z = hidden @ pack["head"].T
        args = (logits, z, tensors.get("d2t"), mask, torch.tensor(weights, dtype=torch.float64), temperature)
        _, numerator, _ = dense_soft_ce_loss(*args, mask_out_of_draft_vocab=mask_out)
        _, _, count = dense_soft_ce_loss(*args)
        numerators, counts = numerators + numerator, counts + count
    alpha = torch.tensor(weights, dtype=torch.float64)
    return (alpha * numerators).sum() / (alpha * counts).sum(), numerators, counts


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 2},
        {"draft_vocab_size": 12},
        {"norm_output": True},
        {"norm_before_residual": True},
        {"fc_norm": True, "norm_before_fc": True},
        {"num_layers": 2, "draft_vocab_size": 12, "norm_output": True, "norm_before_residual": True, "fc_norm": True},
    ],
    ids=lambda c: "-".join(c) or "plain",
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("pad_multiple", [1, 4])
def test_loss_and_all_gradients_equal_dense(changes, temperature, pad_multiple):
    cfg = make_config(**changes)
    draft, tensors = make_draft(cfg)
    layout = PackedLayout(LENGTHS, pad_multiple=pad_multiple)
    pack = make_pack(layout)
    weights = [1.0, 0.8, 0.5]
    mask_out = cfg.reduced_vocab
    got = objective_loss(draft, pack, layout, weights, temperature, mask_out)
    got.loss.backward()

    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}
    want, numerators, counts = dense_loss(leaves, cfg, pack, weights, temperature, mask_out)
    want.backward()
    torch.testing.assert_close(got.loss, want, rtol=0, atol=1e-10)
    torch.testing.assert_close(got.cross_entropy_P, numerators.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(got.rows_P, counts.to(got.rows_P), rtol=0, atol=0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(parameter.grad)
    grads = dict(export_eagle3(draft))
    for name, leaf in leaves.items():
        if leaf.is_floating_point():
            torch.testing.assert_close(grads[name], leaf.grad, rtol=0, atol=1e-10, msg=name)


def test_recompute_changes_no_bit():
    cfg = make_config(num_layers=2)
    layout = PackedLayout(LENGTHS)
    pack = make_pack(layout)
    grads = []
    for recompute in (False, True):
        draft, _ = make_draft(cfg)
        objective_loss(draft, pack, layout, [1.0] * PASSES, 1.0, False, recompute).loss.backward()
        grads.append([p.grad for p in draft.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_nothing_supervised_is_a_zero_connected_to_every_parameter():
    draft, _ = make_draft(make_config())
    layout = PackedLayout(LENGTHS)
    pack = make_pack(layout)
    pack["mask"] = [m * 0 for m in pack["mask"]]
    got = objective_loss(draft, pack, layout, [1.0] * PASSES, 1.0, False)
    got.loss.backward()
    assert got.loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in draft.parameters())
    assert draft_metrics(got.sums(), [1.0] * PASSES)["draft_loss"] == 0


def test_export_of_a_load_is_the_same_tensors():
    draft, tensors = make_draft(make_config(draft_vocab_size=12, fc_norm=True, num_layers=2))
    exported = dict(export_eagle3(draft))
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("norm.weight"), "norm.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is not part"),
        (lambda t: t.update({"fc.weight": torch.zeros(2, 2)}), "fc.weight has shape"),
        (lambda t: t.pop("d2t"), "d2t is missing"),
    ],
)
def test_a_wrong_tensor_is_named(change, says):
    draft, tensors = make_draft(make_config(draft_vocab_size=12))
    change(tensors)
    with pytest.raises(ConfigError, match=says):
        load_eagle3(draft, tensors)


def test_config_survives_its_hugging_face_form():
    cfg = make_config(norm_output=True, fc_norm=True, draft_vocab_size=12)
    assert Eagle3Config.from_hf(cfg.to_hf()) == cfg
    assert cfg.to_hf()["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # vLLM counts the same taps from one


class OneOf:
    """A rank of a tensor-parallel group."""

    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


@pytest.mark.parametrize(("heads", "ranks", "local"), [(8, 2, 4), (4, 4, 1), (2, 4, 1), (1, 8, 1)])
def test_a_rank_has_its_key_heads_or_a_shared_one(heads, ranks, local):
    assert local_key_heads(heads, OneOf(0, ranks)) == local


@pytest.mark.parametrize(("query_heads", "heads", "ranks"), [(8, 2, 4), (16, 4, 16), (6, 1, 3), (12, 2, 6)])
def test_a_rank_projects_to_the_head_that_its_query_heads_read(query_heads, heads, ranks):
    for rank in range(ranks):
        rows = SharedHeadLinear(3, heads, 5, OneOf(rank, ranks)).rows
        own = range(query_heads)[rank * query_heads // ranks : (rank + 1) * query_heads // ranks]
        assert {query // (query_heads // heads) for query in own} == {rows.start // 5}
        assert rows.stop - rows.start == 5
