"""Draft and policy attention over packed sequences, under any context-parallel size."""

from nemo_ext.attention.comm import RingError
from nemo_ext.attention.functions import block_attention, causal_attention, ttt_attention
from nemo_ext.attention.resident import ResidentTrunk, gather_trunk, resident_bytes

__all__ = [
    "ResidentTrunk",
    "RingError",
    "block_attention",
    "causal_attention",
    "gather_trunk",
    "resident_bytes",
    "ttt_attention",
]
