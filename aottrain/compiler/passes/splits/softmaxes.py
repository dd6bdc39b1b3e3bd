"""split_softmaxes: a softmax over the first dimension in memory, if it is long, as maxima, exponentials and sums.

Its rows lie across memory, and are too long to be taken side by side. The parts are reductions over rows as memory has
them, and pointwise ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, cast, laid_out_as
from aottrain.compiler.lowering.rules import LONGEST_SIDE_BY_SIDE, NEIGHBOURS
from aottrain.compiler.passes.splits.calls import split_calls
from aottrain.ir.graph import JointGraph, required_spec, spec_of

aten = torch.ops.aten

_FORWARDS = (aten._softmax.default, aten._log_softmax.default)
_BACKWARDS = (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
_WIDE = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}


def split_softmaxes(joint: JointGraph) -> JointGraph:
    """The same program, rounded otherwise than eager's. The graph itself where it has no such softmax."""
    return split_calls(joint, _is_split, _split)


def _split(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        placed = laid_out_as((_forward if node.target in _FORWARDS else _backward)(node), node)
    if placed is not None:
        node.replace_all_uses_with(placed)


def _is_split(node: fx.Node) -> bool:
    """Whether all of its tensors lie so."""
    if node.target in _FORWARDS:
        return all(_is_across(each, node.args[1]) for each in (node, node.args[0]))
    return node.target in _BACKWARDS and all(_is_across(each, node.args[2]) for each in (node, *node.args[:2]))


def _is_across(source: Any, dim: Any) -> bool:
    """Whether this dimension is long, and what else is larger than one lies closer together."""
    spec = spec_of(source) if isinstance(source, fx.Node) else None
    if spec is None or spec.symbolic is not None or spec.dtype not in _WIDE or spec.device.type != "cpu":
        return False
    if not spec.shape or spec.shape[dim] <= LONGEST_SIDE_BY_SIDE:
        return False
    others = [(spec.stride[d], size) for d, size in enumerate(spec.shape) if d != dim % len(spec.shape) and size > 1]
    if not others or max(others)[0] > spec.stride[dim]:
        return False
    nearest, size = min(others)
    return nearest == 1 and size >= NEIGHBOURS


def _forward(node: fx.Node) -> fx.Node:
    source, dim = node.args[:2]
    x = _widened(node, source)
    shifted = add_call(node, aten.sub.Tensor, (x, add_call(node, aten.amax.default, (x, [dim], True))))
    power = add_call(node, aten.exp.default, (shifted,))
    total = add_call(node, aten.sum.dim_IntList, (power, [dim], True))
    if node.target is aten._log_softmax.default:
        result = add_call(node, aten.sub.Tensor, (shifted, add_call(node, aten.log.default, (total,))))
    else:
        result = add_call(node, aten.div.Tensor, (power, total))
    return cast(node, result, required_spec(node).dtype)


def _backward(node: fx.Node) -> fx.Node:
    """y * (g - sum(g * y)) of a softmax, g - exp(y) * sum(g) of its logarithm."""
    gradient, result, dim = node.args[:3]
    g, y = _widened(node, gradient), _widened(node, result)
    logarithmic = node.target is aten._log_softmax_backward_data.default
    shares = add_call(node, aten.exp.default, (y,)) if logarithmic else y
    product = g if logarithmic else add_call(node, aten.mul.Tensor, (g, y))
    total = add_call(node, aten.sum.dim_IntList, (product, [dim], True))
    out = add_call(node, aten.sub.Tensor, (product, add_call(node, aten.mul.Tensor, (shares, total))))
    return cast(node, out, required_spec(node).dtype)


def _widened(node: fx.Node, value: Any) -> fx.Node:
    return cast(node, value, _WIDE[required_spec(value).dtype])
