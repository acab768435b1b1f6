"""Windows and directions of a block draft's layers, against the functions by which vLLM resolves them."""

import itertools
import json

import pytest

from nemo_ext.config import ConfigError
from nemo_ext.drafts.block_config import FULL, SLIDING, BlockConfig
from tests.unit.block_cases import make_config

pytestmark = pytest.mark.e2e

TYPES = [None, [FULL, FULL], [SLIDING, SLIDING]]  # vLLM's V1 runner has no mixture
DFLASH = [{}, {"use_swa": True}, {"swa_window_size": 5}, {"use_swa": True, "swa_window_size": 5, "causal": False}]
TOP = [
    {},
    {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    {"use_sliding_window": False, "sliding_window": 7},
    {"use_sliding_window": True, "sliding_window": 7, "is_causal": False},
]


def test_every_way_to_say_it_resolves_as_in_vllm(tmp_path):
    transformers = pytest.importorskip("transformers")
    from vllm.model_executor.models.qwen3_dflash import _resolve_layer_attention

    base = make_config("dflash").to_hf()
    for key in ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"):
        del base[key]
    del base["dflash_config"]["causal"]
    seen = set()
    for types, dflash, top in itertools.product(TYPES, DFLASH, TOP):
        config = base | top | {"dflash_config": base["dflash_config"] | dflash}
        config |= {} if types is None else {"layer_types": types}
        (tmp_path / "config.json").write_text(json.dumps(config))
        served = transformers.AutoConfig.from_pretrained(tmp_path)
        try:
            theirs = [_resolve_layer_attention(served, layer) for layer in range(2)]
        except ValueError:
            with pytest.raises(ConfigError, match="the window is null"):
                BlockConfig.from_hf(config)
            continue
        shape = BlockConfig.from_hf(config)
        ours = [(shape.window(layer), shape.causal_in_block(layer)) for layer in range(2)]
        assert ours == theirs, config
        again = BlockConfig.from_hf(shape.to_hf())
        assert [(again.window(layer), again.causal_in_block(layer)) for layer in range(2)] == theirs
        seen.add(tuple(theirs))
    assert len(seen) >= 5, seen
