"""Graphs and the questions that stages ask of them."""

from __future__ import annotations

import operator

import torch
from torch import fx

from aottrain.ir.analysis.reach import ancestors, descendants
from aottrain.ir.graph import (
    InputKind,
    OutputKind,
    calls,
    is_tuple,
    placeholders,
    results,
    spec_of,
    storage_bytes,
    storage_root,
    view_source,
)
from aottrain.ir.tensor import tensor_spec
from aottrain.ir.text import graph_text
from tests.compiler.programs import joint_inputs, joint_of, leaf, names
from tests.numerics.comparison import assert_same

aten = torch.ops.aten


def diamond():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.sin.default, (x,), name="a")
    b = graph.call_function(aten.cos.default, (a,), name="b")
    c = graph.call_function(aten.tan.default, (a,), name="c")
    d = graph.call_function(aten.add.Tensor, (b, c), name="d")
    graph.output([d, None, b])
    return graph, {node.name: node for node in graph.nodes}


def test_ancestors_and_descendants():
    graph, n = diamond()
    assert ancestors([n["b"]]) == {n["b"], n["a"], n["x"]}
    assert ancestors([n["d"]], stop={n["b"], n["c"]}) == {n["d"], n["b"], n["c"]}
    assert ancestors([n["d"]], stop={n["b"]}) == {n["d"], n["b"], n["c"], n["a"], n["x"]}
    found = descendants([n["c"]])
    assert found - {graph.output_node()} == {n["c"], n["d"]}
    assert descendants([n["x"]]) >= {n["a"], n["b"], n["c"], n["d"]}
    assert ancestors([]) == set() == descendants([])


def test_parts_of_a_graph():
    graph, n = diamond()
    assert placeholders(graph) == [n["x"]] and names(calls(graph)) == ["a", "b", "c", "d"]
    assert results(graph) == [n["d"], None, n["b"]]


def test_views_lead_to_their_storage():
    graph = fx.Graph()
    x = graph.placeholder("x")
    t = graph.call_function(aten.t.default, (x,))
    halves = graph.call_function(aten.split.Tensor, (t, 2))
    half = graph.call_function(operator.getitem, (halves, 1))
    view = graph.call_function(aten.view.default, (half, [-1]))
    fresh = graph.call_function(aten.neg.default, (view,))
    pair = graph.call_function(aten.sort.default, (fresh,))
    item = graph.call_function(operator.getitem, (pair, 0))
    keyword = graph.call_function(aten.t.default, (), {"self": fresh})
    graph.output([item, keyword])
    assert [storage_root(node) for node in (x, t, halves, half, view)] == [x] * 5
    assert view_source(fresh) is None and storage_root(fresh) is fresh
    assert view_source(item) is None and storage_root(item) is item
    assert view_source(keyword) is fresh


def test_storages_are_measured_whole():
    value = torch.zeros(10, 10)[2:4, ::2]
    spec = tensor_spec(value)
    assert (spec.shape, spec.stride, spec.storage_bytes) == ((2, 5), (10, 2), 400)
    assert spec.numel == 10 and spec.nbytes == 40 and str(spec) == "float32[2, 5]"
    expanded = tensor_spec(torch.zeros(1).expand(100))
    assert expanded.nbytes == 400 and expanded.storage_bytes == 4
    assert str(tensor_spec(torch.zeros((), dtype=torch.bfloat16))) == "bfloat16[]"


def test_a_joint_graph_knows_its_inputs_and_outputs():
    joint = joint_of(lambda b, x: (b.add_(1), (x * b).sin())[1], torch.ones(3), leaf(3))
    kinds = [value.kind for value in joint.signature.inputs]
    assert kinds == [InputKind.BATCH, InputKind.BATCH, InputKind.RNG, InputKind.TANGENT]
    assert joint.signature.num_primals == 2 and joint.signature.inputs[0].mutated
    assert names(joint.inputs_of(InputKind.TANGENT)) == ["tangent0"]
    assert [value.kind for value in joint.signature.outputs] == [
        OutputKind.OUTPUT,
        OutputKind.UPDATE,
        OutputKind.GRADIENT,
    ]
    assert len(joint.outputs_of(OutputKind.OUTPUT, OutputKind.UPDATE)) == 2


def test_a_joint_graph_is_callable():
    b, x = torch.ones(3), leaf(3)
    joint = joint_of(lambda b, x: (x * b).sin(), b, x)
    inputs = joint_inputs(joint, [b, x])
    out, gradient = joint(*inputs)
    expected = (x * b).sin()
    assert_same(out, expected)
    assert_same(gradient, torch.autograd.grad(expected, x, inputs[-1])[0])


def test_specs_of_nodes():
    joint = joint_of(lambda x: x.t().sort(0).values, leaf(3, 4))
    by_name = {node.name: node for node in joint.graph.nodes}
    assert spec_of(by_name["sort"]) is None and is_tuple(by_name["sort"]) and storage_bytes(by_name["sort"]) == 0
    view = next(node for node in calls(joint.graph) if "aten.t." in str(node.target))
    assert spec_of(view).shape == (4, 3) and storage_bytes(view) == 48


def test_texts_are_the_same_for_the_same_program():
    def function(x):
        return torch.nn.functional.dropout(x.sin() * float("inf"), 0.25).to(torch.bfloat16)

    text = graph_text(joint_of(function, leaf(3)).graph)
    assert text == graph_text(joint_of(function, leaf(3)).graph)
    assert "philox_uniform(rng_state, 0" in text and "dtype=bfloat16" in text and "inf" in text
    assert text.splitlines()[-1].startswith("return [") and "0x" not in text


def test_a_sparse_tensor_has_no_strides_to_reach_over():
    indices = torch.tensor([[0, 2]])
    spec = tensor_spec(torch.sparse_coo_tensor(indices, torch.ones(2, 4), (3, 4)))
    assert spec.stride == () and spec.span == 1
