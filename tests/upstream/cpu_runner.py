"""What vLLM 0.20.0 does on a GPU and leaves out on a CPU, added from its own parts.

- Its CPU runner never tells the policy which layers a draft taps. The layers are found, and handed over, by vLLM's own
  functions, in the order in which its GPU runner calls them.
- Its kernel that lays out DFlash's blocks has no CPU form. The kernel itself runs, in Triton's interpreter.
"""

import triton
import vllm.v1.spec_decode.dflash as dflash
from triton.runtime.interpreter import InterpretedFunction
from vllm.v1.spec_decode import utils as kernels
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

KERNEL = "copy_and_expand_dflash_inputs_kernel"


def install() -> None:
    """Adds both, where they are missing; 0.25.1 has them."""
    if hasattr(CPUModelRunner, "_setup_eagle3_aux_hidden_state_outputs"):
        return
    load = CPUModelRunner.load_model

    def load_and_tap(self, *args, **kwargs) -> None:
        load(self, *args, **kwargs)
        if self.use_aux_hidden_state_outputs:
            layers = self._get_eagle3_aux_layers_from_config()
            self.model.set_aux_hidden_state_layers(layers or self.model.get_eagle3_default_aux_hidden_state_layers())

    CPUModelRunner.load_model = load_and_tap
    kernels.tl = triton.language
    setattr(dflash, KERNEL, InterpretedFunction(getattr(kernels, KERNEL)))
    dflash.triton = triton
