"""Models as large libraries write them: much code around the little that runs, registries, names in capitals."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from torch import nn

from tests.conformance.harness import PYTHON, case, cases_of, check, fill, grads, leaf, normal

logger = logging.getLogger(__name__)
_SERIAL = iter(range(100))
_SCALES = {"backward": 2.0, "helper": 3.0}


class Registry(dict):
    """A dictionary whose `get` takes other arguments than a dictionary's."""

    def get(self, key):
        return dict.get(self, key, 5.0)


_REGISTRY = Registry(scale=2.0)


@case
def name_in_capitals(comp):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.SelfAttention = nn.Linear(3, 3)

        def forward(self, x):
            return self.SelfAttention(x).tanh()

    m, x = fill(Block()), leaf(2, 3)
    out = comp(m)(x)
    out.sum().backward()
    return out, grads(*m.parameters(), x)


@case
def constant_beside_a_mutation(comp):
    def f(x):
        mask = torch.zeros(2, 2)
        mask[0] = torch.tensor(3.0)
        return x * mask

    x = leaf(2, 2)
    out = comp(f)(x)
    out.sum().backward()
    return out, x.grad


class Library(nn.Module):
    """Its forward is a line; what never runs reaches an iterator and, through logging, open files."""

    scales = _REGISTRY

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        num_arguments = len(inspect.signature(self.linear.forward).parameters)
        return self.linear(x) * self.scales["scale"] * num_arguments

    def generate(self, x):
        logger.warning("generating")
        return x * next(_SERIAL)


@case
def library_of_which_little_runs(comp):
    m, x = fill(Library()), leaf(2, 3)
    g = comp(m)
    first = g(x)
    _REGISTRY["scale"] = 4.0
    try:
        second = g(x)
    finally:
        _REGISTRY["scale"] = 2.0
    (first + second).sum().backward()
    return first, second, x.grad


def _helper(x):
    return x * _SCALES["helper"]


@case
def global_read_by_a_helper(comp):
    """The helper is first seen while it runs; what it reads is guarded all the same."""
    g = comp(lambda x: _helper(x))
    first = g(normal(2))
    _SCALES["helper"] = 7.0
    try:
        return first, g(normal(2))
    finally:
        _SCALES["helper"] = 3.0


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, tangent):
        return tangent * _SCALES["backward"]


@case
def global_read_by_a_backward(comp):
    def gradient():
        x = leaf(2)
        g(x).sum().backward()
        return x.grad

    g = comp(lambda x: _Scaled.apply(x))
    first = gradient()
    _SCALES["backward"] = 7.0
    try:
        return first, gradient()
    finally:
        _SCALES["backward"] = 2.0


@case
def helper_that_counts_its_calls(comp):
    calls = {"n": 0}

    def counted(x):
        calls["n"] += 1
        return x * calls["n"]

    g = comp(lambda x: counted(x))
    return g(normal(2)), g(normal(2)), dict(calls)


@case
def helper_that_was_replaced(comp):
    def one(x):
        return x + 1

    def other(x):
        return x - 1

    table = {"f": one}
    g = comp(lambda x: table["f"](x))
    first = g(normal(2))
    table["f"] = other
    return first, g(normal(2))


@case
def leaf_made_inside_and_forgotten(comp):
    def f(x, w):
        hidden = x * 2
        hidden.requires_grad = True
        return (hidden * w).sum()

    w = leaf(3)
    out = comp(f)(normal(3), w)
    out.backward()
    return out, w.grad


@case
def leaf_made_inside_and_kept(comp):
    kept = {}

    def f(x, w):
        hidden = x * 2
        hidden.requires_grad = True
        kept["hidden"] = hidden
        return (hidden * w).sum()

    w = leaf(3)
    out = comp(f)(normal(3), w)
    out.backward()
    return out, w.grad, kept["hidden"].grad


@case
def leaf_made_inside_with_a_hook(comp):
    seen = []

    def f(x, w):
        hidden = x * 2
        hidden.requires_grad = True
        hidden.register_hook(lambda tangent: seen.append(1))
        return (hidden * w).sum()

    w = leaf(3)
    out = comp(f)(normal(3), w)
    out.backward()
    return out, w.grad, len(seen)


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PYTHON))
def test_equals_eager(case, frontend):
    check(case, frontend)
