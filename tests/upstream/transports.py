"""Both ends of upstream's two refit transports in one process on a CPU: CUDA IPC over ZMQ, and packed NCCL broadcasts."""

import contextlib
import queue
import threading
import types
from collections.abc import Iterable, Iterator
from unittest import mock

import torch
import transformers
import zmq

# Upstream refuses to be imported beside a transformers that is newer than its own; vLLM's CPU build brings one.
with mock.patch.object(transformers, "__version__", "5.8.1"):
    import nemo_rl.models.policy  # noqa: F401

# isort: split
from nemo_rl.models.generation.vllm import quantization, vllm_backend
from nemo_rl.models.policy import utils as policy_utils
from nemo_rl.utils import packed_tensor
from vllm.v1.worker.worker_base import WorkerBase

try:
    from nemo_rl.models.generation.vllm.quantization import fp8  # noqa: F401
except ImportError:
    # It wants the vLLM that this upstream pins. It is asked whether the policy is FP8, and this one is not.
    quantization.fp8 = types.ModuleType(f"{quantization.__name__}.fp8")
    quantization.fp8.is_fp8_model = lambda config: False

# Main's sparse refits, which are not used here, bring a method that newer vLLM workers have already; vLLM takes no name twice.
if "synchronize_device" in vars(vllm_backend.VllmInternalWorkerExtension) and hasattr(WorkerBase, "synchronize_device"):
    del vllm_backend.VllmInternalWorkerExtension.synchronize_device

Stream = Iterable[tuple[str, torch.Tensor]]


class _NoStream:
    def synchronize(self):
        pass


class CpuTorch:
    """torch, without a device behind its "cuda"."""

    class cuda:
        Stream = _NoStream
        current_stream = staticmethod(_NoStream)
        current_device = staticmethod(lambda: torch.device("cpu"))
        stream = staticmethod(lambda stream: contextlib.nullcontext())
        empty_cache = synchronize = staticmethod(lambda *args: None)
        is_available = staticmethod(lambda: False)

    @staticmethod
    def empty(*size, device=None, **kwargs):
        return torch.empty(*size, **kwargs)

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def on_cpu(bucket_bytes: int) -> Iterator[None]:
    """Upstream's transports without CUDA, in buckets of about this size."""
    shared: dict[int, torch.Tensor] = {}

    def share(tensor):
        shared[id(tensor)] = tensor
        return id(tensor)

    replaced = [
        (vllm_backend, "torch", CpuTorch()),
        (vllm_backend, "rebuild_cuda_tensor_from_ipc", lambda handle, index: shared[handle]),
        (policy_utils, "torch", CpuTorch()),
        (policy_utils, "get_handle_from_tensor", share),
        (packed_tensor, "torch", CpuTorch()),
        (torch.cuda.nvtx, "range_push", lambda *args: None),
        (torch.cuda.nvtx, "range_pop", lambda: None),
        (packed_tensor, "get_target_packed_tensor_size", lambda: bucket_bytes),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class QueueGroup:
    """A broadcast from one end to the other of a queue."""

    def __init__(self):
        self.sent: queue.Queue = queue.Queue()
        self.sending = False

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        if self.sending:
            self.sent.put(tensor.clone())
        else:
            tensor.copy_(self.sent.get(timeout=30))


def collective(worker, stream: Stream) -> bool:
    """One refit of the worker through upstream's packed broadcasts; the stream is what the trainer sends."""
    group = QueueGroup()
    group.sending = True
    packed_tensor.packed_broadcast_producer(iter(stream), group, src=0, post_iter_func=lambda pair: pair[1])
    group.sending = False
    worker.model_update_group = group
    return worker.update_weights_from_collective()


def ipc(worker, stream: Stream, bucket_bytes: int) -> bool:
    """One refit of the worker through upstream's IPC stream."""
    worker.report_device_id = lambda: "no-gpu"
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 10000)
    socket.bind("ipc:///tmp/no-gpu.sock")
    failed: list[BaseException] = []

    def send():
        try:
            policy_utils.stream_weights_via_ipc_zmq_impl(iter(stream), 2 * bucket_bytes, socket, 0, "trainer")
        except BaseException as error:
            failed.append(error)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        taken = worker.update_weights_via_ipc_zmq()
    finally:
        sender.join(10)
        worker.cleanup()
        for name in ("zmq_socket", "zmq_context"):
            worker.__dict__.pop(name, None)
        context.destroy(linger=0)
    if failed:
        raise failed[0]
    return taken
