"""Layers of an LSTM run by the library that eager runs them by, of every kind, with eager's gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import aottrain
from aottrain.compat import FakeTensorMode
from aottrain.compiler.capture import replaced_ops  # noqa: F401  (the ops)
from aottrain.metrics.memory import watch_cpu_peak
from tests.numerics.tolerance import assert_close

T, B, WIDE, H = 6, 4, 5, 7
KINDS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "two ways": {"bidirectional": True, "num_layers": 2},
    "without biases": {"bias": False, "num_layers": 2},
    "projected": {"proj_size": 3},
}


class Network(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = nn.LSTM(WIDE, H, **options)

    def forward(self, x, states=None):
        out, (hidden, cell) = self.layers(x, states)
        return out.tanh().sum() + hidden.square().sum() + cell.sin().sum()


def gradients(call, leaves, *args):
    return torch.autograd.grad(call(*args), leaves)


def texts(compiled):
    return "\n".join(str(vars(graph)) for graph in compiled.report.graphs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_every_kind_has_the_gradients_of_eager(kind, frontend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Network(**KINDS[kind]), torch.randn(T, B, WIDE, requires_grad=True)
    compiled = aottrain.compile(copy.deepcopy(model), capture=frontend, on_unsupported="error")
    ours = gradients(compiled, [x, *compiled.parameters()], x)
    truth = gradients(model, [x, *model.parameters()], x)
    for value, other in zip(ours, truth, strict=True):
        assert_close(value, other)
    names = texts(compiled)
    assert ("aottrain.lstm_layer" in names) == (kind != "projected" and bool(torch.backends.mkldnn.enabled))


def test_given_states_have_gradients_and_calls_without_gradients_run():
    torch.manual_seed(0)
    model, x = Network(), torch.randn(T, B, WIDE)
    states = [torch.randn(1, B, H, requires_grad=True) for _ in range(2)]
    compiled = aottrain.compile(model, capture="trace", on_unsupported="error")
    for value, other in zip(
        gradients(compiled, states, x, tuple(states)), gradients(model, states, x, tuple(states)), strict=True
    ):
        assert_close(value, other)
    with torch.no_grad():
        assert_close(compiled(x), model(x))


def test_where_the_library_is_switched_off_layers_are_taken_apart():
    model, x = Network(), torch.randn(T, B, WIDE)
    with torch.backends.mkldnn.flags(enabled=False):
        compiled = aottrain.compile(model, capture="trace", on_unsupported="error")
        assert_close(compiled(x), model(x))
    assert "aottrain.lstm_layer" not in texts(compiled)


@pytest.mark.parametrize("reverse", [False, True])
def test_fakes_are_as_the_library_gives(reverse):
    shapes = (T, B, WIDE), (4 * H, WIDE), (4 * H, H), (4 * H,), (4 * H,), (B, H), (B, H)
    values = [torch.randn(shape) for shape in shapes]
    options = reverse, [], 2, H, 1, True, False, False, True
    results = torch.ops.aottrain.lstm_layer(*values, *options)
    seconds = [torch.ones_like(value) for value in results[:3]]
    more = (reverse, 2, H, 1, True, True, False, [], False, results[3])
    wanted = [*results, *torch.ops.aottrain.lstm_layer_backward(*values, *results[:3], *seconds, *more)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = [
            *torch.ops.aottrain.lstm_layer(*values, *options),
            *torch.ops.aottrain.lstm_layer_backward(*values, *results[:3], *seconds, *more),
        ]
    for fake, value in zip(found, wanted, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (value.shape, value.stride(), value.dtype)
    memory = [value.untyped_storage().data_ptr() for value in wanted]
    assert len(set(memory)) == len(memory)


def test_a_layer_that_is_run_again_frees_what_it_kept_for_autograd():
    """Its output is saved, which had the history of the parameters, and that held the layer's workspace beside the one
    that the backward makes."""
    torch.manual_seed(0)
    layers, head, x = nn.LSTM(32, 32), nn.Linear(32, 256), torch.randn(64, 8, 32)
    modules = nn.ModuleList([layers, head])

    def program(x):
        return head(layers(x)[0]).exp().cumsum(0).sin().sum()

    compiled = aottrain.compile(program, capture="trace", budget=0.0, kernel="aten", on_unsupported="error")
    for _ in range(2):
        modules.zero_grad()
        with watch_cpu_peak([*modules.parameters(), x]) as peak:
            compiled(x).backward()
    (graph,) = compiled.report.graphs
    assert peak.num_bytes <= graph.predicted_peak_bytes * 1.01
