"""Manifests, accept statistics, read-back names and the sampler's probes."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from nemo_ext.rollout.engine import in_buckets
from nemo_ext.rollout.errors import RefreshError
from nemo_ext.rollout.manifest import TensorSpec, check_manifest, folder_manifest
from nemo_ext.rollout.metrics import AcceptStats, read_counters, stats_between
from nemo_ext.rollout.readback import draft_parameter
from nemo_ext.rollout.sampler_fix import (
    correct_sampler,
    expand_batch_to_tokens,
    expansion_is_wrong,
    top_k_needs_rows,
)

EXPECTED = {
    spec.name: spec
    for spec in (
        TensorSpec("norm.weight", (4,), torch.float32),
        TensorSpec("draft.fc.weight", (4, 12), torch.float32),
        TensorSpec("draft.d2t", (4,), torch.int64),
        TensorSpec("draft.t2d", (8,), torch.bool),
    )
}


def changed(**changes) -> list[TensorSpec]:
    """EXPECTED with draft.fc.weight changed."""
    return [spec._replace(**changes) if spec.name == "draft.fc.weight" else spec for spec in EXPECTED.values()]


def test_a_whole_manifest_passes_and_the_inverse_map_is_optional():
    check_manifest(EXPECTED.values(), EXPECTED)
    check_manifest([spec for spec in EXPECTED.values() if spec.name != "draft.t2d"], EXPECTED)
    check_manifest(changed(dtype=torch.bfloat16), EXPECTED)


@pytest.mark.parametrize(
    "declared, message",
    [
        ([spec for spec in EXPECTED.values() if spec.name != "draft.d2t"], "missing: draft.d2t$"),
        (changed(name="draft.fcc.weight"), "missing: draft.fc.weight; not expected: draft.fcc.weight$"),
        (changed(shape=(12, 4)), r"misshaped: draft.fc.weight is \[12, 4\], needs \[4, 12\]$"),
        (changed(dtype=torch.int64), "of the wrong type: draft.fc.weight is torch.int64, needs torch.float32$"),
        ([*EXPECTED.values(), EXPECTED["norm.weight"]], "declared twice: norm.weight$"),
        ([], "missing: norm.weight, draft.fc.weight, draft.d2t$"),
    ],
)
def test_a_manifest_that_is_not_whole_names_the_tensor(declared, message):
    with pytest.raises(RefreshError, match=message):
        check_manifest(declared, EXPECTED)


def test_a_folders_manifest_comes_from_all_its_files(tmp_path):
    save_file(
        {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4, dtype=torch.int64)},
        tmp_path / "1.safetensors",
    )
    save_file({"c": torch.tensor(1.0)}, tmp_path / "2.safetensors")
    assert folder_manifest(tmp_path, "draft.") == {
        "draft.a": ("draft.a", (2, 3), torch.bfloat16),
        "draft.b": ("draft.b", (4,), torch.int64),
        "draft.c": ("draft.c", (), torch.float32),
    }
    with pytest.raises(RefreshError, match=r"has no \*.safetensors"):
        folder_manifest(tmp_path / "nowhere")


def test_buckets_hold_the_stream_in_order():
    stream = [(str(i), torch.zeros(i)) for i in (1, 2, 3, 50, 1)]
    assert [[name for name, _ in bucket] for bucket in in_buckets(stream, 13)] == [["1", "2"], ["3"], ["50"], ["1"]]
    assert list(in_buckets([], 13)) == []


def reading(drafts: int, per_position: list[int]) -> list[SimpleNamespace]:
    """What llm.get_metrics() gives, with a metric that is not about speculation."""
    name = "vllm:spec_decode_num_"
    return [
        SimpleNamespace(name="vllm:num_requests_running", value=1.0),
        SimpleNamespace(name=name + "drafts", value=drafts),
        SimpleNamespace(name=name + "draft_tokens", value=3 * drafts),
        SimpleNamespace(name=name + "accepted_tokens", value=sum(per_position)),
        SimpleNamespace(name=name + "accepted_tokens_per_pos", values=per_position),
    ]


def test_accept_statistics_are_differences():
    stats = stats_between(read_counters(reading(10, [8, 4, 1])), read_counters(reading(30, [20, 12, 6])))
    assert stats == AcceptStats(drafts=20, draft_tokens=60, accepted_tokens=25, accepted_per_position=(12, 8, 5))
    assert stats.accepted_length == 1 + 25 / 20
    assert stats.acceptance_rate == 25 / 60
    assert stats.acceptance_per_position == [12 / 20, 8 / 20, 5 / 20]


def test_without_speculation_or_verification_there_are_no_statistics():
    assert read_counters(reading(1, [1])[:1]) is None
    assert stats_between(None, None) is None
    assert stats_between(read_counters(reading(5, [4, 1])), read_counters(reading(5, [4, 1]))) is None


def test_draft_names_map_to_vllms_modules():
    assert draft_parameter("midlayer.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert draft_parameter("fc.weight") == "model.fc.weight"
    assert draft_parameter("lm_head.weight") == "lm_head.weight"
    assert draft_parameter("d2t") == "draft_id_to_target_id"
    assert draft_parameter("model.norm.weight") == "model.norm.weight"


def stock_expand(x_B, cu_num_tokens_B, num_tokens, replace_from=0, replace_to=0):
    """What vLLM 0.32 does on CPU: right for int64, and for other types the result goes into a copy that is dropped."""
    result = x_B.new_full((num_tokens,), 7)
    if x_B.dtype == torch.int64:
        result.copy_(expand_batch_to_tokens(x_B, cu_num_tokens_B, num_tokens, replace_from, replace_to))
    return result


def stock_top_k(logits_TV, k_T, p_T):
    k_T.max()
    return logits_TV


def test_expansion_repeats_each_requests_value():
    cu_B = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expand_batch_to_tokens(torch.tensor([0.5, 9.0, 0.0]), cu_B, 5, 0, 1).tolist() == [0.5, 0.5, 1, 1, 1]
    assert expand_batch_to_tokens(torch.tensor([0.5, 9.0, 0.0]), cu_B, 5).tolist() == [0.5, 0.5, 0, 0, 0]


def test_only_what_a_probe_finds_wrong_is_replaced():
    broken = SimpleNamespace(expand_batch_to_tokens=stock_expand, apply_top_k_top_p=stock_top_k)
    assert expansion_is_wrong(broken)
    assert top_k_needs_rows(broken)
    assert correct_sampler(broken) == ["expand_batch_to_tokens", "apply_top_k_top_p"]
    assert not expansion_is_wrong(broken)
    assert broken.expand_batch_to_tokens.__wrapped__ is stock_expand
    logits_TV = torch.ones(2, 4)
    assert broken.apply_top_k_top_p(logits_TV, torch.tensor([1, 1]), None) is logits_TV
    assert len(broken.apply_top_k_top_p(logits_TV[:0], torch.tensor([]), None)) == 0
    assert correct_sampler(broken) == []


def test_a_function_right_for_one_type_only_is_found():
    for dtype in (torch.float32, torch.int32, torch.int64):

        def wrong_for_one(x_B, *args, wrong=dtype, **kwargs):
            right = expand_batch_to_tokens(x_B, *args, **kwargs)
            return torch.full_like(right, 7) if x_B.dtype == wrong else right

        assert expansion_is_wrong(SimpleNamespace(expand_batch_to_tokens=wrong_for_one))
