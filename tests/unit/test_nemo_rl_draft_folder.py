"""The folder that trainer and vLLM both start from: fresh, given, or brought into vLLM's form."""

import json
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nemo_ext.config import ConfigError, DraftConfig
from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_init import init_block
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_init import init_eagle3
from nemo_ext.nemo_rl import draft_folder
from tests.fixtures_models import policy_config

policy_hf_config = draft_folder.policy_hf_config  # the tests of folders put another in its place
RUN = {"model_name": "policy", "max_total_sequence_length": 64}


@pytest.fixture(autouse=True)
def policy(monkeypatch):
    config = policy_config(vocab_size=64)
    monkeypatch.setattr(draft_folder, "policy_hf_config", lambda policy: config)
    return config


def settings(kind: str = "eagle3", **more) -> DraftConfig:
    sizes = {} if kind == "eagle3" else {"gamma": 3, "mask_token_id": 63}
    return DraftConfig(enabled=True, speculator_type=kind, **sizes | more)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_a_fresh_draft_is_written_once_and_found_again(tmp_path, kind):
    draft = settings(kind)
    folder = draft_folder.starting_folder(draft, RUN, str(tmp_path))
    weights = tmp_path / "draft_start" / "model.safetensors"
    assert folder == str(weights.parent)
    before = weights.stat().st_mtime_ns
    assert draft_folder.starting_folder(draft, RUN, str(tmp_path)) == folder
    assert weights.stat().st_mtime_ns == before
    # As the driver does, which hands its folder to trainer and vLLM.
    assert draft_folder.draft_of_folder(folder, draft.model_copy(update={"model_name": folder}), RUN)[1]
    assert not list(weights.parent.glob("*.partial"))


def test_a_fresh_draft_of_other_settings_is_refused(tmp_path):
    draft_folder.starting_folder(settings(), RUN, str(tmp_path))
    with pytest.raises(ConfigError, match="there is one of other settings; use another checkpointing.checkpoint_dir"):
        draft_folder.starting_folder(settings(num_layers=2), RUN, str(tmp_path))


@pytest.mark.parametrize(
    ("draft", "told"),
    [
        (settings("dflash", gamma=None), "policy.draft.gamma is null"),
        (settings("dspark", mask_token_id=None), "policy.draft.mask_token_id is null"),
        (settings("dflash", mask_token_id=64), "mask_token_id is 64, outside the policy's vocabulary of 64"),
        (settings(aux_layer_indices=[0, 99]), "aux_layer_indices is [0, 99], but the policy has"),
        (settings(draft_vocab_size=32), "draft_vocab_size is 32, but a fresh draft knows no token counts"),
    ],
)
def test_what_a_fresh_draft_lacks_is_told(tmp_path, draft, told):
    with pytest.raises(ConfigError) as raised:
        draft_folder.starting_folder(draft, RUN, str(tmp_path))
    assert told in raised.value.lines[0]
    assert not list(tmp_path.iterdir())


def test_a_draft_in_another_form_is_brought_into_vllms(tmp_path, policy):
    shape = BlockConfig.for_policy("dspark", policy, [0, 1], gamma=3, mask_token_id=63, markov_rank=8)
    config = shape.to_hf()
    heads = ("markov_rank", "enable_confidence_head", "confidence_head_with_markov")
    config["dflash_config"] |= {key: config.pop(key) for key in heads}  # SpecForge's form
    config["dflash_config"]["projector_type"] = "dspark"
    given = tmp_path / "given"
    given.mkdir()
    (given / "config.json").write_text(json.dumps(config))
    tensors = init_block(shape, seed=1)
    save_file(tensors, given / "model.safetensors")
    draft = settings("dspark", model_name=str(given), markov_rank=8)
    folder = draft_folder.starting_folder(draft, RUN, str(tmp_path / "run"))
    served = json.loads((tmp_path / "run" / "draft_start" / "config.json").read_text())
    assert folder == str(tmp_path / "run" / "draft_start")
    assert [served[key] for key in heads] == [8, True, True]
    assert load_file(tmp_path / "run" / "draft_start" / "model.safetensors").keys() == tensors.keys()


def public_draft(folder, policy, **changes) -> dict[str, torch.Tensor]:
    """An EAGLE-3 draft as many are published: one pickle of tensors, and a config that leaves the tapped layers out."""
    taps = draft_folder.default_taps(policy["num_hidden_layers"])
    shape = Eagle3Config.for_policy(policy, taps)
    config = shape.to_hf() | {"eagle_config": {}} | changes
    del config["eagle_aux_hidden_state_layer_ids"], config["num_aux_hidden_states"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = init_eagle3(shape, 3)
    torch.save(tensors, folder / "pytorch_model.bin")
    return tensors


def test_a_public_pickled_draft_is_brought_into_vllms_form(tmp_path, policy):
    tensors = public_draft(tmp_path / "given", policy)
    draft = settings(model_name=str(tmp_path / "given"))
    folder = draft_folder.starting_folder(draft, RUN, str(tmp_path / "run"))
    assert folder == str(tmp_path / "run" / "draft_start")
    found = load_file(tmp_path / "run" / "draft_start" / "model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)
    _, shape = draft_folder.draft_of_folder(folder, draft.model_copy(update={"model_name": folder}), RUN)
    assert list(shape.tap_layers) == draft_folder.default_taps(policy["num_hidden_layers"])
    assert draft_folder.starting_folder(draft, RUN, str(tmp_path / "run")) == folder


def test_a_public_draft_that_does_not_fit_leaves_nothing_behind(tmp_path, policy):
    public_draft(tmp_path / "given", policy, vocab_size=63)
    with pytest.raises(ConfigError, match=f"policy.draft.model_name is {tmp_path / 'given'}: vocab_size is 63"):
        draft_folder.starting_folder(settings(model_name=str(tmp_path / "given")), RUN, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "draft_start").exists()


def test_a_pickle_of_anything_but_tensors_is_refused(tmp_path, policy):
    public_draft(tmp_path / "given", policy)
    (tmp_path / "given" / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    with pytest.raises(
        ConfigError, match="pytorch_model.bin is no pickle of plain tensors .* save the draft as model.safe"
    ):
        draft_folder.starting_folder(settings(model_name=str(tmp_path / "given")), RUN, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "draft_start").exists()


def test_a_multimodal_policy_is_refused(tmp_path):
    transformers.Qwen2_5_VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"policy.model_name is .* a multimodal model \(qwen2_5_vl\)"):
        policy_hf_config({"model_name": str(tmp_path)})


def test_a_policy_that_caps_its_logits_is_refused(tmp_path):
    transformers.Gemma2Config().save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"whose config has final_logit_softcapping 30.0; a draft's teacher is the plain"
    ):
        policy_hf_config({"model_name": str(tmp_path)})


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_ranks_may_share_a_drafts_key_heads(tmp_path, policy, kind):
    policy |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    run = RUN | {"megatron_cfg": {"tensor_model_parallel_size": 4}}
    assert draft_folder.starting_folder(settings(kind), run, str(tmp_path))


def test_a_draft_that_tensor_parallelism_cannot_cut_is_refused(tmp_path):
    run = RUN | {"megatron_cfg": {"tensor_model_parallel_size": 3}}
    with pytest.raises(
        ConfigError, match="tensor_model_parallel_size is 3, which does not divide the draft's num_atten"
    ):
        draft_folder.starting_folder(settings(), run, str(tmp_path))
    assert not (tmp_path / "draft_start").exists()
