"""The refresh's states and the draft's loading, on small stand-ins for vLLM's modules."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nemo_ext.rollout.draft_model import (
    check_reduced_vocabulary,
    find_draft_model,
    load_in_place,
    private_copy,
    shared_modules,
    unshare,
    verify_loading,
)
from nemo_ext.rollout.errors import EngineUnusable, RefreshError
from nemo_ext.rollout.manifest import manifest_of
from nemo_ext.rollout.refresh import WeightRefresh


class Head(nn.Module):
    """A vLLM embedding or head: a padded weight whose loader is the module's own method."""

    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        self.org_vocab_size = rows
        self.weight = nn.Parameter(torch.zeros(rows + 2, 3), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter[: self.org_vocab_size] = tensor
        parameter[self.org_vocab_size :] = 0


class Model(nn.Module):
    """Loads by name, like vLLM's models; remembers the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3, bias=False)
        self.norm.weight.requires_grad_(False)
        self.lm_head = Head()
        self.calls: list[list[str]] = []

    def load_weights(self, weights) -> None:
        weights = dict(weights)
        self.calls.append(list(weights))
        for name, tensor in weights.items():
            parameter = self.get_parameter(name)
            getattr(parameter, "weight_loader", lambda p, t: p.copy_(t))(parameter, tensor)


class FusedModel(Model):
    """Derives a tensor from its weights and allocates it anew at each load, as DFlash does."""

    def load_weights(self, weights) -> None:
        super().load_weights(weights)
        self.norm.fused = self.norm.weight.data * 2


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"norm.weight": torch.full((3,), value), "lm_head.weight": torch.full((4, 3), value)}


def whole(value: float) -> list[tuple[str, torch.Tensor]]:
    return [*weights(value).items(), *((f"draft.{name}", x) for name, x in weights(value).items())]


@pytest.fixture
def refresh() -> WeightRefresh:
    expected = {spec.name: spec for spec in manifest_of(whole(0.0))}
    return WeightRefresh(Model(), Model(), expected, version=3)


def test_policy_loads_by_bucket_and_draft_in_one_call(refresh):
    refresh.begin(manifest_of(whole(1.0)))
    for tensor in whole(1.0):
        refresh.load([tensor])
    assert refresh.draft.calls == []
    refresh.finish()
    assert refresh.target.calls == [["norm.weight"], ["lm_head.weight"]]
    assert refresh.draft.calls == [["norm.weight", "lm_head.weight"]]
    assert refresh.version == 3
    refresh.publish(4)
    assert refresh.served_version() == 4
    assert refresh.draft.norm.weight.tolist() == [1, 1, 1]


def test_draft_tensors_survive_the_reuse_of_their_bucket(refresh):
    refresh.begin(manifest_of(whole(1.0)))
    bucket = whole(1.0)
    refresh.load(bucket)
    for _, tensor in bucket:
        tensor.zero_()
    refresh.finish()
    assert refresh.draft.norm.weight.tolist() == [1, 1, 1]


def test_the_version_changes_last(refresh):
    with pytest.raises(RefreshError, match="weight refresh is idle"):
        refresh.publish(4)
    refresh.begin(manifest_of(whole(1.0)))
    with pytest.raises(RefreshError, match="weight refresh is receiving"):
        refresh.publish(4)
    refresh.load(whole(1.0))
    refresh.finish()
    assert refresh.served_version() == 3
    with pytest.raises(RefreshError, match="weight refresh is loaded"):
        refresh.begin(manifest_of(whole(1.0)))


def test_a_short_stream_of_draft_tensors_does_no_harm(refresh):
    refresh.begin(manifest_of(whole(1.0)))
    refresh.load(whole(1.0)[2:3])
    with pytest.raises(RefreshError, match="ended without norm.weight"):
        refresh.finish()
    assert refresh.served_version() == 3
    refresh.begin(manifest_of(whole(1.0)))


def test_a_short_stream_that_wrote_ends_the_engine(refresh):
    refresh.begin(manifest_of(whole(1.0)))
    refresh.load(whole(1.0)[:3])
    with pytest.raises(EngineUnusable, match="version 3 were overwritten.*ended without draft.lm_head.weight"):
        refresh.finish()
    for call in (refresh.served_version, lambda: refresh.begin([]), lambda: refresh.publish(4)):
        with pytest.raises(EngineUnusable, match="build the engine anew"):
            call()


def test_a_tensor_unlike_its_declaration_is_named(refresh):
    refresh.begin(manifest_of(whole(1.0)))
    with pytest.raises(RefreshError, match=r"norm.weight came as \[3\] torch.float64, declared as \[3\] torch.float32"):
        refresh.load([("norm.weight", torch.ones(3, dtype=torch.float64))])
    assert refresh.target.calls == []


def test_a_failing_write_ends_the_engine(refresh):
    def fail(weights):
        raise RuntimeError("no such parameter")

    refresh.target.load_weights = fail
    refresh.begin(manifest_of(whole(1.0)))
    with pytest.raises(EngineUnusable, match="no such parameter"):
        refresh.load(whole(1.0))


def test_a_refresh_through_a_shared_head_is_refused(refresh):
    refresh.draft.lm_head = refresh.target.lm_head
    with pytest.raises(RefreshError, match="the draft's lm_head is the target's own module"):
        refresh.begin(manifest_of(whole(1.0)))
    assert refresh.served_version() == 3


def test_unsharing_gives_the_draft_a_head_that_loads_by_itself():
    target, draft = Model(), Model()
    draft.lm_head = target.lm_head
    names = {name: tuple(x.shape) for name, x in weights(0.0).items()}
    assert shared_modules(draft, target, ["norm.weight"]) == []
    assert unshare(draft, target, names, names) == ["lm_head"]
    assert shared_modules(draft, target, names) == []
    draft.load_weights(weights(2.0).items())
    assert draft.lm_head.weight[:4].eq(2).all()
    assert not target.lm_head.weight.any()


def test_a_shared_head_with_other_rows_names_the_setting():
    target, draft = Model(), Model()
    draft.lm_head = target.lm_head
    with pytest.raises(RefreshError, match="draft.lm_head.weight has 2 rows.*draft_load_config"):
        unshare(draft, target, ["lm_head.weight"], {"lm_head.weight": (2, 3)})


def test_a_reduced_vocabulary_with_the_targets_head_is_refused():
    target, draft = Model(), Model()
    draft.config = SimpleNamespace(draft_vocab_size=2)
    check_reduced_vocabulary(draft, target)
    draft.lm_head = target.lm_head
    with pytest.raises(RefreshError, match="draft_vocab_size is 2 but the draft's folder has no lm_head.weight"):
        check_reduced_vocabulary(draft, target)
    draft.config.draft_vocab_size = 4
    check_reduced_vocabulary(draft, target)


def test_a_private_copy_keeps_what_vllm_put_on_parameters():
    head = Head()
    twin = private_copy(head)
    assert twin.weight.weight_loader.__self__ is twin
    assert twin.weight.data_ptr() != head.weight.data_ptr()
    # What a deep copy would have lost.
    assert not hasattr(copy.deepcopy(head).weight, "weight_loader")


def test_derived_tensors_stay_where_a_graph_reads_them():
    draft = FusedModel()
    load_in_place(draft, weights(1.0).items())
    read_by_graph = draft.norm.fused
    load_in_place(draft, weights(3.0).items())
    assert draft.norm.fused is read_by_graph
    assert read_by_graph.tolist() == [6, 6, 6]


def test_loading_is_verified_element_by_element():
    target, draft = Model(), Model()
    verify_loading(draft, target, weights(1.0).items())
    assert draft.norm.weight.tolist() == [1, 1, 1]
    partial = {"norm.weight": torch.ones(3)}
    with pytest.raises(RefreshError, match="leaves lm_head.weight without a value"):
        verify_loading(draft, target, partial.items())
    draft.norm.weight.data = torch.empty(0)
    with pytest.raises(RefreshError, match="norm.weight was repacked.*RefreshableCPUWorker"):
        verify_loading(draft, target, weights(1.0).items())


class MappedModel(Model):
    """Has a vocabulary map whatever its checkpoint brings, as vLLM 0.20.0 and 0.25.1 give every EAGLE-3 draft."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=4)
        self.draft_id_to_target_id = nn.Parameter(torch.zeros(rows, dtype=torch.int64), requires_grad=False)


def test_a_map_that_is_not_streamed_keeps_the_identity():
    draft, target = MappedModel(4), Model()
    for given in (weights(1.0), {}, weights(2.0)):  # what breaks off in between does not spoil it
        if given:
            verify_loading(draft, target, given.items())
        else:
            with pytest.raises(RefreshError, match=r"leaves lm_head\.weight, norm\.weight without a value"):
                verify_loading(draft, target, given.items())
        assert not draft.draft_id_to_target_id.any()


def test_a_reduced_vocabulary_needs_its_map():
    draft = MappedModel(2)
    with pytest.raises(RefreshError, match="leaves draft_id_to_target_id without a value"):
        verify_loading(draft, Model(), weights(1.0).items())
    moved = weights(1.0) | {"draft_id_to_target_id": torch.tensor([1, 1])}
    verify_loading(draft, Model(), moved.items())
    assert draft.draft_id_to_target_id.tolist() == [1, 1]


def test_what_the_draft_shares_is_not_its_own_to_verify():
    target, draft = Model(), Model()
    draft.lm_head = target.lm_head
    verify_loading(draft, target, {"norm.weight": torch.ones(3)}.items())
    assert not target.lm_head.weight.any()


@pytest.mark.parametrize("place", ["drafter", "speculator"])
def test_the_draft_is_found_in_both_runners(place):
    draft = Model()
    config = SimpleNamespace(speculative_config=SimpleNamespace(method="eagle3"))
    runner = SimpleNamespace(**{place: SimpleNamespace(model=draft)})
    assert find_draft_model(SimpleNamespace(vllm_config=config, model_runner=runner)) is draft


def test_a_draft_that_is_nowhere_is_an_error():
    config = SimpleNamespace(speculative_config=SimpleNamespace(method="eagle3"))
    runner = SimpleNamespace(drafter=None)
    with pytest.raises(RefreshError, match="speculative_config.method is eagle3 but the worker has no model"):
        find_draft_model(SimpleNamespace(vllm_config=config, model_runner=runner))
    config.speculative_config = None
    assert find_draft_model(SimpleNamespace(vllm_config=config, model_runner=runner)) is None
