"""What the vLLM of each pinned NeMo-RL serves otherwise than it would be trained, by name.

Each line but that about mixtures is held on the engine itself by `tests/upstream/test_train_is_serve.py`; that one by reading
(`test_engine_facts.py`).
"""

from collections.abc import Iterator

from nemo_ext.drafts.block_config import FULL, SLIDING, BlockConfig
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.kinds import Shape
from nemo_ext.nemo_rl.families import ENGINES
from nemo_ext.nemo_rl.support import MAIN, V070


def engine_lines(shape: Shape, version: str | None) -> Iterator[str]:
    """A line for everything in a draft's shape that this version's engine would not serve as it trains.

    A version that is not known (None) is not held against a draft.
    """
    limits = {(V070, Eagle3Config): _eagle3_v070, (V070, BlockConfig): _block_v070, (MAIN, BlockConfig): _block_main}
    find = limits.get((version, type(shape)))
    if find is not None:
        engine = f"the {ENGINES[version]} of NeMo-RL {version}"
        yield from (line.format(engine=engine) for line in find(shape))


def _eagle3_v070(shape: Eagle3Config) -> Iterator[str]:
    if shape.norm_output:
        yield (
            "policy.draft.norm_output is true, which {engine} ignores, so it would draft from other hidden states than it "
            "was trained on; set false, with a draft that was trained so"
        )
    if shape.fc_norm:
        yield "policy.draft.fc_norm is true, which {engine} does not have; set false, with a draft that was trained so"
    if len(shape.tap_layers) != 3:
        yield (
            f"policy.draft.aux_layer_indices is {list(shape.tap_layers)}, {len(shape.tap_layers)} layers, but {{engine}} "
            "takes exactly three; set three"
        )


def _block_v070(shape: BlockConfig) -> Iterator[str]:
    if SLIDING in shape.layer_types:
        yield (
            f"policy.draft.sliding_window is {shape.sliding_window}, but {{engine}} knows no window in a DFlash draft and "
            "would let it see everything; set null, with a draft without one"
        )
    if any(map(shape.causal_in_block, range(shape.num_layers))):
        yield (
            "policy.draft.model_name is a causal DFlash draft (dflash_config.causal), but {engine} lets every slot of a "
            "block see the others; use a draft that was trained two-sided"
        )


def _block_main(shape: BlockConfig) -> Iterator[str]:
    if len(set(shape.layer_types)) > 1:
        yield (
            f"policy.draft.model_name is a draft that mixes {FULL} and {SLIDING}, which {{engine}} refuses; use one whose "
            "layers are all alike"
        )
    elif shape.kind == "dspark" and any(map(shape.causal_in_block, range(shape.num_layers))):
        yield (
            "policy.draft.model_name is a causal DSpark draft (dflash_config.causal), but {engine} lets every slot of a "
            "block see the others; use a draft that was trained two-sided"
        )
