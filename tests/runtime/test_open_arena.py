"""Memory of programs of symbolic sizes: layouts by the sizes of a call (law 5), arenas and blocks that serve many."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import aottrain
from aottrain.compiler.link import retention
from aottrain.errors import UnsupportedError
from aottrain.ir.sizes.polynomials import current_values
from aottrain.runtime import arena, open_arena
from aottrain.runtime.open_arena import Place, open_layouts
from tests.zoo import FeedForward, Trunk

SIZES = ((4, 20), (6, 40), (2, 3), (6, 40), (5, 17))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """Whatever the peak is, all temporaries and residuals are kept."""
    monkeypatch.setattr(retention, "_SHARE", 2.0)
    monkeypatch.setattr(retention, "_SMALLEST_ARENA", 1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Trunk(*(FeedForward(64, dropout=0.0) for _ in range(2)))


def compiled(model: nn.Module) -> nn.Module:
    return aottrain.compile(model, capture="trace", dynamic=True, kernel="cpp", on_unsupported="error")


def sizes_of(b: int, t: int) -> torch.Tensor:
    return torch.randn(b, t, 64, generator=torch.Generator().manual_seed(100 * b + t))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_each_size_has_a_layout_and_the_values_are_eagers():
    model = net()
    call = compiled(copy.deepcopy(model))
    for b, t in SIZES:
        for got, wanted in zip(gradients(call, sizes_of(b, t)), gradients(model, sizes_of(b, t)), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    (graph,) = call.report.graphs
    assert graph.kernel == "cpp" and graph.timeline.fixed.get("arena", 0) > 0


def test_layouts_that_overlap_are_stopped(monkeypatch):
    call = compiled(net())
    gradients(call, sizes_of(4, 20))
    monkeypatch.setattr(open_arena, "first_fit", lambda sizes, born, last: dict.fromkeys(sizes, 0))
    gradients(call, sizes_of(4, 20))  # this size has its layout
    with pytest.raises(UnsupportedError, match="overlap in the arena"):
        gradients(call, sizes_of(4, 21))


def test_a_size_is_planned_once(monkeypatch):
    planned = []
    original = open_arena.first_fit
    monkeypatch.setattr(open_arena, "first_fit", lambda *given: planned.append(1) or original(*given))
    call = compiled(net())
    for b, t in SIZES:
        gradients(call, sizes_of(b, t))
    assert len(planned) == 2 * len(set(SIZES))  # forward and backward


def test_a_large_arena_serves_small_calls(monkeypatch):
    """From the largest call on nothing is allocated any more, whatever the size."""
    call = compiled(net())
    gradients(call, sizes_of(6, 40))
    taken = []
    original = arena._bytes
    monkeypatch.setattr(arena, "_bytes", lambda *given: taken.append(given) or original(*given))
    for b, t in SIZES:
        gradients(call, sizes_of(b, t))
    assert not taken


def test_bytes_follow_the_sizes():
    """A layout at a size is that of its numbers, not of the call that was traced."""
    places = [Place(lambda: 64 * current_values()["s"], 0, 1), Place(lambda: 64, 1, 2)]
    layouts = open_layouts(("s",), places, CPU, object())
    assert [layouts(s).size for s in (1, 5)] == [128, 384]


def test_a_retained_graph_keeps_its_values_while_other_sizes_run():
    model = net()
    call = compiled(copy.deepcopy(model))
    losses = [call(sizes_of(b, t)) for b, t in SIZES]
    wanted = [gradients(model, sizes_of(b, t)) for b, t in SIZES]
    for loss, expected in zip(losses, wanted, strict=True):
        for got, grad in zip(torch.autograd.grad(loss, list(call.parameters())), expected, strict=True):
            torch.testing.assert_close(got, grad, rtol=1e-4, atol=1e-6)
