"""Gradients and optimizers of `cotrain.optim`, with Megatron made ready for a CPU first."""

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from nemo_ext.cotrain.optim import TrainOptimizer, build_optimizer, finalize_grads, wrap_ddp

__all__ = ["TrainOptimizer", "build_optimizer", "finalize_grads", "wrap_ddp"]
