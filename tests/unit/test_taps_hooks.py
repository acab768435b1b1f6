"""Hooks: once per microbatch, silent in recomputation and evaluation, off after anything. The landing's end."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.pipeline_parallel.schedules import custom_backward
from megatron.core.tensor_parallel import random as megatron_random

from nemo_ext.taps.channel import TapChannel
from nemo_ext.taps.connect import Links
from nemo_ext.taps.errors import PlanMismatch, TapError
from nemo_ext.taps.landing import Landing
from nemo_ext.taps.plan import Rows, make_plan

ROWS, WIDTH = 5, 4


class Layer(nn.Linear):
    def __init__(self, number):
        super().__init__(WIDTH, WIDTH)
        self.layer_number = number + 1

    def forward(self, hidden_T1H):
        return super().forward(hidden_T1H), None


class Model(nn.Module):
    """Looks like the parts of Megatron's GPTModel that taps know."""

    def __init__(self, numbers, recompute=None):
        super().__init__()
        self.decoder = SimpleNamespace(layers=nn.ModuleList(Layer(number) for number in numbers))
        self.layers = self.decoder.layers
        self.output_layer = nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute or (lambda layer, hidden: layer(hidden))

    def forward(self, hidden_T1H):
        for layer in self.layers:
            hidden_T1H, _ = self.recompute(layer, hidden_T1H)
        return self.output_layer(hidden_T1H)


def channel_over(model, taps=(0, 2)) -> TapChannel:
    plan = make_plan(
        [[[0, 1, 2]]], list(taps), width=WIDTH, dtype=torch.float32, max_rows=ROWS, max_embedding_rows=ROWS
    )
    return TapChannel(plan, 0, Links(), [model])


def microbatch(channel, model, seed=0):
    """A forward with the channel; gives its input, landing and output."""
    x = torch.randn(ROWS, 1, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    with channel.forward(model, lambda: x.detach().flatten(0, 1)) as landing:
        output = model(x)
    return x, landing, output


def outputs_of(model, x):
    """Each layer's output, without hooks."""
    outputs = []
    for layer in model.layers:
        x = nn.functional.linear(x, layer.weight, layer.bias)
        outputs.append(x.detach().flatten(0, 1))
    return outputs


def megatron_checkpoint(layer, hidden):
    return megatron_random.checkpoint(layer, False, hidden)


@pytest.fixture
def rng_tracker():
    """Megatron's recomputation forks its random state."""
    megatron_random.get_cuda_rng_tracker().reset()


RECOMPUTE = {
    "off": None,
    "torch": lambda layer, hidden: checkpoint(layer, hidden, use_reentrant=False),
    "torch reentrant": lambda layer, hidden: checkpoint(layer, hidden, use_reentrant=True),
    "megatron": megatron_checkpoint,
}


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_each_microbatch_lands_once(recompute, rng_tracker):
    model = Model([0, 1, 2], RECOMPUTE[recompute])
    channel = channel_over(model)
    calls = []
    model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    with channel.step([Rows(ROWS, ROWS)] * 3):
        for seed in range(3):
            x, landing, output = microbatch(channel, model, seed)
            first, _, third = outputs_of(model, x)
            assert torch.equal(landing.taps(), torch.cat([first, third], dim=-1))
            assert torch.equal(landing.hidden, third)
            assert torch.equal(landing.embedding(), x.detach().flatten(0, 1))
            assert not landing.taps().requires_grad
            landing.freed_after(output.sum()).backward()
    assert len(calls) == (3 if recompute == "off" else 6)


def test_nothing_happens_outside_a_step():
    model = Model([0, 1, 2])
    channel = channel_over(model)
    _, landing, _ = microbatch(channel, model)
    assert landing is None
    assert not any(layer._forward_hooks for layer in model.layers)


def test_hooks_are_off_after_a_step_and_after_an_exception():
    model = Model([0, 1, 2])
    channel = channel_over(model)
    with channel.step([Rows(ROWS, ROWS)]):
        assert [bool(layer._forward_hooks) for layer in model.layers] == [True, False, True]
        _, landing, output = microbatch(channel, model)
        landing.freed_after(output.sum()).backward()
    assert not any(layer._forward_hooks for layer in model.layers)
    with pytest.raises(KeyError), channel.step([Rows(ROWS, ROWS)]):
        raise KeyError("a trouble of the model's")
    assert not any(layer._forward_hooks for layer in model.layers)
    with pytest.raises(TapError, match="the channel ended in step 1 .*a trouble of the model's"), channel.step([]):
        pass


def test_a_loss_without_backward_is_freed_by_hand():
    model = Model([0, 1, 2])
    channel = channel_over(model)
    with channel.step([Rows(ROWS, ROWS)]):
        microbatch(channel, model)[1].free()


def test_a_landing_that_is_never_freed_is_told():
    model = Model([0, 1, 2])
    channel = channel_over(model)
    with pytest.raises(PlanMismatch, match="freed 1 of 2 microbatches"), channel.step([Rows(ROWS, ROWS)] * 2):
        microbatch(channel, model)[1].free()
        microbatch(channel, model)


def test_fewer_forwards_than_the_step_has_microbatches():
    model = Model([0, 1, 2])
    channel = channel_over(model)
    with pytest.raises(PlanMismatch, match="handed over 3 of the 6 messages"), channel.step([Rows(ROWS, ROWS)] * 2):
        microbatch(channel, model)[1].free()


def test_a_layer_that_is_not_called():
    model = Model([0, 1, 2])
    channel = channel_over(model)
    model.layers = model.layers[:2]
    with pytest.raises(TapError, match="layer 2, which is tapped, was not called"), channel.step([Rows(ROWS, ROWS)]):
        microbatch(channel, model)


def test_megatron_s_number_is_compared():
    model = Model([0, 1, 2])
    channel = channel_over(model)
    with pytest.raises(PlanMismatch, match="layer 0 runs microbatch 4 but taps are at microbatch 0"):
        with channel.step([Rows(ROWS, ROWS)]):
            model.layers[0].current_microbatch = 4
            microbatch(channel, model)


def test_a_microbatch_of_another_length():
    model = Model([0, 1, 2])
    channel = channel_over(model)
    with pytest.raises(PlanMismatch, match=r"the tap of layer 0, step 0, microbatch 0, .* the rows are \[5, 4\]"):
        with channel.step([Rows(ROWS - 1, ROWS)]):
            microbatch(channel, model)


def test_a_microbatch_that_fits_no_slot():
    model = Model([0, 1, 2])
    with pytest.raises(
        ValueError, match="microbatch 1 has 6 rows for the tap of layer 0, but its landing slots have 5"
    ):
        with channel_over(model).step([Rows(ROWS, ROWS), Rows(ROWS + 1, ROWS)]):
            pass


# The end of the backward


class Freed:
    """Stands for a channel; notes what had a gradient when a microbatch was freed."""

    def __init__(self, leaf):
        self.leaf, self.seen = leaf, []

    def free(self, microbatch):
        self.seen.append((microbatch, self.leaf.grad is not None))


@pytest.mark.parametrize("how", ["torch", "megatron"])
def test_slots_are_free_when_the_whole_backward_is_over(how, rng_tracker):
    leaf = torch.ones(3, requires_grad=True)
    channel = Freed(leaf)
    # The leaf's gradient comes last, and through a recomputation, which is a backward of its own.
    loss = megatron_checkpoint(lambda x: (x * x).cos(), leaf * 1.0).sum()
    loss = Landing(channel, 7).freed_after(loss)
    assert channel.seen == []
    custom_backward(loss, None) if how == "megatron" else loss.backward()
    assert channel.seen == [(7, True)]
    assert torch.allclose(leaf.grad, torch.full((3,), -2 * torch.ones(()).sin()))


def test_freeing_after_does_not_change_the_loss():
    loss = torch.tensor(1.25, requires_grad=True)
    assert Landing(Freed(loss), 0).freed_after(loss).item() == 1.25
