"""The NeMo-RL front door: patches for pinned upstream versions, and thin subclasses of its policy worker and vLLM backend.

Nothing here computes a loss or a draft; `cotrain/`, `taps/` and `rollout/` do.
"""
