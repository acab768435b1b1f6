"""What vLLM 0.20.0 does on a GPU and leaves out, or does wrong, on a CPU, added from its own parts.

- Its CPU runner never tells the policy which layers a draft taps. The layers are found, and handed over, by vLLM's own
  functions, in the order in which its GPU runner calls them.
- Its rejection sampler passes arguments that the CPU forms of the kernels do not know, and the kernel that lays out
  DFlash's blocks has no CPU form. The Triton kernels themselves run, in Triton's interpreter.
- Its CPU attention writes keys and values on the way only, while DFlash writes those of the trunk beforehand. vLLM's own
  operation for that is called from outside.
- Its CPU attention is wrong without a causal mask where there are keys from before. A row that sees all keys is the last
  row of a sequence of its own, so each is given to the same kernel as that.
- Its CPU worker does not say on which device it is, and waits for one without asking whether there is one.
"""

import torch
import triton
import vllm.v1.spec_decode.dflash as dflash
from triton.runtime.interpreter import InterpretedFunction
from vllm import _custom_ops as ops
from vllm.utils import cpu_triton_utils as cpu_forms
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode import utils as spec_decode
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

SAMPLER = (
    "rejection_greedy_sample_kernel",
    "rejection_random_sample_kernel",
    "expand_kernel",
    "sample_recovered_tokens_kernel",
)
BLOCKS = "copy_and_expand_dflash_inputs_kernel"


def install() -> None:
    """Adds all of it, before a runner is built, where they are missing; 0.25.1 has them."""
    if hasattr(CPUModelRunner, "_setup_eagle3_aux_hidden_state_outputs"):
        return
    load = CPUModelRunner.load_model

    def load_and_tap(self, *args, **kwargs) -> None:
        load(self, *args, **kwargs)
        if self.use_aux_hidden_state_outputs:
            layers = self._get_eagle3_aux_layers_from_config()
            self.model.set_aux_hidden_state_layers(layers or self.model.get_eagle3_default_aux_hidden_state_layers())

    CPUModelRunner.load_model = load_and_tap
    cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update = _write_keys_and_values
    ops.cpu_attention_with_kv_cache = _two_sided(ops.cpu_attention_with_kv_cache)
    CPUWorker.device = property(lambda self: torch.device("cpu"), lambda self, value: None)
    torch.accelerator.synchronize = lambda *args: None
    for name in SAMPLER:
        setattr(cpu_forms, name, _interpreted(rejection_sampler, name))  # the runner takes them from there
    setattr(dflash, BLOCKS, _interpreted(spec_decode, BLOCKS))
    dflash.triton = triton


def _write_keys_and_values(self, layer, key, value, kv_cache, slot_mapping) -> None:
    """Puts keys and values `[T, heads, D]` into the cache at their slots `[T]`."""
    key_cache, value_cache = kv_cache.unbind(0)
    isa = cpu_attn._get_attn_isa(key.dtype, kv_cache.shape[3], self.head_size)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa)


def _two_sided(attention):
    """vLLM's attention `[T, heads, D]`, right without a causal mask too."""

    def attend(*, query, key_cache, query_start_loc, seq_lens, block_table, causal, scheduler_metadata, **rest) -> None:
        if not causal:
            rows = query_start_loc.diff()
            seq_lens, block_table = seq_lens.repeat_interleave(rows), block_table.repeat_interleave(rows, dim=0)
            query_start_loc = torch.arange(len(query) + 1, dtype=query_start_loc.dtype)
            scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(query),
                num_heads=query.shape[1],
                num_kv_heads=key_cache.shape[1],
                head_dim=query.shape[2],
                seq_lens=seq_lens,
                dtype=query.dtype,
                query_start_loc=query_start_loc,
                causal=True,
                sliding_window_size=-1,
                isa=cpu_attn._get_attn_isa(query.dtype, key_cache.shape[2], query.shape[2]),
                enable_kv_split=True,
            )
        attention(
            query=query,
            key_cache=key_cache,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            causal=True,
            scheduler_metadata=scheduler_metadata,
            **rest,
        )

    return attend


def _interpreted(module, name: str) -> InterpretedFunction:
    """The Triton kernel of this name, over CPU tensors. Without a GPU vLLM leaves its source as a plain function."""
    module.tl = triton.language
    return InterpretedFunction(getattr(module, name))
