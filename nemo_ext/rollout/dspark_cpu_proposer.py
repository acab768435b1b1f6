"""DSpark on vLLM's V1 runner on a CPU: a proposer made of vLLM's own DSpark model and DFlash proposer.

vLLM 0.32 serves DSpark on its V2 runner only, which needs Triton, hence a GPU. There its own speculator must be used,
and this one refuses to work. DSpark's block is DFlash's with one mask row fewer, all rows of which predict
(`sample_from_anchor`; without it the layouts are the same); its tokens are then drawn left to right, because each
slot's logits gain a Markov bias that depends on the token drawn before (vllm.v1.worker.gpu.spec_decode.dspark).

Legend: B requests, K drafted tokens, W query rows of a block (K, or 1 + K without sample_from_anchor), H hidden size,
U draft vocabulary, V target vocabulary.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

# As VllmConfig words it in its list of what the V1 runner does not support.
V1_REFUSAL = "dspark speculative decoding"


class DSparkCpuProposer(DFlashProposer):
    """Given to the V1 runner by `dspark_proposer`. Arguments are those of vLLM's proposers.

    Raises:
        ValueError: vLLM serves DSpark itself here, or the draft's config.json names no target layers.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner) -> None:
        refuse_where_vllm_serves(device, vllm_config.use_v2_model_runner)
        draft_config = vllm_config.speculative_config.draft_model_config.hf_config
        taps = get_eagle3_aux_layers_from_config(vllm_config.speculative_config)
        if not taps:
            raise ValueError("the DSpark draft's config.json has no target_layer_ids; list the layers that fc reads")
        # The V1 runner looks for the target's taps under this key only, where id n is the output of layer n - 1.
        draft_config.eagle_aux_hidden_state_layer_ids = list(taps)
        super().__init__(as_dflash(vllm_config), device, runner)
        self.sample_from_anchor = getattr(draft_config, "sample_from_anchor", True)
        self.draft_topk = getattr(draft_config, "dspark_draft_topk", None)
        runner.use_aux_hidden_state_outputs = True

    def set_inputs_first_pass(self, **inputs):
        """DFlash's inputs for a block of W rows, and the rows that predict (all of them, if from the anchor)."""
        if not self.sample_from_anchor:
            return super().set_inputs_first_pass(**inputs)
        drafted = self.num_speculative_tokens
        self.num_speculative_tokens = drafted - 1
        try:
            num_rows, _, attention = super().set_inputs_first_pass(**inputs)
        finally:
            self.num_speculative_tokens = drafted
        return num_rows, torch.arange(num_rows, device=self.device), attention

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draws each slot after the one before it.

        Args:
            hidden_states: [B*K, H], request-major.

        Returns:
            ([B*K] target ids, [B*K, V] the probabilities that they were drawn from; None if drawn greedily).
        """
        drafted = self.num_speculative_tokens
        base_BKU = self._base_logits(hidden_states).unflatten(0, (-1, drafted))
        rows = drafted if self.sample_from_anchor else 1 + drafted
        previous_B = self.input_ids[: len(base_BKU) * rows : rows]
        ids, probs = [], []
        for slot in range(drafted):
            bias_BU = self.model.markov_bias(self.model.markov_embed(previous_B))
            logits_BV = self._over_target_vocabulary(base_BKU[:, slot] + bias_BU)
            previous_B, probs_BV = self._sample_from_logits(logits_BV, sampling_metadata)
            ids.append(previous_B)
            probs.append(probs_BV)
        ids_BK = torch.stack(ids, dim=1)
        return ids_BK.flatten(), None if probs[0] is None else torch.stack(probs, dim=1).flatten(0, 1)

    def _base_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits before the Markov bias [B*K, U]; with dspark_draft_topk only the best of them stay finite."""
        logits = self.model.compute_draft_logits(hidden_states)
        if self.draft_topk is None:
            return logits
        kept = logits.topk(self.draft_topk, dim=-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)

    def _over_target_vocabulary(self, logits_BU: torch.Tensor) -> torch.Tensor:
        """[B, V] from a reduced vocabulary, -inf outside it: rejection sampling compares by target id."""
        offsets_U = self.model.draft_id_to_target_id
        if offsets_U is None:
            return logits_BU
        logits_BV = logits_BU.new_full((len(logits_BU), self.model.config.vocab_size), -torch.inf)
        logits_BV[:, torch.arange(len(offsets_U), device=offsets_U.device) + offsets_U] = logits_BU
        return logits_BV


def refuse_where_vllm_serves(device: torch.device, use_v2_model_runner: bool) -> None:
    """Raises ValueError unless this is the V1 runner on a CPU."""
    if device.type != "cpu" or use_v2_model_runner:
        runner = "V2" if use_v2_model_runner else "V1"
        raise ValueError(
            f"DSparkCpuProposer was given to vLLM's {runner} runner on {device.type}; it serves the V1 runner on a cpu, "
            "use vLLM's own worker class elsewhere"
        )


def as_dflash(vllm_config: VllmConfig) -> VllmConfig:
    """The same configuration with the method called dflash, which is what DFlashProposer's own branches ask for."""
    vllm_config = copy.copy(vllm_config)
    vllm_config.speculative_config = copy.copy(vllm_config.speculative_config)
    vllm_config.speculative_config.method = "dflash"
    return vllm_config


@contextmanager
def dspark_on_v1() -> Iterator[None]:
    """While an engine is configured: V1 runners take DSpark. All else that they do not support stays refused.

    vLLM 0.25.1 has no such list, and takes V1 where `VLLM_USE_V2_MODEL_RUNNER` is 0.
    """
    stock = getattr(VllmConfig, "_get_v1_model_runner_unsupported_features", None)
    if stock is None:
        yield
        return

    def without_dspark(config: VllmConfig) -> list[str]:
        return [feature for feature in stock(config) if feature != V1_REFUSAL]

    VllmConfig._get_v1_model_runner_unsupported_features = without_dspark
    try:
        yield
    finally:
        VllmConfig._get_v1_model_runner_unsupported_features = stock


@contextmanager
def dspark_proposer() -> Iterator[None]:
    """While a V1 runner is built for DSpark: it builds a DSparkCpuProposer in the place of its EagleProposer."""
    stock = gpu_model_runner.EagleProposer
    gpu_model_runner.EagleProposer = DSparkCpuProposer
    try:
        yield
    finally:
        gpu_model_runner.EagleProposer = stock
