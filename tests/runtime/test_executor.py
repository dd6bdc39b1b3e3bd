"""The op-by-op runner: odd arguments survive printing, and every value dies at its last use."""

from __future__ import annotations

import math
import operator
import weakref

import pytest
import torch
from torch import fx

from aottrain.runtime.executor import aten_runner, render

aten = torch.ops.aten


def program(build):
    """An fx graph: build(graph, x) adds nodes and returns the list of outputs."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(build(graph, x))
    return graph


def run(build, x):
    return aten_runner(program(build))([x])


def test_runs_in_order_and_returns_a_list():
    def build(graph, x):
        y = graph.call_function(aten.sin.default, (x,))
        return [y, None, graph.call_function(aten.mul.Tensor, (y, x)), x]

    x = torch.randn(3)
    out = run(build, x)
    assert isinstance(out, list) and out[1] is None and out[3] is x
    assert torch.equal(out[0], x.sin()) and torch.equal(out[2], x.sin() * x)


def test_a_program_without_inputs():
    graph = fx.Graph()
    graph.output([graph.call_function(aten.zeros.default, ([2, 3],), {"dtype": torch.float64})])
    out = aten_runner(graph)([])
    assert torch.equal(out[0], torch.zeros(2, 3, dtype=torch.float64))


def test_the_input_list_is_emptied():
    inputs = [torch.ones(2)]
    aten_runner(program(lambda graph, x: [graph.call_function(aten.neg.default, (x,))]))(inputs)
    assert inputs == []


class Op:
    """A stand-in for an ATen overload."""

    def __init__(self, name, function):
        self.__name__, self.function = name, function
        self.__module__ = "test"

    def __str__(self):
        return f"test.{self.__name__}"

    def __call__(self, *args):
        return self.function(*args)


def deaths(build, num_inputs=1):
    """For each probe op of a program: which watched values were alive when it ran."""
    alive: list[set[str]] = []
    refs: dict[str, weakref.ref] = {}

    def make(name):
        def op(*args):
            alive.append({key for key, ref in refs.items() if ref() is not None})
            out = torch.zeros(1)
            refs[name] = weakref.ref(out)
            return out

        return Op(name, op)

    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(num_inputs)]
    graph.output(build(graph, inputs, make))
    values = [torch.zeros(1) for _ in inputs]
    for node, value in zip(inputs, values, strict=True):
        refs[node.name] = weakref.ref(value)
    del value
    boxed, values = list(values), None
    runner = aten_runner(graph)
    out = runner(boxed)
    return alive, out


def test_values_die_at_their_last_use():
    def build(graph, inputs, make):
        a = graph.call_function(make("a"), (inputs[0],), name="a")
        b = graph.call_function(make("b"), (a,), name="b")
        c = graph.call_function(make("c"), (b,), name="c")
        d = graph.call_function(make("d"), (c,), name="d")
        return [d]

    alive, _ = deaths(build)
    assert alive == [{"x0"}, {"a"}, {"b"}, {"c"}]


def test_an_input_that_nothing_reads_dies_before_the_first_op():
    def build(graph, inputs, make):
        return [graph.call_function(make("a"), (inputs[1],), name="a")]

    alive, _ = deaths(build, num_inputs=2)
    assert alive == [{"x1"}]


def test_a_value_that_nothing_reads_dies_at_once():
    def build(graph, inputs, make):
        graph.call_function(make("waste"), (inputs[0],), name="waste")
        a = graph.call_function(make("a"), (inputs[0],), name="a")
        return [graph.call_function(make("b"), (a,), name="b")]

    alive, _ = deaths(build)
    assert alive == [{"x0"}, {"x0"}, {"a"}]


def test_a_returned_value_lives_on():
    def build(graph, inputs, make):
        a = graph.call_function(make("a"), (inputs[0],), name="a")
        b = graph.call_function(make("b"), (a,), name="b")
        return [a, graph.call_function(make("c"), (b,), name="c")]

    alive, out = deaths(build)
    assert alive == [{"x0"}, {"a"}, {"a", "b"}] and len(out) == 2


def test_of_a_value_read_twice_by_one_op_one_death():
    def build(graph, inputs, make):
        a = graph.call_function(make("a"), (inputs[0], inputs[0]), name="a")
        return [graph.call_function(make("b"), (a, a), name="b")]

    alive, _ = deaths(build)
    assert alive == [{"x0"}, {"a"}]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 1e-310, 0.1, 3, True, 2**62])
def test_numbers_survive(value):
    def build(graph, x):
        return [graph.call_function(aten.full.default, ([2], value), {"dtype": torch.float64})]

    out = run(build, torch.ones(1))[0]
    wanted = torch.full([2], value, dtype=torch.float64)
    assert torch.equal(out.view(torch.int64), wanted.view(torch.int64))


def test_keywords_that_are_reserved_words_and_self():
    def build(graph, x):
        moved = graph.call_function(aten.uniform.default, (), {"self": x, "from": 2.0, "to": 2.0})
        return [moved, graph.call_function(aten.add.Tensor, (), {"self": x, "other": x, "alpha": 3})]

    out = run(build, torch.ones(2))
    assert torch.equal(out[0], torch.full((2,), 2.0)) and torch.equal(out[1], torch.full((2,), 4.0))


def test_types_layouts_devices_and_memory_formats():
    def build(graph, x):
        kwargs = {"dtype": torch.float16, "memory_format": torch.channels_last, "layout": torch.strided}
        y = graph.call_function(aten._to_copy.default, (x,), {**kwargs, "device": torch.device("cpu")})
        return [y, graph.call_function(aten.empty_like.default, (y,), {"memory_format": torch.preserve_format})]

    out = run(build, torch.ones(1, 2, 3, 4))
    for value in out:
        assert value.dtype == torch.float16 and value.is_contiguous(memory_format=torch.channels_last)


def test_none_and_nested_lists():
    def build(graph, x):
        index = graph.call_function(aten.arange.default, (2,), {})
        picked = graph.call_function(aten.index.Tensor, (x, [None, index]))
        joined = graph.call_function(aten.cat.default, ([x, x], 1))
        total = graph.call_function(aten.sum.dim_IntList, (joined, [0, 1], True), {"dtype": None})
        return [picked, joined, total]

    x = torch.randn(3, 4)
    out = run(build, x)
    assert torch.equal(out[0], x[:, :2]) and torch.equal(out[1], torch.cat([x, x], 1))
    assert torch.equal(out[2], torch.cat([x, x], 1).sum([0, 1], True))


def test_items_of_tuples():
    def build(graph, x):
        pair = graph.call_function(aten.topk.default, (x, 2))
        first = graph.call_function(operator.getitem, (pair, 0))
        return [first, graph.call_function(operator.getitem, (pair, 1))]

    x = torch.randn(5)
    assert all(torch.equal(a, b) for a, b in zip(run(build, x), x.topk(2), strict=True))


def test_strings_and_overloads_of_one_packet():
    def build(graph, x):
        y = graph.call_function(aten.gelu.default, (x,), {"approximate": "tanh"})
        z = graph.call_function(aten.add.Scalar, (y, 1))
        return [
            graph.call_function(aten.add.Tensor, (z, y)),
            graph.call_function(aten.div.Tensor_mode, (x, x), {"rounding_mode": "floor"}),
        ]

    x = torch.rand(3) + 1
    gelu = torch.nn.functional.gelu(x, approximate="tanh")
    out = run(build, x)
    assert torch.equal(out[0], gelu + 1 + gelu) and torch.equal(out[1], torch.ones(3))


def test_the_text_is_the_same_for_the_same_program():
    def build(graph, x):
        return [graph.call_function(aten.full_like.default, (x, math.inf), {"dtype": torch.float64})]

    assert render(program(build))[0] == render(program(build))[0]


def test_lifted_constants_and_printed_constants_do_not_collide():
    graph = fx.Graph()
    inputs = [graph.placeholder(f"constant{i}") for i in range(8)]
    scaled = [graph.call_function(aten.mul.Scalar, (node, complex(i, 1))) for i, node in enumerate(inputs)]
    graph.output(scaled)
    values = [torch.full((1,), float(i + 1)) for i in range(8)]
    out = aten_runner(graph)(list(values))
    assert all(torch.equal(o, v * complex(i, 1)) for i, (o, v) in enumerate(zip(out, values, strict=True)))
