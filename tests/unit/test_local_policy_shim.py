"""The Megatron shim: what it answers without CUDA, and that it does nothing with it."""

import subprocess
import sys

import torch

from nemo_ext.local import megatron_cpu  # noqa: F401


def test_cuda_spellings_mean_the_cpu():
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert torch.tensor([1.0], device="cuda").cuda().device.type == "cpu"
    assert torch.zeros(2, dtype=torch.int64, device="meta").device.type == "meta"
    torch.cuda.synchronize()


def test_tensor_types_have_their_cuda_names_and_still_convert():
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64


def test_the_cuda_generator_is_the_cpu_generator():
    from megatron.core.tensor_parallel import random

    before = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(7)
    first = torch.rand(1)
    random._set_cuda_rng_state(before)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(1), first)


def run_python(code: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_nothing_is_touched_where_cuda_is_there():
    run_python(
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "before = (torch.zeros, torch.tensor, torch.compile, torch.Tensor.type, torch.Tensor.cuda)\n"
        "before += (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.get_rng_state)\n"
        "import nemo_ext.local.megatron_cpu\n"
        "after = (torch.zeros, torch.tensor, torch.compile, torch.Tensor.type, torch.Tensor.cuda)\n"
        "after += (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.get_rng_state)\n"
        "assert before == after\n"
    )


def test_megatrons_fused_functions_are_not_compiled():
    run_python(
        "import sys\n"
        "import torch\n"
        "compile_function = torch.compile\n"
        "import nemo_ext.local.megatron_cpu\n"
        "from megatron.core.fusions.fused_bias_swiglu import swiglu\n"
        "assert torch.compile is compile_function\n"
        "assert swiglu(torch.ones(1, 4)).shape == (1, 2)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )


def test_fused_functions_are_not_compiled_after_a_late_import_either():
    run_python(
        "import torch\n"
        "import megatron.core\n"
        "from megatron.core.fusions.fused_bias_swiglu import swiglu\n"
        "import nemo_ext.local.megatron_cpu\n"
        "assert swiglu(torch.ones(1, 4)).shape == (1, 2)\n"
        "assert not torch._dynamo.utils.counters['frames']\n"
    )
