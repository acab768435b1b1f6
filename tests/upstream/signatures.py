"""The signature lock: what of upstream's the subclasses override or call, and a digest of each signature per version.

`python -m tests.upstream.signatures` prints the lock of the checkout on the path.
"""

import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stub_modules import StubFinder

from nemo_ext.nemo_rl.patching import recognise

LOCK = Path(__file__).parent / "signatures.json"
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker:MegatronPolicyWorkerImpl"
EXTENSION = "nemo_rl.models.generation.vllm.vllm_backend:VllmInternalWorkerExtension"
DATA = "nemo_rl.distributed.batched_data_dict:BatchedDataDict"
NAMES = (
    f"{WORKER}.__init__",
    f"{WORKER}.train",
    f"{WORKER}.save_checkpoint",
    f"{WORKER}.move_model",
    f"{WORKER}.move_optimizer",
    f"{WORKER}._iter_params_with_optional_kv_scales",
    f"{DATA}.get_batch",
    f"{DATA}.make_microbatch_iterator",
    f"{DATA}.make_microbatch_iterator_for_packable_sequences",
    f"{DATA}.make_microbatch_iterator_with_dynamic_shapes",
    f"{DATA}.get_microbatch_iterator_for_packable_sequences_len",
    "nemo_rl.models.megatron.data:_get_pack_sequence_parameters_for_megatron",
    "nemo_rl.models.policy.utils:get_runtime_env_for_policy_worker",
    "nemo_rl.models.policy.utils:resolve_policy_worker_cls",
    "nemo_rl.algorithms.grpo:setup",
    f"{EXTENSION}.prepare_refit_info",
    f"{EXTENSION}.update_weights_via_ipc_zmq",
    f"{EXTENSION}.update_weights_from_collective",
    f"{EXTENSION}._load_weights",
)


def signatures() -> dict[str, str | None]:
    """A digest of each signature; None where there is no such thing."""
    with without_vllm():
        return {name: _digest(name) for name in NAMES}


@contextmanager
def without_vllm() -> Iterator[None]:
    """Meanwhile files that import vLLM at their top can be imported."""
    finder = StubFinder(["vllm"])
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


def changed(upstream: Path) -> list[str]:
    """Names whose signature is not the locked one of this checkout's version."""
    locked = json.loads(LOCK.read_text())[recognise(upstream).patches.version]
    return [name for name, digest in signatures().items() if digest is None or digest != locked.get(name)]


def _digest(name: str) -> str | None:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None:
        return None
    # Names, kinds and whether there is a default: annotations may be written in several ways.
    told = [(p.name, p.kind.name, p.default is p.empty) for p in inspect.signature(found).parameters.values()]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


if __name__ == "__main__":
    print(json.dumps(signatures(), indent=2))
