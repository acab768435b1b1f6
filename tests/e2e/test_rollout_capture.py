"""capture_proposals returns what vLLM's draft computes: equal, at every depth, to the contract's formulas in float64.

Legend: R rows of the trunk, N heads, D head dim, H hidden, S keys.
"""

import pytest
import torch
from torch.nn.functional import silu

from tests.e2e.capture import Proposal, capture_proposals
from tests.e2e.conftest import DRAFTED

pytestmark = pytest.mark.e2e
PROMPTS = [[3, 5, 7, 9, 11], [4, 6], [8, 10, 12, 14, 16, 18, 20]]


class ReferenceDraft:
    """An EAGLE-3 draft with a key-value cache, from its checkpoint: contract A.1 in float64."""

    def __init__(self, config: dict, tensors: dict, embedding: torch.Tensor) -> None:
        self.config = config
        self.w = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
        self.embedding = embedding.double()
        self.keys = [[] for _ in range(config["num_hidden_layers"])]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * self.w[name]

    def features(self, taps_Rt: torch.Tensor) -> torch.Tensor:
        if self.config["norm_before_fc"]:
            taps_Rt = self.norm(taps_Rt, "input_norm.weight")
        if self.config["fc_norm"]:
            parts = taps_Rt.chunk(len(self.config["eagle_aux_hidden_state_layer_ids"]), dim=-1)
            taps_Rt = torch.cat([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], dim=-1)
        return taps_Rt @ self.w["fc.weight"].T

    def rotate(self, x_RND: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        half = x_RND.shape[-1] // 2
        angles = positions_R[:, None, None] * self.config["rope_theta"] ** -(torch.arange(half).double() / half)
        a, b = x_RND.split(half, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def attend(self, u_RH: torch.Tensor, positions_R: torch.Tensor, layer: int, at: str) -> torch.Tensor:
        heads = (len(u_RH), -1, self.config["head_dim"])
        q, k, v = ((u_RH @ self.w[f"{at}self_attn.{x}_proj.weight"].T).view(heads) for x in "qkv")
        q, k = self.rotate(q, positions_R), self.rotate(k, positions_R)
        self.keys[layer].append((positions_R, k, v))
        seen_S, k_SND, v_SND = (torch.cat(parts) for parts in zip(*self.keys[layer], strict=True))
        scores = torch.einsum("rnd,snd->nrs", q, k_SND) * self.config["head_dim"] ** -0.5
        scores = scores.masked_fill(seen_S[None, None] > positions_R[None, :, None], -torch.inf)
        out = torch.einsum("nrs,snd->rnd", scores.softmax(-1), v_SND).flatten(1)
        return out @ self.w[f"{at}self_attn.o_proj.weight"].T

    def run(self, token_ids: list[int], g_RH: torch.Tensor, positions_R: torch.Tensor) -> tuple:
        """One pass over rows: (logits over the draft vocabulary, feedback)."""
        residual, hidden = None, g_RH
        for layer in range(self.config["num_hidden_layers"]):
            at = f"layers.{layer}." if layer else "midlayer."
            if layer == 0:
                normed = self.norm(hidden, at + "hidden_norm.weight")
                residual = normed if self.config["norm_before_residual"] else hidden
                hidden = torch.cat(
                    [self.norm(self.embedding[token_ids], at + "input_layernorm.weight"), normed], dim=-1
                )
            else:
                residual = residual + hidden
                hidden = self.norm(residual, at + "input_layernorm.weight")
            residual = residual + self.attend(hidden, positions_R, layer, at)
            x = self.norm(residual, at + "post_attention_layernorm.weight")
            gate, up = (x @ self.w[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            hidden = (silu(gate) * up) @ self.w[at + "mlp.down_proj.weight"].T
        prenorm = residual + hidden
        normed = self.norm(prenorm, "norm.weight")
        return normed @ self.w["lm_head.weight"].T, normed if self.config["norm_output"] else prenorm


def reference_logits(proposal: Proposal, draft, policy) -> torch.Tensor:
    """[K, V] logits of the proposal recomputed, -inf outside a reduced vocabulary."""
    reference = ReferenceDraft(draft.config, draft.tensors, policy.tensors["model.embed_tokens.weight"])
    rows, ids = proposal.row + 1, proposal.token_ids
    g, positions = reference.features(proposal.taps_Rt.double()), torch.arange(rows)
    out = []
    for depth in range(1, DRAFTED + 1):
        tokens = ids[1 : rows + 1] if depth == 1 else [ids[proposal.row + depth]]
        logits, g = reference.run(tokens, g, positions)
        g, positions = g[-1:], positions[-1:] + 1
        full_V = torch.full((policy.config["vocab_size"],), -torch.inf, dtype=torch.float64)
        kept = torch.arange(logits.shape[-1]) + draft.tensors.get("d2t", torch.zeros(1, dtype=torch.int64))
        full_V[kept] = logits[-1]
        out.append(full_V)
    return torch.stack(out)


VARIANTS = {
    "plain": {},
    "EAGLE-3.1 flags": {"norm_output": True, "norm_before_residual": True, "fc_norm": True},
    "reduced vocabulary, two layers": {"draft_vocab_size": 32, "num_hidden_layers": 2, "norm_before_fc": True},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
def test_captured_logits_follow_the_contract_at_every_depth(start_engine, make_policy, make_draft, variant):
    policy = make_policy(mixing=1.0)
    draft = make_draft(policy, random=True, **variant)
    engine = start_engine(policy, draft)
    proposals, generated = capture_proposals(engine, PROMPTS, max_new_tokens=12)
    assert {p.request for p in proposals} == {0, 1, 2}
    for proposal in proposals:
        sequence = PROMPTS[proposal.request] + generated[proposal.request]
        verified = proposal.token_ids[: proposal.row + 2]
        assert verified[: len(sequence)] == sequence[: len(verified)]
        assert proposal.logits_KV.argmax(-1).tolist() == proposal.token_ids[-DRAFTED:]
        # fp32 against float64: logits of a few units.
        assert torch.allclose(proposal.logits_KV.double(), reference_logits(proposal, draft, policy), atol=2e-5, rtol=0)


def test_captured_taps_are_the_policys_layer_outputs(start_engine, make_policy, make_draft):
    """Tap id n is the output after n layers, concatenated in ascending order."""
    from transformers import AutoConfig, AutoModelForCausalLM

    policy = make_policy(mixing=1.0)
    draft = make_draft(policy, random=True, taps=(0, 2, 3))
    proposals, _ = capture_proposals(start_engine(policy, draft), PROMPTS, max_new_tokens=12)
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy.folder), attn_implementation="eager")
    reference.load_state_dict(policy.tensors)
    for proposal in proposals:
        with torch.no_grad():
            states = reference(torch.tensor([proposal.token_ids[: proposal.row + 1]]), output_hidden_states=True)
        taps = torch.cat([states.hidden_states[i][0] for i in (0, 2, 3)], dim=-1)
        assert torch.allclose(proposal.taps_Rt, taps, atol=2e-5, rtol=0)
