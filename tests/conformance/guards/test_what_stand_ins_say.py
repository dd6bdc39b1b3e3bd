"""What a program asks of a tensor itself, past torch: its class; and settings for a part of a program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aottrain
from aottrain.guards.classes import CLASS_OF
from tests.conformance.harness import PYTHON, case, cases_of, check, grads, leaf, normal


@case
def class_decides(comp):
    return comp(lambda x: x * 2 if type(x) is torch.Tensor else x * 3)(normal(2))


@case
def class_is_looked_up(comp):
    return comp(lambda x: {torch.Tensor: x * 2}.get(type(x + 1), x * 3))(normal(2)), type(normal(2)).__name__


@case
def class_of_a_parameter(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("offset", torch.ones(2))

        def forward(self, x):
            def names():
                return [type(value).__name__ for value in (self.weight, self.offset, x, self.weight * x, 1, self)]

            return x * self.weight if type(self.weight) is nn.Parameter else x, names()

    m = M()
    out, names = comp(m)(normal(2))
    out.sum().backward()
    return out, names, grads(m.weight)


@case
def class_made_inside(comp):
    def f(x):
        made = type("Made", (), {"factor": 3.0})
        return x * made.factor, isinstance(made, type), type(made).__name__, type.__name__

    return comp(f)(normal(2))


@case
def default_type_set_for_a_part(comp):
    def f(x):
        torch.set_default_dtype(torch.float64)
        y = torch.ones(2) + x
        torch.set_default_dtype(torch.float32)
        return y, torch.ones(2) + x

    return comp(f)(normal(2)), torch.get_default_dtype()


@case
def made_in_inference_mode(comp):
    def f(x):
        with torch.inference_mode():
            y = x * 2
        return y, x + 1

    a, b = comp(f)(normal(2))
    return a, a.is_inference(), b, b.is_inference()


@case
def python_function_applied(comp):
    def f(x):
        x.apply_(lambda value: value * 2 + 1)
        return x + 1

    x = normal(3)
    return comp(f)(x), x


@case
def scripted_module_reached(comp):
    inner = torch.jit.script(nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()))
    nn.init.constant_(inner[0].weight, 0.5)
    x = leaf(1, 2)
    out = comp(lambda x: inner(x) * 2)(x)
    out.sum().backward()
    return out, grads(x, *inner.parameters())


@case
def scripted_module(comp):
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()))
    nn.init.constant_(model[0].weight, 0.5)
    x = leaf(1, 2)
    out = comp(model)(x)
    out.sum().backward()
    return out, grads(x, *model.parameters())


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PYTHON))
def test_equals_eager(case, frontend):
    check(case, frontend)


def test_a_trace_leaves_type_as_it_was():
    def f(x):
        return x * 2 if type(x) is torch.Tensor else x

    compiled = aottrain.compile(f, capture="trace", on_unsupported="error")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0)) and len(compiled.report.graphs) == 1
    assert "type" not in globals() and type is not CLASS_OF


def test_what_stands_for_type_is_type_to_others():
    class Meta(CLASS_OF):
        pass

    assert CLASS_OF(1) is int and isinstance(int, CLASS_OF) and not isinstance(1, CLASS_OF)
    assert issubclass(Meta, type) and CLASS_OF("Made", (), {}).__name__ == "Made" and CLASS_OF.mro(int) == int.mro()
