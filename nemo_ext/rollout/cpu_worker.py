"""vLLM's CPU worker, able to be refreshed in place: its linear layers keep their weights. It serves DSpark too.

It works with vLLM 0.20.0 (which does not know DSpark), 0.25.1 and 0.32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.model_executor.layers import utils as layer_utils
from vllm.v1.worker.cpu_worker import CPUWorker

from nemo_ext.rollout.context_norm_fix import correct_context_norm
from nemo_ext.rollout.draft_model import find_draft_model


@contextmanager
def plain_linear() -> Iterator[None]:
    """While models load: 2-D weights are used by torch's linear as they are, not repacked and emptied.

    Stock vLLM (`dispatch_cpu_unquantized_gemm`) hands each weight to a packed kernel and drops the original; a
    later load finds an empty parameter, or (lm_head) fills one that nothing reads. Quantised layers and the 3-D
    weights of experts and convolutions go their own way still.
    """
    stock = layer_utils.dispatch_cpu_unquantized_gemm

    def keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            stock(layer, remove_weight)

    layer_utils.dispatch_cpu_unquantized_gemm = keep_weight
    try:
        yield
    finally:
        layer_utils.dispatch_cpu_unquantized_gemm = stock


class RefreshableCPUWorker(CPUWorker):
    """Given to vLLM by path as `worker_cls`."""

    def init_device(self) -> None:
        speculative = self.vllm_config.speculative_config
        if speculative is None or speculative.method != "dspark":
            super().init_device()
            return
        from nemo_ext.rollout.dspark_cpu_proposer import dspark_proposer

        with dspark_proposer():
            super().init_device()
        drafter = getattr(self.model_runner, "drafter", None)  # a V2 runner has a speculator of vLLM's own
        if drafter is not None and not drafter.sample_from_anchor:
            # The runner leaves room for the drafted tokens; such a block has one row more.
            self.model_runner.effective_drafter_max_model_len -= 1

    def load_model(self, **kwargs) -> None:
        with plain_linear():
            super().load_model(**kwargs)
        draft = find_draft_model(self)
        if draft is not None:
            correct_context_norm(draft)
