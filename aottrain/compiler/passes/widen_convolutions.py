"""widen_convolutions: a convolution along rows becomes one of images of one row, as ATen itself does it.

A library has another layout for images alone: (N, C, 1, L) may be in channels_last, where each place's channels lie
together, and (N, C, L) may not.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call
from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.ir.graph import JointGraph, calls, marks_of, required_spec, spec_of
from aottrain.ir.tensor import contiguous_strides

aten = torch.ops.aten

# By target: how many of the first arguments are tensors of rows (a gradient, an input, a weight), and where the stride,
# the padding, the dilation and the padding of the output stand, one number each.
_CALLS: dict[Any, tuple[int, dict[int, int]]] = {
    aten.convolution.default: (2, {3: 1, 4: 0, 5: 1, 7: 0}),
    aten.convolution_backward.default: (3, {4: 1, 5: 0, 6: 1, 8: 0}),
}
_ROWS = 2  # the dimension of size 1 that they get


def widen_convolutions(joint: JointGraph) -> JointGraph:
    """The same program; the graph itself where it has no convolution along rows on a CPU."""
    if not any(map(_is_widened, calls(joint.graph))):
        return joint
    graph = copy_graph(joint.graph)
    for node in list(calls(graph)):
        if _is_widened(node):
            with graph.inserting_before(node):
                _widen(node)
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


def _is_widened(node: fx.Node) -> bool:
    if node.target not in _CALLS or node.kwargs or marks_of(node):
        return False
    specs = [spec_of(source) for source in node.all_input_nodes]
    if any(spec is None or spec.symbolic is not None or spec.device.type != "cpu" for spec in specs):
        return False
    results = [node] if spec_of(node) is not None else list(node.users)
    specs = [spec_of(arg) for arg in (*node.args[: _CALLS[node.target][0]], *results) if isinstance(arg, fx.Node)]
    rows = [spec for spec in specs if spec is not None and len(spec.shape) != 1]
    return all(len(spec.shape) == 3 and spec.numel for spec in rows) and all(map(_is_contiguous, results))


def _is_contiguous(node: fx.Node) -> bool:
    spec = required_spec(node)
    return spec.stride == contiguous_strides(spec.shape)


def _widen(node: fx.Node) -> None:
    num_tensors, numbers = _CALLS[node.target]
    args = list(node.args)
    for i in range(num_tensors):
        args[i] = add_call(node, aten.unsqueeze.default, (args[i], _ROWS))
    for i, number in numbers.items():
        args[i] = [number, *args[i]]  # type: ignore[misc]
    wide = add_call(node, node.target, tuple(args))
    if node.target is aten.convolution.default:
        news = {node: wide}
    else:
        news = {item: add_call(node, operator.getitem, (wide, item.args[1])) for item in node.users}
    narrow = {old: _narrowed(old, new) for old, new in news.items()}
    for old, new in narrow.items():
        old.replace_all_uses_with(new)


def _narrowed(old: fx.Node, new: fx.Node) -> fx.Node:
    """The result along rows again, laid out as it was: rows that are given channel by channel may be taken as an image
    in channels_last, and then so is the result."""
    if len(required_spec(old).shape) == 1:
        return new  # of a bias
    shape = required_spec(old).shape
    if 1 in shape[1:]:  # in either layout the same, but for strides that say nothing, of which a view gives eager's
        return add_call(new, aten.view.default, (new, list(shape)))
    narrow = add_call(new, aten.squeeze.dim, (new, _ROWS))
    if required_spec(narrow).stride == required_spec(old).stride:
        return narrow
    return add_call(new, aten.clone.default, (narrow,), memory_format=torch.contiguous_format)
