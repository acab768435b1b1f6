"""The draft models, as modules on Megatron's tensor-parallel layers."""
