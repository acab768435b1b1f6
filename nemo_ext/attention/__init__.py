"""Draft and policy attention over packed sequences, under any context-parallel size."""

from nemo_ext.attention.comm import RingError
from nemo_ext.attention.functions import block_attention, causal_attention, ttt_attention

__all__ = ["RingError", "block_attention", "causal_attention", "ttt_attention"]
