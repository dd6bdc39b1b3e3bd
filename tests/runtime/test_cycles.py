"""A steady call leaves no cycle that holds tensors: they go with their last reference, not with the next collection."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.numerics.comparison import compiled


def one(x):
    return (x @ x).tanh()


def linked(x):
    return (n := x * 2), n.exp(), n.sum()


def views(x):
    y = x.exp()
    return y[0], y.t(), x[1:], y.view(-1).unbind(0)[0]


def twice(x):
    view = x.exp()[0]
    return view, view * 2, view


def draws(x):
    return F.dropout(x, 0.5) * 2


def written(x):
    y = x * 1
    y[0].mul_(x[1])
    return y


def norm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
@pytest.mark.parametrize("target", [one, linked, views, twice, draws, written, norm])
def test_what_a_call_took_and_gave_goes_with_its_last_reference(target, capture):
    call = compiled(target() if target is norm else target, capture=capture)

    def step(keep):
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        out = call(x)
        results = [value for value in (out if isinstance(out, tuple) else (out,)) if value.requires_grad]
        sum(value.sum() for value in results).backward(retain_graph=keep)
        return [weakref.ref(value) for value in (x, x.grad, *results)]

    for keep in (False, True):
        step(keep)
    gc.collect()
    gc.disable()
    try:
        known = [*step(False), *step(True)]
        assert all(reference() is None for reference in known)
    finally:
        gc.enable()
