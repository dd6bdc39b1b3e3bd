"""Hooks on inputs and results that a backward does not come to: eager does not call them, and so do we."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.numerics.comparison import assert_same, compiled


def leaf(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def two_heads(x, w, v):
    return x @ w, (x * v).sum()


def _seen(call, *, backwards, between=False, create_graph=False):
    """What hooks on the results and on all inputs see, each as often as it is called."""
    leaves = [leaf(3, 4), leaf(4, 4, seed=1), leaf(3, 4, seed=2)]
    inputs, seen = [value * 1 if between else value for value in leaves], []
    results = call(*inputs)
    for i, value in enumerate([*results, *inputs]):
        value.register_hook(partial(_double, seen, i))
    for number in backwards:
        results[number].sum().backward(retain_graph=True, create_graph=create_graph)
    seen.sort(key=lambda pair: pair[0])  # of different inputs: in the order of the program's gradients
    values = [*(gradient for _, gradient in seen), *(value.grad for value in leaves)]
    return [i for i, _ in seen], [None if value is None else value.detach() for value in values]


def _double(seen, number, gradient):
    seen.append((number, None if gradient is None else gradient.detach().clone()))
    return None if gradient is None else gradient * 2


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("backwards", [(0,), (1,), (0, 1), (1, 0)])
def test_hooks_see_what_they_see_in_eager(backwards, between, create_graph):
    settings = {"backwards": backwards, "between": between, "create_graph": create_graph}
    calls, values = _seen(compiled(two_heads, kernel="aten"), **settings)
    wanted_calls, wanted = _seen(two_heads, **settings)
    assert calls == wanted_calls
    assert_same(values, wanted)


def test_a_gradient_from_elsewhere_is_seen():
    """Of an input that the program gives none, in the same backward."""
    found = []
    for call in (two_heads, compiled(two_heads, kernel="aten")):
        x, w, v, seen = leaf(3, 4), leaf(4, 4, seed=1), leaf(3, 4, seed=2), []
        v.register_hook(lambda gradient, seen=seen: seen.append(gradient) or gradient * 2)
        (call(x, w, v)[0].sum() + v.exp().sum()).backward()
        found.append([*seen, x.grad, w.grad, v.grad])
    assert_same(found[1], found[0])


def test_hooks_are_the_users_own_afterwards():
    """Also those that were removed meanwhile, and in two programs of one backward."""
    function = compiled(two_heads)
    x, w, v = leaf(3, 4), leaf(4, 4, seed=1), leaf(3, 4, seed=2)

    def stays(gradient):
        return None

    handle = v.register_hook(lambda gradient: None)
    v.register_hook(stays)
    w.register_hook(lambda gradient: handle.remove())
    (function(x, w, v)[0].sum() + function(x, w, v)[0].sum()).backward()
    assert list(v._backward_hooks.values()) == [stays]
