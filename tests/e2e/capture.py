"""What vLLM's own draft model computes while it proposes, as tensors: the serving half of "train = serve".

Legend: R rows of a sequence (0..i), K proposed tokens, k taps, H target hidden, V target vocabulary.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nemo_ext.rollout.engine import RolloutEngine


@dataclass
class Proposal:
    """One call of vLLM's proposer for one sequence, complete in itself.

    With i the last row whose target features are known, the draft has seen rows 0..i, each with the embedding of the
    token after it, and proposes x_{i+2} .. x_{i+1+K}.

    Attributes:
        request: index of the prompt.
        row: i.
        taps_Rt: [i+1, k*H] target hidden states of rows 0..i as fc takes them (taps concatenated, ascending ids,
            before fc and any norm).
        token_ids: i+2+K ids: the sequence x_0..x_{i+1} as verified, then the K proposed ones. Row j's draft input in
            pass d is token_ids[j + d].
        logits_KV: [K, V] logits of depth d = 1..K in row d-1: pass d at row i, which predicts token_ids[i + 1 + d].
            Over the target vocabulary; -inf outside a reduced draft vocabulary.
    """

    request: int
    row: int
    taps_Rt: torch.Tensor
    token_ids: list[int]
    logits_KV: torch.Tensor


def capture_proposals(
    engine: RolloutEngine, prompt_token_ids: list[list[int]], max_new_tokens: int
) -> tuple[list[Proposal], list[list[int]]]:
    """Decodes greedily and records every proposal.

    Returns:
        (proposals in the order made, generated ids of each prompt). A sequence's last proposal may reach past its end.
    """
    proposals: list[Proposal] = []
    runner = model_runner(engine)
    with v2_recording(runner, proposals, False) if hasattr(runner, "speculator") else _recording(runner, proposals):
        rollouts = engine.generate(prompt_token_ids, temperature=0.0, max_new_tokens=max_new_tokens)
    return proposals, [sample.token_ids for sample in rollouts.samples]


def model_runner(engine):
    """The runner inside a `RolloutEngine`, or inside a `tests.upstream.served.Served`."""
    return (
        engine.runner
        if hasattr(engine, "runner")
        else engine._llm.collective_rpc(lambda worker: worker)[0].model_runner
    )


def v2_recording(runner, found: list, blocks: bool):
    """The same with vLLM's V2 runner, whose speculator works otherwise."""
    from tests.upstream.v2_runner import recording

    return recording(runner, found, blocks)


@contextmanager
def _recording(runner, proposals: list[Proposal]):
    """Wraps propose, combine_hidden_states and compute_logits of the runner's draft while the block runs."""
    drafter, model = runner.drafter, runner.drafter.model
    propose, compute_logits, combine = drafter.propose, model.compute_logits, model.combine_hidden_states
    sequences: dict[str, dict[int, tuple[torch.Tensor, int]]] = {}
    first_token: dict[str, int] = {}
    requests: dict[str, int] = {}
    logits_of_call: list[torch.Tensor] = []
    taps_of_call: list[torch.Tensor] = []

    def recorded_logits(hidden_states):
        logits_BV = compute_logits(hidden_states)
        logits_of_call.append(logits_BV.detach().clone())
        return logits_BV

    def recorded_taps(hidden_states):
        taps_of_call.append(hidden_states.detach().clone())
        return combine(hidden_states)

    def recorded_propose(*args, **kwargs):
        logits_of_call.clear()
        taps_of_call.clear()
        bounds = kwargs["common_attn_metadata"].query_start_loc.tolist()
        targets, positions = kwargs["target_token_ids"].tolist(), kwargs["target_positions"].tolist()
        next_ids = kwargs["next_token_ids"].tolist()
        last = kwargs["token_indices_to_sample"]
        last = [end - 1 for end in bounds[1:]] if last is None else last.tolist()
        drafted_BK = propose(*args, **kwargs)
        (taps_Tt,) = taps_of_call
        for b, request in enumerate(runner.input_batch.req_ids[: len(last)]):
            rows = sequences.setdefault(request, {})
            requests.setdefault(request, len(requests))
            start, end = bounds[b], last[b]
            if positions[start] == 0:
                first_token[request] = targets[start]
            for at in range(start, end + 1):
                following = next_ids[b] if at == end else targets[at + 1]
                rows[positions[at]] = (taps_Tt[at], following)
            row = positions[end]
            proposals.append(
                Proposal(
                    request=requests[request],
                    row=row,
                    taps_Rt=torch.stack([rows[j][0] for j in range(row + 1)]),
                    token_ids=[first_token[request], *(rows[j][1] for j in range(row + 1)), *drafted_BK[b].tolist()],
                    logits_KV=torch.stack([logits_BV[b] for logits_BV in logits_of_call]),
                )
            )
        return drafted_BK

    drafter.propose = recorded_propose
    model.compute_logits = recorded_logits
    model.combine_hidden_states = recorded_taps
    try:
        yield
    finally:
        # The wrappers shadow the class's methods on the instance.
        del drafter.propose, model.compute_logits, model.combine_hidden_states
