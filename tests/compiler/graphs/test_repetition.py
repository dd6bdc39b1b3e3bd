"""Values that new calls share with calls that are alike: they are what each call's own fakes would give."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import aottrain.ops.collectives  # noqa: F401  # makes the operators known
from aottrain.compiler.graphs import repetition
from aottrain.compiler.graphs.repetition import SharedValues
from aottrain.compiler.graphs.rewriting import fake_result
from aottrain.ir.graph import calls, set_value, value_of

aten, parallel = torch.ops.aten, torch.ops.aottrain_parallel


@pytest.fixture
def asked(monkeypatch):
    """The calls that fakes were asked about."""
    asked = []

    def counting(target, arguments, kwargs):
        asked.append(target)
        return fake_result(target, arguments, kwargs)

    monkeypatch.setattr(repetition, "fake_result", counting)
    return asked


def layout(value):
    if isinstance(value, (tuple, list)):
        return [layout(item) for item in value]
    memory = value.untyped_storage().nbytes() if value.layout is torch.strided else 0
    place = (value.stride(), value.storage_offset(), memory) if value.layout is torch.strided else ()
    return value.shape, value.dtype, value.is_conj(), place


def placeholder(graph, value):
    node = graph.placeholder("input")
    set_value(node, value)
    return node


def test_what_calls_share_is_what_each_of_them_gives():
    """Of operands that differ in no more than one thing: type, strides, the place in their memory, its size, a bit."""
    graph, values = fx.Graph(), SharedValues()
    with FakeTensorMode():
        whole, half = torch.empty(12, 4), torch.empty(12, 4, dtype=torch.bfloat16)
        turned, pairs = torch.empty(4, 12).t(), torch.empty(12, 4, dtype=torch.complex64)
        operands = [whole, half, turned, torch.empty(24, 4)[:12], torch.empty(24, 4)[12:], pairs, pairs.conj()]
        operands.append(torch.empty(12, 4).to_sparse())
    inputs = [placeholder(graph, value) for value in (*operands, *operands)]
    for node in inputs:
        values.add_call(node, aten.clone.default, (node,), memory_format=torch.preserve_format)
        if value_of(node).layout is torch.strided:
            for start in (0, 3):
                values.add_call(node, aten.slice.Tensor, (node, 0, start, 6))
            values.add_call(node, parallel.arrived.default, (node,))
    for first, second in ((0, 1), (1, 0), (0, 1)):
        start = values.add_call(inputs[0], parallel.scatter_start.default, ([inputs[first], inputs[second]], 2, "0"))
        values.add_call(inputs[0], operator.getitem, (start, 1))
    for node in calls(graph):
        assert layout(value_of(node)) == layout(fake_result(node.target, node.args, dict(node.kwargs))), (
            node.format_node()
        )


def test_calls_that_are_alike_ask_once(asked):
    graph, values = fx.Graph(), SharedValues()
    with FakeTensorMode():
        inputs = [placeholder(graph, torch.empty(12, 4)) for _ in range(30)]
    for node in inputs:
        values.add_call(node, parallel.gather_start.default, (node, 24, 2, "0"))
        start = values.add_call(node, parallel.scatter_start.default, ([node, node], 2, "0"))
        values.add_call(node, operator.getitem, (start, 1))
    assert asked == [parallel.gather_start.default, parallel.scatter_start.default]
