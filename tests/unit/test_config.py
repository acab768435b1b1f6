"""`policy.draft`: what it takes, what it refuses, and the line that says so."""

import pytest

from nemo_ext.config import (
    READ_BY,
    ConfigError,
    DraftConfig,
    Section,
    default_taps,
    show,
    taps_outside,
    validated,
)


def lines(**keys):
    with pytest.raises(ConfigError) as caught:
        validated(DraftConfig, keys, "policy.draft")
    return list(caught.value.lines)


def test_an_empty_section_is_off_and_has_whole_defaults():
    draft = validated(DraftConfig, {}, "policy.draft")
    assert (draft.enabled, draft.speculator_type, draft.ttt_steps, draft.pass_weights) == (
        False,
        "eagle3",
        3,
        [1.0] * 3,
    )
    assert draft.optimizer.lr > 0


def test_pass_weights_are_the_given_ones():
    assert validated(DraftConfig, {"ttt_steps": 2, "ttt_pass_weights": [1, 0.5]}).pass_weights == [1.0, 0.5]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"loss_wieght": 1.0}, "policy.draft.loss_wieght is not a setting; did you mean loss_weight?"),
        ({"optimizer": {"adam_eqs": 0.1}}, "policy.draft.optimizer.adam_eqs is not a setting; did you mean adam_eps?"),
        ({"ttt_steps": 0}, "policy.draft.ttt_steps is 0; it must be >= 1"),
        ({"ttt_steps": 2.5}, "policy.draft.ttt_steps is 2.5; it must be an integer"),
        ({"ttt_steps": "3"}, "policy.draft.ttt_steps is '3'; it must be an integer"),
        ({"enabled": "yes"}, "policy.draft.enabled is 'yes'; it must be true or false"),
        ({"enabled": None}, "policy.draft.enabled is null; it must be true or false"),
        ({"loss_weight": 0.0}, "policy.draft.loss_weight is 0.0; it must be > 0"),
        ({"loss_weight": float("nan")}, "policy.draft.loss_weight is nan; it must be a finite number"),
        ({"loss_weight": True}, "policy.draft.loss_weight is true; it must be a number"),
        ({"optimizer": {"lr": -1e-4}}, "policy.draft.optimizer.lr is -0.0001; it must be > 0"),
        ({"optimizer": {"adam_beta1": 1.0}}, "policy.draft.optimizer.adam_beta1 is 1.0; it must be < 1"),
        ({"optimizer": 3}, "policy.draft.optimizer is 3; it must be a section of keys"),
        ({"aux_layer_indices": []}, "policy.draft.aux_layer_indices is []; it must have at least 1 entry"),
        ({"aux_layer_indices": [0, "a"]}, "policy.draft.aux_layer_indices[1] is 'a'; it must be an integer"),
        ({"aux_layer_indices": [-1, 2]}, "policy.draft.aux_layer_indices is [-1, 2]; layers are numbered from 0"),
        ({"engine": "upstream"}, "policy.draft.engine is upstream; it must be one of nemo_ext"),
        ({"speculator_type": "eagel3"}, "policy.draft.speculator_type is eagel3; it must be one of eagle3, dflash, dspark"),
    ],
)  # fmt: skip
def test_one_wrong_key_is_one_line_with_its_path_value_and_remedy(keys, line):
    assert lines(**keys) == [line]


def test_a_key_far_from_all_others_lists_them():
    (line,) = lines(zzz=1)
    assert line.startswith("policy.draft.zzz is not a setting; the settings in policy.draft are anchors_per_seq, ")


@pytest.mark.parametrize("taps", [[2, 1], [1, 1, 2]])
def test_taps_that_vllm_would_reorder_are_refused(taps):
    (line,) = lines(aux_layer_indices=taps)
    assert line == f"policy.draft.aux_layer_indices is {taps}; vLLM sorts layers and drops repeats, so give [1, 2]"


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"gamma": 0}, "policy.draft.gamma is 0; it must be >= 1"),
        ({"sliding_window": 0}, "policy.draft.sliding_window is 0; it must be >= 1"),
        ({"anchors_per_seq": 0}, "policy.draft.anchors_per_seq is 0; it must be >= 1"),
        ({"mask_token_id": -1}, "policy.draft.mask_token_id is -1; it must be >= 0"),
        ({"markov_rank": 0}, "policy.draft.markov_rank is 0; it must be >= 1"),
        ({"tv_loss_alpha": -0.5}, "policy.draft.tv_loss_alpha is -0.5; it must be >= 0"),
        ({"loss_weighting": "expo"}, "policy.draft.loss_weighting is expo; it must be one of uniform, exp"),
        ({"anchors_per_sequence": 4}, "policy.draft.anchors_per_sequence is not a setting; did you mean anchors_per_seq?"),
        ({"ce_loss_alpha": 0.0, "tv_loss_alpha": 0.0},
         "policy.draft.ce_loss_alpha is 0.0 and tv_loss_alpha is 0.0, so nothing would teach the draft its tokens; set one "
         "of them > 0"),
    ],
)  # fmt: skip
def test_a_block_drafts_wrong_key_is_one_line(keys, line):
    assert lines(speculator_type="dspark", **keys) == [line]


# A value of each key that is not its default.
OTHER_VALUES = {
    "ttt_steps": 4, "ttt_pass_weights": [1.0, 1.0, 1.0], "mask_out_of_draft_vocab": True, "norm_output": False,
    "norm_before_residual": True, "fc_norm": True, "trunk_residency": "ring", "trunk_budget_gb": 2.0, "gamma": 4,
    "anchors_per_seq": 9, "mask_token_id": 0, "sliding_window": 8, "loss_weighting": "uniform", "hard_labels": True,
    "markov_rank": 8, "ce_loss_alpha": 0.2, "tv_loss_alpha": 0.5, "confidence_head_alpha": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
@pytest.mark.parametrize("key", READ_BY)
def test_another_kinds_settings_are_refused_unless_they_say_nothing(kind, key):
    default = DraftConfig.model_fields[key].default
    validated(DraftConfig, {"speculator_type": kind, key: default})
    if kind in READ_BY[key]:
        validated(DraftConfig, {"speculator_type": kind, key: OTHER_VALUES[key]})
        return
    (line,) = lines(speculator_type=kind, **{key: OTHER_VALUES[key]})
    assert line == (
        f"policy.draft.{key} is {show(OTHER_VALUES[key])}, which is a setting of {' and '.join(READ_BY[key])} and not of "
        f"speculator_type {kind}; leave it out, or set {show(default)}, the default"
    )


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1.0, 1.0], "2 values, but ttt_steps is 3"),
        ([0.0, 0.0, 0.0], "one of them > 0"),
        ([1.0, -1.0, 1.0], "weights must be >= 0"),
    ],
)
def test_pass_weights_must_fit_the_passes(weights, says):
    (line,) = lines(ttt_pass_weights=weights)
    assert line.startswith(f"policy.draft.ttt_pass_weights is {weights}") and says in line


def test_every_wrong_key_has_its_line():
    found = lines(ttt_steps=0, los_weight=1, optimizer={"lr": 0})
    assert sorted(line.split(" is ")[0] for line in found) == [
        "policy.draft.los_weight", "policy.draft.optimizer.lr", "policy.draft.ttt_steps",
    ]  # fmt: skip


def test_a_missing_key_of_a_list_entry_has_its_place():
    class Entry(Section):
        name: str

    class Whole(Section):
        entries: list[Entry]

    with pytest.raises(ConfigError, match=r"^data.entries\[1\].name is missing; set it$"):
        validated(Whole, {"entries": [{"name": "a"}, {}]}, "data")
    with pytest.raises(ConfigError, match=r"^entries\[0\].nam is not a setting; did you mean name\?$"):
        validated(Whole, {"entries": [{"name": "a", "nam": 1}]})


@pytest.mark.parametrize(
    ("layers", "taps"), [(36, [1, 17, 32]), (8, [1, 3, 4]), (6, [0, 2, 5]), (4, [0, 1, 3]), (2, [0, 1]), (1, [0])]
)
def test_default_taps_are_vllms_where_they_do_not_collapse(layers, taps):
    assert default_taps(layers) == taps
    assert not taps_outside(taps, layers)


def test_taps_beyond_the_policy_name_its_last_layer():
    (line,) = taps_outside([1, 4], 4)
    assert line.startswith(
        "policy.draft.aux_layer_indices is [1, 4], but the policy has 4 layers; the highest index is 3"
    )


def test_shown_values_are_short():
    assert show({"a": 1}) == "a section"
    assert len(show(list(range(100)))) == 80
