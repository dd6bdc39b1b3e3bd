"""Custom Functions with several results in programs with several: what compiles, and that gradients are eager's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.autograd import Function

import aottrain
from tests.numerics.comparison import assert_same


def leaf(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def function(backward, materialize=True):
    """exp(x), its sums by rows, and its first row; backward: of (x, each gradient)."""

    class Several(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(materialize)
            ctx.save_for_backward(x)
            return x.exp(), x.exp().sum(-1), x.exp()[0].clone()

        @staticmethod
        def backward(ctx, *gradients):
            (x,) = ctx.saved_tensors
            return backward(x, *gradients)

    return Several.apply


def linear(x, a, b, c):
    return a * x.exp() + b.unsqueeze(-1) + c * 2


def divides(x, a, b, c):
    """Zeros become NaN where x is 0."""
    return a * x.exp() + b.unsqueeze(-1) / (x - x)


def asks(x, a, b, c):
    return a * x.exp() + (100 if b is None else b.unsqueeze(-1)) + (1000 if c is None else c)


def both(apply, x):
    """All results lead to the loss and to the values beside it."""
    a, b, c = apply(x)
    hidden = a * b.unsqueeze(-1) + c
    return hidden.sin(), hidden.mean()


def one(apply, x):
    """Two results lead nowhere."""
    a, _, _ = apply(x)
    return a.sin(), a.mean()


def apart(apply, x):
    a, b, c = apply(x)
    return a.sin(), (b.sum() + c.sum())


def gradients(call, indices):
    x = leaf(3, 4)
    results = call(x)
    torch.autograd.backward([results[i] for i in indices], [torch.full_like(results[i], 0.7) for i in indices])
    return [*(value.detach() for value in results), x.grad]


@pytest.mark.parametrize("program", [both, one])
@pytest.mark.parametrize(("backward", "materialize"), [(linear, True), (divides, True), (asks, False)])
def test_gradients_are_eagers_whichever_result_they_come_from(program, backward, materialize):
    apply = function(backward, materialize)
    compiled = aottrain.compile(lambda x: program(apply, x), capture="trace", kernel="aten", on_unsupported="error")
    for indices in itertools.chain.from_iterable(itertools.combinations(range(2), n) for n in (1, 2)):
        assert_same(gradients(compiled, indices), gradients(lambda x: program(apply, x), indices))


def gives_nothing():
    class Nothing(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return None

    def program(x):
        a, b, _ = function(linear)(x)
        return a.sin() + b.sum(), (Nothing.apply(a) + b.unsqueeze(-1)).mean()

    return program


@pytest.mark.parametrize("program", [lambda x: apart(function(asks, False), x), gives_nothing()], ids=["apart", "none"])
def test_what_hangs_on_the_tangents_that_come_is_refused(program):
    compiled = aottrain.compile(program, capture="trace")
    with pytest.warns(UserWarning, match="of which some may go unused"):
        result = gradients(compiled, (0,))
    assert_same(result, gradients(program, (0,)))


def test_results_that_lead_nowhere_are_refused_behind_torchdynamo():
    """It gives zeros to a formula whose author asked for None."""
    apply = function(asks, False)
    compiled = aottrain.compile(lambda x: one(apply, x), capture="dynamo")
    with pytest.warns(UserWarning, match="of which some may go unused"):
        result = gradients(compiled, (0, 1))
    assert_same(result, gradients(lambda x: one(apply, x), (0, 1)))
