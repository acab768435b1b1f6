"""What each pinned engine cannot serve as it would train, told by name; the engines themselves are asked in tests/upstream."""

from dataclasses import replace

import pytest

from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_formats import read_alike
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.nemo_rl.engines import engine_lines
from nemo_ext.nemo_rl.support import MAIN, V070
from tests.fixtures_models import policy_config

POLICY = policy_config()
EAGLE3 = Eagle3Config.for_policy(POLICY, (0, 1, 3))
DFLASH = BlockConfig.for_policy("dflash", POLICY, (0, 1), gamma=3, mask_token_id=0)
WINDOW = BlockConfig.for_policy("dflash", POLICY, (0, 1), gamma=3, mask_token_id=0, sliding_window=8)
DSPARK = BlockConfig.for_policy("dspark", POLICY, (0, 1), gamma=3, mask_token_id=0, sliding_window=8)
MIXED = replace(WINDOW, num_layers=2, layer_types=("sliding_attention", "full_attention"), causal=None)


@pytest.mark.parametrize("shape", [EAGLE3, DFLASH])
def test_what_every_engine_serves_is_not_refused(shape):
    assert [list(engine_lines(shape, version)) for version in (V070, MAIN, None)] == [[], [], []]


@pytest.mark.parametrize(
    ("shape", "version", "told"),
    [
        (
            replace(EAGLE3, norm_output=True),
            V070,
            "policy.draft.norm_output is true, which the vLLM 0.20.0 of NeMo-RL v0.7.0",
        ),
        (replace(EAGLE3, fc_norm=True), V070, "policy.draft.fc_norm is true"),
        (replace(EAGLE3, tap_layers=(0, 1)), V070, "policy.draft.aux_layer_indices is [0, 1], 2 layers"),
        (replace(EAGLE3, tap_layers=(0, 1, 2, 3)), V070, "takes exactly three; set three"),
        (replace(WINDOW, causal=False), V070, "policy.draft.sliding_window is 8"),
        (replace(DFLASH, causal=True), V070, "is a causal DFlash draft"),
        (replace(DSPARK, causal=True), MAIN, "is a causal DSpark draft"),
        (MIXED, MAIN, "mixes full_attention and sliding_attention, which the vLLM 0.25.1"),
    ],
)
def test_what_an_engine_serves_otherwise_is_refused_in_a_line(shape, version, told):
    (line,) = engine_lines(shape, version)
    assert told in line and "\n" not in line
    other = {V070: MAIN, MAIN: None}[version]
    assert list(engine_lines(shape, other)) == []


def test_what_is_written_is_read_alike():
    """0.25.1 has other defaults for windows than 0.32, and 0.20.0 counts `target_layer_ids` from one."""
    for shape in (DFLASH, WINDOW, DSPARK, MIXED):
        assert read_alike(shape.to_hf())
    config = WINDOW.to_hf()
    assert config["dflash_config"]["causal"] is True and DSPARK.to_hf()["dflash_config"]["causal"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2] and config["target_layer_ids"] == [0, 1]
    del config["dflash_config"]["causal"]
    assert not read_alike(config)
    config = DFLASH.to_hf()
    del config["eagle_aux_hidden_state_layer_ids"]
    assert not read_alike(config)
