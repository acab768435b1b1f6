"""What vLLM's own DFlash or DSpark draft computes for a block, as tensors: the serving half of "train = serve".

Legend: R trunk rows (0..p-1), W rows of a block, K drafted tokens, k taps, H hidden, V target vocabulary.

Seen with vLLM 0.32's V1 runner on a CPU, and held by test_rollout_block_capture.py:
- A block at anchor p is drafted when the target has computed rows 0..p-1, the last of which gave x_p. The trunk is
  those rows: strictly before the anchor, whose own row comes with the next verification.
- Tap id l is the output of layer l (from 0), before the final norm for the last one too.
- DFlash: W = 1 + K rows at p..p+K; row j >= 1 predicts x_{p+j}. DSpark from the anchor: W = K rows at p..p+K-1; row j
  predicts x_{p+1+j}; not from the anchor: DFlash's layout.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nemo_ext.rollout.engine import RolloutEngine
from tests.e2e.capture import model_runner, v2_recording


@dataclass
class Block:
    """One block that the proposer drafted for one sequence, complete in itself.

    Attributes:
        request: index of the prompt.
        anchor: p, the position of the newest token.
        taps_Rt: [p, k*H] target hidden states of rows 0..p-1 as fc takes them (taps concatenated in ascending order).
        token_ids: p+1+K ids: the sequence x_0..x_p as verified, then the K drafted ones x_{p+1}..x_{p+K}.
        hidden_WH: [W, H] the backbone's output after its final norm; row j stands at position p+j.
        logits_KV: [K, V] what slot k (from 0) drafts x_{p+1+k} from: over the target vocabulary, -inf outside a reduced
            one, DSpark's Markov bias (of the token before, token_ids[p+k]) included.
        confidence_K: [K] probabilities of vLLM's confidence head; None without one (vLLM 0.25.1 reads none).
    """

    request: int
    anchor: int
    taps_Rt: torch.Tensor
    token_ids: list[int]
    hidden_WH: torch.Tensor
    logits_KV: torch.Tensor
    confidence_K: torch.Tensor | None


def capture_blocks(
    engine: RolloutEngine, prompt_token_ids: list[list[int]], max_new_tokens: int
) -> tuple[list[Block], list[list[int]]]:
    """Decodes greedily and records every block.

    No step may lack a block (KeyError): the engine needs room beyond its longest sequence, as RolloutEngine makes it.

    Returns:
        (blocks in the order made, generated ids of each prompt). A sequence's last block may reach past its end.
    """
    blocks: list[Block] = []
    runner = model_runner(engine)
    with v2_recording(runner, blocks, True) if hasattr(runner, "speculator") else _recording(runner, blocks):
        rollouts = engine.generate(prompt_token_ids, temperature=0.0, max_new_tokens=max_new_tokens)
    return blocks, [sample.token_ids for sample in rollouts.samples]


@contextmanager
def _recording(runner, blocks: list[Block]):
    """Wraps the proposer and its model while the block runs.

    DFlash takes the logits of all slots at once (compute_logits, [B*K, V]); DSpark slot by slot
    (_sample_from_logits, K times [B, V]).
    """
    drafter, model = runner.drafter, runner.drafter.model
    dspark = hasattr(model, "markov_embed")
    propose, combine = drafter.propose, model.combine_hidden_states
    logits_at = (drafter, "_sample_from_logits") if dspark else (model, "compute_logits")
    stock_logits = getattr(*logits_at)
    rows_of: dict[str, dict[int, tuple[torch.Tensor, int]]] = {}
    requests: dict[str, int] = {}
    taps_of_call: list[torch.Tensor] = []
    hidden_of_call: list[torch.Tensor] = []
    logits_of_call: list[torch.Tensor] = []

    def recorded_taps(hidden_states):
        taps_of_call.append(hidden_states.detach().clone())
        return combine(hidden_states)

    def recorded_logits(x, *args):
        if dspark:
            logits_of_call.append(x.detach().clone())
            return stock_logits(x, *args)
        logits_of_call.append(stock_logits(x).detach().clone())
        return logits_of_call[-1].clone()

    def recorded_propose(*args, **kwargs):
        for recorded in (taps_of_call, hidden_of_call, logits_of_call):
            recorded.clear()
        bounds = kwargs["common_attn_metadata"].query_start_loc.tolist()
        targets, positions = kwargs["target_token_ids"].tolist(), kwargs["target_positions"].tolist()
        anchors = kwargs["next_token_ids"].tolist()
        last = kwargs["token_indices_to_sample"]
        last = [end - 1 for end in bounds[1:]] if last is None else last.tolist()
        drafted_BK = propose(*args, **kwargs)
        batch, slots = drafted_BK.shape
        (taps_Tt,), (hidden_TH,) = taps_of_call, hidden_of_call
        hidden_BWH = hidden_TH.unflatten(0, (batch, -1))
        logits_BKV = torch.stack(logits_of_call, 1) if dspark else logits_of_call[0].unflatten(0, (batch, slots))
        for b, request in enumerate(runner.input_batch.req_ids[:batch]):
            rows = rows_of.setdefault(request, {})
            requests.setdefault(request, len(requests))
            for at in range(bounds[b], last[b] + 1):
                rows[positions[at]] = (taps_Tt[at], targets[at])
            anchor = positions[last[b]] + 1
            trunk = [rows[position] for position in range(anchor)]
            ids = [*(token for _, token in trunk), anchors[b], *drafted_BK[b].tolist()]
            confidence = None
            if dspark and getattr(model.model, "confidence_head", None) is not None:
                previous_K = torch.tensor(ids[anchor : anchor + slots])
                confidence = model.compute_confidence(hidden_BWH[b, -slots:], model.markov_embed(previous_K))
            blocks.append(
                Block(
                    request=requests[request],
                    anchor=anchor,
                    taps_Rt=torch.stack([taps for taps, _ in trunk]),
                    token_ids=ids,
                    hidden_WH=hidden_BWH[b],
                    logits_KV=logits_BKV[b],
                    confidence_K=confidence,
                )
            )
        return drafted_BK

    hook = model.register_forward_hook(lambda module, args, output: hidden_of_call.append(output.detach().clone()))
    drafter.propose = recorded_propose
    model.combine_hidden_states = recorded_taps
    setattr(*logits_at, recorded_logits)
    try:
        yield
    finally:
        # The wrappers shadow the class's methods on the instance.
        hook.remove()
        del drafter.propose, model.combine_hidden_states
        delattr(*logits_at)
