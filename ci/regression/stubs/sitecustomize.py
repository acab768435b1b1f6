"""Read at the start of every process of the regression environment: Python 3.11 for code that was written for 3.13, and
stand-ins for packages that a CPU does without."""

import typing

import stub_modules
import typing_extensions

# pydantic wants its own TypedDict before 3.12, and `override` is newer than 3.11.
typing.TypedDict = typing_extensions.TypedDict
typing.override = typing_extensions.override

stub_modules.install(
    missing=["accelerate", "decord", "mlflow", "pynvml", "swanlab", "wandb"],
    replaced=[
        "megatron.energon",
        # These need Transformer Engine, which looks like a real one to Megatron as soon as it can be imported.
        "megatron.bridge.models.gpt_full_te_layer_autocast_spec",
        "megatron.bridge.peft.lora_layers",
    ],
    # Upstream's main is ahead of the Megatron-core that is on the index.
    aliases={
        "megatron.core.distributed.fsdp.mcore_fsdp_adapter": {
            "FullyShardedDataParallelV1": "FullyShardedDataParallel",
            "FullyShardedDataParallelV2": "FullyShardedDataParallel",
        }
    },
)
