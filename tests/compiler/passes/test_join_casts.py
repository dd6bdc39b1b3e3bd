"""Casts that autocast asks for one by one are made by few calls, bit for bit the same."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn

from aottrain.compiler import pipeline
from aottrain.compiler.passes import join_casts as joining
from aottrain.errors import VerificationError
from aottrain.ir.graph import calls
from tests.golden.programs import Golden
from tests.golden.texts import compiled

DEPTH = 4
CAST, CAST_MANY = torch.ops.aten._to_copy.default, torch.ops.aottrain.cast_many.default


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = layer(x).relu()
            return x.float().square().sum()


def halves(**options):
    known = compiled(Golden(lambda: (Layers(), (torch.randn(256, 64),)), {"kernel": "triton", **options}))
    graphs = [fused.graph for fused in known["decided"].fused]
    return [[node.target for node in calls(graph)] for graph in graphs]


def test_weights_and_gradients_are_cast_by_one_call_each():
    forward, backward = halves()
    assert forward.count(CAST_MANY) == 1  # weights and biases
    assert backward.count(CAST_MANY) == 2  # weights once more, and all gradients
    assert forward.count(CAST) <= 2 and backward.count(CAST) <= 2  # what kernels do within


def test_a_call_holds_no_more_than_it_may(monkeypatch):
    monkeypatch.setattr(joining, "_MOST_BYTES", 2 * (64 * 64 + 64) * 2)
    forward, _ = halves()
    assert forward.count(CAST_MANY) == DEPTH // 2


def test_under_a_budget_each_is_on_its_own():
    forward, backward = halves(budget=0.5, partition="budget")
    assert CAST_MANY not in forward and CAST_MANY not in backward


def test_a_number_in_a_tensors_place_is_left():
    program = Golden(
        lambda: (lambda x: torch.vmap(lambda t: t.sin() * -0.0)(x), (torch.randn(1 << 9, requires_grad=True),)),
        {"kernel": "triton"},
    )
    assert compiled(program)["decided"].fused


@pytest.mark.parametrize(("half", "law"), [("forward", "the forward computes"), ("backward", "the backward computes")])
def test_casts_of_other_values_stop_before_their_kernels(monkeypatch, half, law):
    def swap(parts):
        parts = joining.join_casts(parts)
        first, second = [node for node in calls(getattr(parts, half)) if is_of_many(node)][:2]
        first.args, second.args = second.args, first.args
        return parts

    monkeypatch.setattr(pipeline, "join_casts", swap)
    monkeypatch.setattr(pipeline, "plan_in_flight", lambda *given: pytest.fail("nobody asked"))
    with pytest.raises(VerificationError, match=law):
        halves()


def is_of_many(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0].target is CAST_MANY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_values_are_those_of_single_casts(dtype):
    values = [torch.randn(7, 5) * 1e5, torch.randn(64).mul(1e-8), torch.tensor([float("inf"), float("nan"), -0.0])]
    for made, value in zip(CAST_MANY(values, dtype), values, strict=True):
        assert made.dtype is dtype and made.stride() == value.stride()
        assert torch.equal(made.view(torch.int16), value.to(dtype).view(torch.int16))
