"""Backwards that the program reaches by no name of its own: those registered for operators, and hooks that unpack what
is saved. What they do beside computing is refused as it is elsewhere."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import aottrain
from tests.conformance.backwards import gradients_of, tries

X = torch.ones(2)
RUNS_EAGERLY = "ignore:aottrain runs this call eagerly"
WEIGHT = nn.Parameter(torch.ones(2))
KEPT: dict[str, Tensor] = {}


@torch.library.custom_op("aottrain_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("aottrain_tests::doubled_of", mutates_args=())
def doubled_of(xs: list[Tensor]) -> Tensor:
    return xs[0] * 2


doubled.register_fake(torch.empty_like)
doubled_of.register_fake(lambda xs: torch.empty_like(xs[0]))


def of_one(formula):
    doubled.register_autograd(lambda ctx, g: formula(g))
    return lambda x: doubled(x) * 1


def of_a_list(formula):
    doubled_of.register_autograd(lambda ctx, g: [formula(g)])
    return lambda x: doubled_of([x]) * 1


def draws(g):
    return g * random.random()


def prints(g):
    print("said")
    return g * 2


def keeps(g):
    KEPT["gradient"] = g.detach()
    return g * 2


def puts_a_gradient(g):
    WEIGHT.grad = g.clone()
    return g * 2


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    KEPT.clear()
    WEIGHT.grad = None


def observed(program, capsys):
    """What shows of a few calls."""
    random.seed(0)
    KEPT.clear()
    WEIGHT.grad = None
    gradients = gradients_of(program, X, X * 3)
    held = [*KEPT.values(), *([] if WEIGHT.grad is None else [WEIGHT.grad])]
    assert all(type(value) is Tensor for value in held)
    return gradients, [value.tolist() for value in held], capsys.readouterr().out


@pytest.mark.filterwarnings(RUNS_EAGERLY)
@pytest.mark.parametrize("capture", ["trace", "dynamo"])
@pytest.mark.parametrize("made", [of_one, of_a_list])
@pytest.mark.parametrize("formula", [tries, draws, prints, keeps, puts_a_gradient])
def test_as_eager(formula, made, capture, capsys):
    torch._dynamo.reset()
    program = made(formula)
    compiled = aottrain.compile(program, capture=capture)
    expected = observed(program, capsys)
    assert observed(compiled, capsys) == expected
    assert [fallback.count for fallback in compiled.report.fallbacks] == [2]


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
@pytest.mark.parametrize("made", [of_one, of_a_list])
def test_what_only_computes_stays_compiled(made, capture):
    torch._dynamo.reset()
    program = made(lambda g: g * 3 + WEIGHT.shape[0])
    compiled = aottrain.compile(program, capture=capture, on_unsupported="error")
    assert gradients_of(compiled, X, X) == gradients_of(program, X, X) and len(compiled.report.graphs) == 1


@pytest.mark.filterwarnings(RUNS_EAGERLY)
@pytest.mark.parametrize("formula", [tries, draws, prints, keeps, puts_a_gradient])
def test_hooks_that_unpack_what_is_saved(formula, capsys):
    def program(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda value: value, formula):
            y = x.exp()
        return y * 1

    compiled = aottrain.compile(program, capture="trace")
    expected = observed(program, capsys)
    assert observed(compiled, capsys) == expected
    assert [fallback.count for fallback in compiled.report.fallbacks] == [2]
