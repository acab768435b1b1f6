"""capture_blocks returns what vLLM's block drafts compute: slot by slot the contract's formulas in float64.

Legend: R trunk rows, W rows of a block, K drafted tokens, H hidden, U draft and V target vocabulary.
"""

import pytest
import torch

from tests import fixtures_block_drafts as drafts
from tests.e2e.block_capture import Block, capture_blocks
from tests.reference.blocks import dense_dflash, dense_dspark_heads, head_logits

pytestmark = pytest.mark.e2e
PROMPTS = [[3, 5, 7, 9, 11, 13, 15, 17, 19], [4, 6], [8, 10, 12, 14, 16, 18, 20]]
GAMMA = 4
# float32 against float64; values are a few units.
TOLERANCE = 2e-5

MAX_MODEL_LEN = 32
TAPS = (0, 2, 3)
VARIANTS = {
    "dflash": {},
    "dflash, window narrower than the block": {"window": 3},
    "dflash, window of both sides": {"window": 3, "causal": False},
    "dflash, causal, grouped queries, reduced vocabulary": {
        "causal": True,
        "num_attention_heads": 4,
        "draft_vocab_size": 32,
    },
    "dspark": {"method": "dspark"},
    "dspark, window, hidden-only confidence, best 8": {
        "method": "dspark",
        "window": 6,
        "confidence_with_markov": False,
        "draft_topk": 8,
    },
    "dspark, not from the anchor, reduced vocabulary, no confidence": {
        "method": "dspark",
        "sample_from_anchor": False,
        "draft_vocab_size": 32,
        "confidence_head": False,
    },
}


def reference_hidden(block: Block, draft, policy) -> torch.Tensor:
    """`[W, H]` of the block recomputed. The anchor's own row of the trunk is NaN: it must not be looked at."""
    config = draft.config
    sliding = config["layer_types"][0] == "sliding_attention"
    causal = config.get("dflash_config", {}).get("causal", sliding)
    layers = config["num_hidden_layers"]
    cfg = {
        "num_layers": layers,
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "rope_theta": config["rope_theta"],
        "rms_norm_eps": config["rms_norm_eps"],
        "windows": [config["sliding_window"] if sliding else None] * layers,
        "causal": [causal] * layers,
    }
    embedding_VH = policy.tensors["model.embed_tokens.weight"].double()
    taps_TC = torch.cat([block.taps_Rt.double(), torch.full_like(block.taps_Rt[:1], torch.nan).double()])
    (hidden_WH,) = dense_dflash(
        doubled(draft.tensors), cfg, taps_TC, embedding_VH[block.token_ids[: block.anchor + 1]],
        embedding_VH[drafts.MASK_TOKEN], [block.anchor + 1], [0], [block.anchor], config["block_size"],
    )  # fmt: skip
    return hidden_WH


def reference_heads(block: Block, draft, policy) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logits `[K, V]` of the block's last K rows, -inf outside a reduced vocabulary; confidence `[K]` or None)."""
    weights = doubled(draft.tensors)
    hidden_KH = block.hidden_WH[-GAMMA:].double()
    lm_head_UH = weights.get("lm_head.weight", policy.tensors["lm_head.weight"].double())
    logits_KU, confidence_K = head_logits(hidden_KH, lm_head_UH), None
    if "markov_rank" in draft.config:
        previous_NK = torch.tensor([block.token_ids[block.anchor : block.anchor + GAMMA]])
        logits_NKU, confidence_NK = dense_dspark_heads(
            weights,
            hidden_KH[None],
            previous_NK,
            lm_head_UH,
            confidence_with_markov=draft.config["confidence_head_with_markov"],
        )
        if "dspark_draft_topk" in draft.config:
            worst_K1 = logits_KU.topk(draft.config["dspark_draft_topk"]).values[:, -1:]
            logits_NKU = logits_NKU.masked_fill(logits_KU < worst_K1, -torch.inf)
        logits_KU, confidence_K = logits_NKU[0], None if confidence_NK is None else confidence_NK[0].sigmoid()
    logits_KV = torch.full((GAMMA, policy.config["vocab_size"]), -torch.inf, dtype=torch.float64)
    kept_U = torch.arange(logits_KU.shape[-1]) + draft.tensors.get("d2t", torch.zeros(1, dtype=torch.int64))
    logits_KV[:, kept_U] = logits_KU
    return logits_KV, confidence_K


def doubled(tensors: dict) -> dict:
    return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}


def close(mine: torch.Tensor, exact: torch.Tensor) -> bool:
    return mine.shape == exact.shape and torch.allclose(mine.double(), exact, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def policy(make_policy):
    return make_policy(mixing=1.0)


@pytest.fixture(scope="module")
def plain_greedy(start_engine, policy):
    """What follows each prompt, for the longest to the end of the engine's context."""
    engine = start_engine(policy, max_model_len=MAX_MODEL_LEN)
    new_tokens = MAX_MODEL_LEN - max(len(prompt) for prompt in PROMPTS)
    return [s.token_ids for s in engine.generate(PROMPTS, temperature=0.0, max_new_tokens=new_tokens).samples]


@pytest.fixture(scope="module")
def layer_outputs(policy):
    """f(token ids) -> outputs of the policy's decoder layers, each `[rows, H]`, from transformers' own model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy.folder), attn_implementation="eager")
    model.load_state_dict(policy.tensors)
    outputs = {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda module, args, output, i=i: outputs.update({i: output}))

    def run(token_ids: list[int]) -> list[torch.Tensor]:
        with torch.no_grad():
            model(torch.tensor([token_ids]))
        return [outputs[i].reshape(len(token_ids), -1) for i in range(len(outputs))]

    return run


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
def test_captured_blocks_follow_the_contract_slot_by_slot(
    start_engine, policy, make_block_draft, plain_greedy, layer_outputs, variant
):
    draft = make_block_draft(policy, gamma=GAMMA, taps=TAPS, **variant)
    engine = start_engine(policy, draft, max_model_len=MAX_MODEL_LEN)
    blocks, generated = capture_blocks(engine, PROMPTS, max_new_tokens=len(plain_greedy[0]))
    assert generated == plain_greedy
    assert {block.request for block in blocks} == {0, 1, 2}
    # Drafted for up to the end: the last block starts at the last token or at one that it was drafted along with.
    assert max(block.anchor for block in blocks) >= MAX_MODEL_LEN - 1 - GAMMA
    for block in blocks:
        sequence = PROMPTS[block.request] + generated[block.request]
        verified = block.token_ids[: block.anchor + 1]
        assert verified[: len(sequence)] == sequence[: len(verified)]
        assert block.logits_KV.argmax(-1).tolist() == block.token_ids[-GAMMA:]
        assert_follows_contract(block, draft, policy)
        outputs = layer_outputs(verified[:-1])
        assert close(block.taps_Rt, torch.cat([outputs[i] for i in TAPS], dim=-1).double())


def assert_follows_contract(block: Block, draft, policy) -> None:
    """hidden, logits and confidence of every slot equal the float64 reference's."""
    assert len(block.taps_Rt) == block.anchor
    assert close(block.hidden_WH, reference_hidden(block, draft, policy))
    logits_KV, confidence_K = reference_heads(block, draft, policy)
    assert close(block.logits_KV, logits_KV)
    assert (block.confidence_K is None) == (confidence_K is None)
    assert confidence_K is None or close(block.confidence_K, confidence_K)
