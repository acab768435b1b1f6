"""What is trained is what the pinned engine serves, before and after a refit through NeMo-RL's own transports.

Every draft kind, flag and vocabulary that the version's table says yes to. The engine is vLLM's on a CPU: the V1 runner and,
with 0.25.1, in a second run, the V2 runner (`v2_runner.py`). The V1 runner serves DSpark with this package's proposer.
"""

import contextlib
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import fixtures_block_drafts as block_drafts
from tests import fixtures_models as models
from tests.e2e.conftest import stream
from tests.train_is_serve import (
    assert_block_is_served,
    assert_eagle3_is_served,
    block_draft,
    eagle3_draft,
    one_step_later,
)
from tests.upstream import v2_runner
from tests.upstream.served import serving

# isort: split
from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_hf import export_block
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_hf import export_eagle3
from nemo_ext.nemo_rl.config import upstream_version
from nemo_ext.nemo_rl.engines import engine_lines
from nemo_ext.nemo_rl.support import LIMITS

DRAFTED = 4
EAGLE3 = {
    "plain": {},
    "reduced vocabulary": {"draft_vocab_size": 32},
    "norm_before_residual, two layers": {"norm_before_residual": True, "num_hidden_layers": 2},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_output": {"norm_output": True},
    "fc_norm": {"fc_norm": True},
    "four taps": {"taps": (1, 2, 3, 4)},
    "two taps": {"taps": (1, 3)},
}
BLOCK = {
    "dflash": {"num_attention_heads": 4},
    "dflash, reduced vocabulary": {"draft_vocab_size": 32},
    "dflash, causal": {"causal": True},
    "dflash, window": {"window": 3},
    "dflash, window, two-sided": {"window": 3, "causal": False},
    "dspark": {"method": "dspark", "num_attention_heads": 4},
    "dspark, window, reduced vocabulary": {"method": "dspark", "window": 6, "causal": False, "draft_vocab_size": 32},
}
if v2_runner.wanted():  # which has vLLM's own speculator for it
    BLOCK["dspark, causal"] = {"method": "dspark", "causal": True}


@pytest.fixture
def policy(tmp_path):
    """A policy whose layers all matter: its config and tensors, in a folder."""
    config = models.policy_config()
    tensors = models.policy_tensors(config, 0, mixing=1.0)
    models.write_model(tmp_path / "policy", config, tensors)
    return config, tensors


def served_by_this_version(shape) -> bool:
    """Whether the support table says yes."""
    version, kind = upstream_version(), getattr(shape, "kind", "eagle3")
    told = [limit for limit in LIMITS if limit.setting == "draft.speculator_type"]
    unknown = any(limit.broken({"draft": {"speculator_type": kind}}, version) for limit in told)
    return not unknown and not list(engine_lines(shape, version))


def assert_taps_are_layer_outputs(captured, folder, tensors, layers) -> None:
    """The hidden states that reached the draft are the policy's outputs of the layers that the trainer taps."""
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").eval()
    reference.load_state_dict(tensors)
    outputs = {}
    for layer in layers:
        reference.model.layers[layer].register_forward_hook(
            lambda module, args, output, layer=layer: outputs.__setitem__(
                layer, output if torch.is_tensor(output) else output[0]
            )
        )
    for one in captured[::3]:
        rows = len(one.taps_Rt)
        with torch.no_grad():
            reference(torch.tensor([one.token_ids[:rows]]))
        taps_Rt = torch.cat([outputs[layer][0] for layer in layers], dim=-1)
        torch.testing.assert_close(one.taps_Rt, taps_Rt, atol=2e-5, rtol=0)


@pytest.mark.parametrize("variant", EAGLE3.values(), ids=list(EAGLE3))
def test_eagle3(policy, tmp_path, variant):
    config, tensors = policy
    shape = Eagle3Config.from_hf(models.draft_config(config, **variant))
    hf_config = shape.to_hf()
    weights = models.random_draft(hf_config | {"target_hidden_size": config["hidden_size"]})
    models.write_model(tmp_path / "draft", hf_config, weights)
    make = partial(eagle3_draft, hf_config, weights)
    hold_to_the_engine("eagle3", shape, make, tensors, tmp_path, assert_eagle3_is_served, export_eagle3)


@pytest.mark.parametrize("variant", BLOCK.values(), ids=list(BLOCK))
def test_block_drafts(policy, tmp_path, variant):
    config, tensors = policy
    made = block_drafts.block_draft_config(config, **variant)
    shape = BlockConfig.from_hf(made)
    weights = block_drafts.random_block_draft(made)
    hf_config = shape.to_hf()
    models.write_model(tmp_path / "draft", hf_config, weights)
    make = partial(block_draft, hf_config, weights)
    served = partial(assert_block_is_served, confidence=False)  # neither engine reads that head
    hold_to_the_engine(shape.kind, shape, make, tensors, tmp_path, served, export_block)


def hold_to_the_engine(kind, shape, make_draft, tensors, folder, assert_served, export) -> None:
    """Train = serve before and after a refit where the table says yes. Where it says no, the engine refuses the draft or
    serves another function than the one that trains."""
    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(serving(folder / "policy", folder / "draft", kind, DRAFTED))
        except Exception:
            assert not served_by_this_version(shape)
            return
        draft = make_draft()  # Megatron's layers ask for process groups, which the engine makes
        if not served_by_this_version(shape):
            with pytest.raises(AssertionError, match="not close"):
                assert_served(engine, draft, tensors)
            return
        engine.announce(stream(tensors, dict(export(draft))))
        captured = assert_served(engine, draft, tensors)
        assert_taps_are_layer_outputs(captured, folder / "policy", tensors, shape.tap_layers)
        for transport in ("ipc", "collective"):
            one_step_later(draft)
            assert engine.refit(transport, stream(tensors, dict(export(draft))))
            assert_served(engine, draft, tensors)
