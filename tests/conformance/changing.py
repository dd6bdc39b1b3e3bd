"""A module with much that can change between two calls, for the tests of guards."""

import types

import torch
from torch import nn

from tests.conformance.harness import normal

_SCALE = 2.0


def set_scale(value):
    global _SCALE
    _SCALE = value


class Scaled(nn.Module):
    factor = 2.0

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.k = 3.0
        self.mode = "a"
        self.nested = {"x": [1.0, {"y": 2.0}]}
        self.config = types.SimpleNamespace(scale=2.0, inner=types.SimpleNamespace(deep=1.0))

    @property
    def double(self):
        return self.k * 2

    def helper(self, x):
        return x * _SCALE

    def forward(self, x):
        y = self.w * x * self.factor + self.double
        if self.mode == "b":
            y = y * 10
        return self.helper(y) + self.nested["x"][1]["y"] * self.config.scale + self.config.inner.deep


def before_and_after(comp, change, undo=None, make=Scaled):
    m = make()
    g = comp(m)
    x = normal(2)
    first = g(x)
    try:
        change(m)
        second = g(x)
        third = g(x)
    finally:
        if undo:
            undo(m)
    return first, second, third, g(x)
