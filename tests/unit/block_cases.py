"""A small block draft, a pack and the dense float64 reference of both, for the tests of block drafts.

Legend: T rows of an unpadded pack, V vocabulary, U draft vocabulary, H hidden size.
"""

from dataclasses import dataclass

import torch

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_ext.cotrain import BlockObjective, BlockPlan, Draw, TargetOutputs
from nemo_ext.drafts.anchors import draw_anchors
from nemo_ext.drafts.block_config import FULL, SLIDING, BlockConfig
from nemo_ext.drafts.block_hf import load_block
from nemo_ext.drafts.block_shapes import block_shapes
from nemo_ext.drafts.dflash import DFlashDraft
from nemo_ext.drafts.dspark import DSparkDraft
from nemo_ext.layout import PackedLayout
from nemo_ext.losses import LogitTransform, LossTerms
from tests.reference.block_losses import block_targets, dense_dflash_loss, dense_dspark_loss, slot_weights
from tests.reference.blocks import dense_dflash, dense_dspark_heads, head_logits

HIDDEN, VOCAB, TAPS = 16, 32, (0, 2, 3)
DSPARK_TERMS = LossTerms(cross_entropy=0.1, total_variation=0.9, hard_labels=True)


def make_config(kind: str, **changes) -> BlockConfig:
    settings = dict(
        kind=kind, hidden_size=HIDDEN, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, intermediate_size=20,
        vocab_size=VOCAB, draft_vocab_size=VOCAB, tap_layers=TAPS, mask_token_id=3, gamma=4, layer_types=(FULL, FULL),
        rope_theta=1000.0, rms_norm_eps=1e-6, max_position_embeddings=64,
    )  # fmt: skip
    if kind == "dspark":
        settings |= dict(sample_from_anchor=True, markov_rank=5, confidence_head=True, confidence_with_markov=True)
    return BlockConfig(**settings | changes)


SHAPES = {
    "dflash": make_config("dflash"),
    "dflash-window": make_config("dflash", layer_types=(SLIDING, SLIDING), sliding_window=3),
    "dflash-window-both-ways": make_config("dflash", layer_types=(SLIDING, SLIDING), sliding_window=3, causal=False),
    "dflash-mixed": make_config("dflash", layer_types=(FULL, SLIDING), sliding_window=5),
    "dflash-causal-reduced": make_config("dflash", causal=True, draft_vocab_size=12),
    "dflash-scaled": make_config("dflash", logit_scale=0.7, gamma=1),
    "dspark": make_config("dspark"),
    "dspark-bonus-anchor": make_config("dspark", sample_from_anchor=False, confidence_with_markov=False),
    "dspark-reduced-window": make_config(
        "dspark", draft_vocab_size=12, layer_types=(SLIDING, SLIDING), sliding_window=4, logit_scale=0.8
    ),
    "dspark-no-confidence": make_config("dspark", confidence_head=False, confidence_with_markov=False),
    "dspark-one-key-head": make_config("dspark", num_kv_heads=1),
}


def make_tensors(cfg: BlockConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float64 weights; norms are away from one, so that a norm that is skipped or doubled is seen."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in block_shapes(cfg).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = 1 + 0.3 * noise if "norm" in name else noise * shape[-1] ** -0.5
    if cfg.reduced_vocab:
        ids = torch.randperm(cfg.vocab_size, generator=generator)[: cfg.draft_vocab_size].sort().values
        tensors["d2t"] = ids - torch.arange(cfg.draft_vocab_size)
    return tensors


def make_draft(cfg: BlockConfig, tensors: dict[str, torch.Tensor], tp_group, tp: int = 1, dtype=torch.float64):
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, params_dtype=dtype, use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
    )  # fmt: skip
    draft = (DSparkDraft if cfg.kind == "dspark" else DFlashDraft)(cfg, config, tp_group)
    load_block(draft, tensors, tp_group)
    return draft


@dataclass
class Pack:
    """Sequences of one pack, as lists of one tensor per sequence; `table` and `head` are the policy's."""

    taps: list[torch.Tensor]
    hidden: list[torch.Tensor]
    mask: list[torch.Tensor]
    ids: list[torch.Tensor]
    table_VH: torch.Tensor
    head_VH: torch.Tensor

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.ids]


def make_pack(lengths: list[int], seed: int = 1, trained: float = 0.7) -> Pack:
    generator = torch.Generator().manual_seed(seed)

    def rows(size):
        return [torch.randn(n, size, generator=generator, dtype=torch.float64) for n in lengths]

    def normal():
        return torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)

    return Pack(
        taps=rows(len(TAPS) * HIDDEN),
        hidden=rows(HIDDEN),
        mask=[(torch.rand(n, generator=generator) < trained).double() for n in lengths],
        ids=[torch.randint(VOCAB, (n,), generator=generator) for n in lengths],
        table_VH=normal(),
        head_VH=normal(),
    )


def make_objective(draft, terms: LossTerms | None = None, anchors_per_seq: int = 3, **options) -> BlockObjective:
    cfg = draft.cfg
    settings = {
        "plan": BlockPlan(cfg, anchors_per_seq, seed=11),
        "loss_weighting": "exp" if cfg.kind == "dspark" else "uniform",
        "terms": terms or (DSPARK_TERMS if cfg.kind == "dspark" else LossTerms()),
        "confidence_alpha": 1.0 if cfg.confidence_head else 0.0,
        "target_transform": LogitTransform(0.9, softcap=4.0),
        "chunk_rows": 5,
    }
    return BlockObjective(draft, **settings | options)


def run_objective(objective: BlockObjective, pack: Pack, layout: PackedLayout, draw: Draw, head_VH, denominator=None):
    """The loss of this rank; the denominator is that of this rank alone unless given. `head_VH` is the rank's shard."""
    mask_R, tokens_R = layout.pack(pack.mask), layout.pack(pack.ids)
    hidden_TH = layout.shard(layout.pack(pack.hidden))
    target = TargetOutputs(
        taps_TK=layout.shard(layout.pack(pack.taps)),
        embeds_EH=pack.table_VH[objective.plan.embed_ids(layout, mask_R, tokens_R, draw)],
        hidden_TH=hidden_TH,
        logits_TV=objective.target_transform.apply_(hidden_TH @ head_VH.T),
        head_VH=head_VH,
    )
    if denominator is None:
        denominator = objective.denominator(objective.plan.count(layout, mask_R, draw))
    return objective.loss(layout, mask_R, tokens_R, draw, target, denominator)


@dataclass
class Dense:
    """The reference's view of the same blocks."""

    loss: torch.Tensor
    targets: object
    logits: torch.Tensor
    confidence: torch.Tensor | None
    teacher: torch.Tensor


def dense_loss(cfg: BlockConfig, tensors, pack: Pack, objective: BlockObjective, draw: Draw) -> Dense:
    """Loss of all blocks of the pack, normalised by their own counts, from the dense reference."""
    layout = PackedLayout(pack.lengths)
    plan = objective.plan
    rows_A = draw_anchors(
        layout, layout.pack(pack.mask), draw.sample_ids, anchors_per_seq=plan.anchors_per_seq, seed=plan.seed,
        step=draw.step,
    )  # fmt: skip
    sequences, positions = layout.sequences_of(rows_A), layout.positions_of(rows_A)
    reference = {
        "num_layers": cfg.num_layers, "num_heads": cfg.num_heads, "num_kv_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim, "rope_theta": cfg.rope_theta, "rms_norm_eps": cfg.rms_norm_eps,
        "windows": [cfg.window(i) for i in range(cfg.num_layers)],
        "causal": [cfg.causal_in_block(i) for i in range(cfg.num_layers)],
    }  # fmt: skip
    ids_T, mask_T = torch.cat(pack.ids), torch.cat(pack.mask)
    hidden = dense_dflash(
        tensors, reference, torch.cat(pack.taps), pack.table_VH[ids_T], pack.table_VH[cfg.mask_token_id], pack.lengths,
        sequences, positions, cfg.block_size,
    )[:, cfg.block_size - cfg.gamma :]  # fmt: skip
    targets = block_targets(ids_T, mask_T, pack.lengths, sequences, positions, cfg.gamma)
    d2t = tensors.get("d2t")
    transform = objective.target_transform
    head = tensors["lm_head.weight"] if cfg.reduced_vocab else pack.head_VH
    teacher = head_logits(torch.cat(pack.hidden), pack.head_VH, multiplier=transform.scale, softcap=transform.softcap)
    logits, confidence = head_logits(hidden, head, multiplier=cfg.logit_scale), None
    weights = torch.tensor(objective.slot_weights, dtype=torch.float64)
    if cfg.kind == "dspark":
        _, confidence = dense_dspark_heads(
            tensors, hidden, targets.previous_ids, head, confidence_with_markov=cfg.confidence_with_markov
        )
        markov = tensors["markov_head.markov_w1.weight"][targets.previous_ids]
        logits = logits + head_logits(markov, tensors["markov_head.markov_w2.weight"], multiplier=cfg.logit_scale)
        terms = objective.terms
        loss, parts, counts = dense_dspark_loss(
            logits, confidence, teacher, targets, ce_alpha=terms.cross_entropy, tv_alpha=terms.total_variation,
            confidence_alpha=objective.confidence_alpha, d2t_U=d2t, temperature=objective.temperature,
        )  # fmt: skip
        assert torch.allclose(weights, slot_weights(cfg.gamma, 4.0))
    else:
        loss, _, _ = dense_dflash_loss(
            logits, teacher, targets, weights_S=weights, d2t_U=d2t, hard=objective.terms.hard_labels,
            temperature=objective.temperature,
        )  # fmt: skip
    return Dense(loss, targets, logits, confidence, teacher)


def export_gradients(draft, export) -> dict[str, torch.Tensor]:
    """The gradients under their Hugging Face names, full size. Spoils the weights."""
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(parameter.grad)
    return {name: t for name, t in export if t.is_floating_point()}
