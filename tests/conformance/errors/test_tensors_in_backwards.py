"""What a backward does to tensors and objects of the user's is refused by a trace, which must leave none of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aottrain
from tests.conformance.backwards import gradients_of, with_backward, with_hook

X = torch.ones(2)
MADE = pytest.mark.parametrize("made", [with_backward, with_hook], ids=["a_function", "a_hook"])
RUNS_EAGERLY = "ignore:aottrain runs this call eagerly"


class Holder(nn.Module):
    """Its backward does something to it."""

    saved = None

    def __init__(self, made, action):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.kept = []

        def formula(g):
            action(self, g)
            return g * 2

        self.program = made(formula)

    def forward(self, x):
        return self.program(x) * self.weight

    def seen(self):
        """All that an action may have changed."""
        weight, hooks = self.weight, self.weight._backward_hooks
        held = [self.saved, *self.kept, weight.grad, weight.detach(), *vars(weight).values(), *self.buffers()]
        assert not hooks or len(hooks) == 1
        assert all(type(value) is torch.Tensor for value in held if value is not None)
        values = [value if value is None else value.tolist() for value in held]
        return values, weight.requires_grad, bool(hooks)


def puts_its_gradient(holder, g):
    holder.weight.grad = g.clone()


def adds_to_its_gradient(holder, g):
    if holder.weight.grad is not None:
        holder.weight.grad.add_(1)


def saves_on_a_module(holder, g):
    holder.saved = g.detach()


def appends(holder, g):
    holder.kept.append(g.detach())


def saves_on_a_parameter(holder, g):
    holder.weight.saved = g.detach()


def freezes(holder, g):
    holder.weight.requires_grad_(False)


def freezes_by_attribute(holder, g):
    holder.weight.requires_grad = False


def hooks_on(holder, g):
    if not holder.weight._backward_hooks:
        holder.weight.register_hook(lambda gradient: gradient * 2)


def puts_other_memory(holder, g):
    holder.weight.data = torch.zeros(2)


def registers_a_buffer(holder, g):
    holder.register_buffer("last", g.detach().clone())


ACTIONS = [puts_its_gradient, adds_to_its_gradient, saves_on_a_module, appends, saves_on_a_parameter, freezes]
ACTIONS += [freezes_by_attribute, hooks_on, puts_other_memory, registers_a_buffer]


@MADE
@pytest.mark.filterwarnings(RUNS_EAGERLY)
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_as_eager(action, made):
    plain, traced = Holder(made, action), Holder(made, action)
    compiled = aottrain.compile(traced, capture="trace")
    for _ in range(2):
        assert gradients_of(compiled, X, X * 5) == gradients_of(plain, X, X * 5)
        assert traced.seen() == plain.seen()
    assert compiled.report.num_fallbacks


@MADE
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_leaves_nothing(action, made):
    holder = Holder(made, action)
    before = holder.seen()
    compiled = aottrain.compile(holder, capture="trace", on_unsupported="error")
    with pytest.raises(aottrain.UnsupportedError, match=r"the program (uses Tensor|changes Python state)"):
        compiled(X.clone().requires_grad_())
    assert holder.seen() == before


@MADE
@pytest.mark.filterwarnings(RUNS_EAGERLY)
def test_an_array_of_a_gradient(made):
    def formula(g):
        try:
            return g * float(g.numpy().sum())
        except Exception:
            return g * 100

    program = made(formula)
    compiled = aottrain.compile(program, capture="trace")
    assert gradients_of(compiled, X) == gradients_of(program, X)
    assert [fallback.reason for fallback in compiled.report.fallbacks] == [
        "the program catches an error that its trace raises: numpy, RuntimeError"
    ]


@MADE
def test_a_part_computed_again_stays_compiled(made):
    """Its leaves are the backward's own, and have gradients."""

    def formula(g):
        with torch.enable_grad():
            leaf = g.detach().requires_grad_()
            torch.autograd.backward((leaf * leaf).sum())
            other = g.detach().requires_grad_()
            (slope,) = torch.autograd.grad(other.exp().sum(), other)
        return leaf.grad * slope

    program = made(formula)
    compiled = aottrain.compile(program, capture="trace", on_unsupported="error")
    assert gradients_of(compiled, X, X * 3) == gradients_of(program, X, X * 3)
    assert len(compiled.report.graphs) == 1


@pytest.mark.filterwarnings(RUNS_EAGERLY)
def test_a_backward_that_adds_up_in_an_input():
    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            (weight,) = ctx.saved_tensors
            with torch.enable_grad():
                torch.autograd.backward((weight * weight).sum())
            return g * 2, None

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return Adds.apply(x, self.weight) * 1

    plain, traced = Holds(), Holds()
    compiled = aottrain.compile(traced, capture="trace")
    assert gradients_of(compiled, X) == gradients_of(plain, X)
    assert traced.weight.grad.tolist() == plain.weight.grad.tolist() == [2.0, 2.0]
    assert "leaves gradients in an input" in compiled.report.fallbacks[0].reason


@MADE
@pytest.mark.filterwarnings(RUNS_EAGERLY)
def test_a_gradient_that_the_program_asks_for(made):
    """torch.autograd.grad within: its backward is Python of the forward."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]

    def program(weight):
        def formula(g):
            weight.grad = g.clone()
            return g * 2

        inner = made(formula)

        def call(x):
            leaf = x.detach().requires_grad_()
            return x * torch.autograd.grad(inner(leaf).sum(), leaf)[0]

        return call

    plain = program(weights[0])
    compiled = aottrain.compile(program(weights[1]), capture="trace")
    assert gradients_of(compiled, X) == gradients_of(plain, X)
    assert type(weights[1].grad) is torch.Tensor and weights[1].grad.tolist() == weights[0].grad.tolist()
    assert compiled.report.num_fallbacks == 1
