"""The embedded example: synchronous GRPO on one CPU machine (Ray, Megatron-core on gloo, vLLM)."""
