"""Upstream's own EAGLE-3 draft (ModelOpt's module) on a CPU: plain layers in the place of Transformer Engine's."""

from types import SimpleNamespace

import torch
from megatron.core.post_training.modelopt.gpt import model_specs
from megatron.core.transformer.dot_product_attention import DotProductAttention
from modelopt.torch.speculative.plugins import megatron_eagle
from nemo_rl.models.megatron.draft.utils import build_draft_model


class PlainNorm(torch.nn.RMSNorm):
    """RMSNorm with the arguments of Transformer Engine's."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class PlainLinear(torch.nn.Linear):
    """A replicated linear whose result is (output, bias)."""

    def __init__(self, input_size, output_size, *, config, bias=False, **kwargs):
        super().__init__(input_size, output_size, bias=bias, dtype=config.params_dtype)

    def forward(self, x):
        return super().forward(x), None


def build(gpt, draft_folder: str, groups) -> torch.nn.Module:
    """The draft module of `nemo_rl.models.megatron.draft` with the folder's weights, for a one-rank policy."""
    megatron_eagle.TENorm, megatron_eagle.TELinear = PlainNorm, PlainLinear
    model_specs.Norm, model_specs.TEDotProductAttention = PlainNorm, DotProductAttention
    # Megatron's local spec holds functions that cannot be copied; the draft is its only user.
    megatron_eagle.copy = SimpleNamespace(deepcopy=lambda spec: spec)

    provider = SimpleNamespace(
        **vars(gpt.config),
        vocab_size=gpt.vocab_size,
        seq_length=64,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=10000,
        rope_scaling=False,
        rope_scaling_factor=1.0,
    )
    return build_draft_model(
        provider, {"enabled": True, "model_name": draft_folder}, pg_collection=groups, policy_model_chunk=gpt
    )
