"""The process environment that vLLM's CPU build needs, to be set before vllm is imported."""

import os

import torch

# Without the first three, the first request spends up to a minute in a compiler and two OpenMP threads under
# contention cost twenty times what one does. An engine core in a process of its own could not take tensors by call.
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
REQUIRED_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def prepare_environment() -> None:
    """Sets what is not set yet (and what must be): CPU_ENVIRONMENT where there is no GPU, REQUIRED_ENVIRONMENT always.

    A Ray actor is better given both as its runtime environment, so that they stand before its torch is imported.
    """
    os.environ.update(REQUIRED_ENVIRONMENT)
    if torch.cuda.is_available():
        return
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # OpenMP read its variable when torch was imported.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
