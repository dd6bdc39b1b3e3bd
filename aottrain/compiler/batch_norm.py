"""split_batch_norms: each batch normalisation as its statistics and what is pointwise once they are known.

As one op, what a backward recomputes of it would pass over the batch again for statistics that take a few bytes to
save; and in channels_last statistics are sums over rows, which are known only when all rows are done.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from aottrain.compiler.rewriting import add_call
from aottrain.compiler.simplification import copy_graph, remove_dead_code
from aottrain.ir.graph import JointGraph, calls, spec_of, value_of
from aottrain.ir.tensor import TensorSpec
from aottrain.runtime.batch_norm import channel_dims

aten, own = torch.ops.aten, torch.ops.aottrain

_FORWARDS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
)


def split_batch_norms(joint: JointGraph) -> JointGraph:
    """The same program; rounded otherwise than eager's, as generated kernels round. The graph itself where it has none
    that can be split: of a fixed size, with running statistics."""
    if not any(node.target in _FORWARDS for node in calls(joint.graph)):
        return joint
    graph = copy_graph(joint.graph)
    for node in calls(graph):
        if node.target in _FORWARDS:
            _split_forward(graph, node)
        elif node.target is aten.native_batch_norm_backward.default:
            _split_backward(graph, node)
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


def _split_forward(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, running_mean, running_var, *rest = node.args
    training = node.target is not aten._native_batch_norm_legit_no_training.default and rest[0]
    momentum, eps = rest[-2:]
    if node.kwargs or not _is_plain(x) or not isinstance(running_mean, fx.Node) or not isinstance(running_var, fx.Node):
        return
    facts, wide, count = _spec(x), _wide(x), _count(x)
    with graph.inserting_before(node):
        if not training:
            mean, rstd = _cast(node, running_mean, wide), _rstd(node, running_var, eps)
            _replace(node, [add_call(node, own.batch_normalize.default, (x, mean, rstd, weight, bias))])
            return
        if count < 2 or value_of(node)[1].dtype is not wide:
            return
        mean = add_call(node, aten.mean.dim, (x, channel_dims(len(facts.shape)), False), dtype=wide)
        lost, square = _items(node, add_call(node, own.batch_spread.default, (x, mean)), 2)
        known = (mean, lost, square, running_mean, running_var, count, momentum, eps)
        mean, rstd, *new = _items(node, add_call(node, own.batch_statistics.default, known), 4)
        out = add_call(node, own.batch_normalize.default, (x, mean, rstd, weight, bias))
    _replace(node, [out, mean, rstd, *new])


def _split_backward(graph: fx.Graph, node: fx.Node) -> None:
    gradient, x, weight, running_mean, running_var, mean, rstd, training, eps, mask = node.args
    if not _is_plain(x) or not _is_plain(gradient):
        return
    wide = _wide(x)
    with graph.inserting_before(node):
        if not training:
            if not isinstance(running_mean, fx.Node) or not isinstance(running_var, fx.Node):
                return
            mean, rstd = _cast(node, running_mean, wide), _rstd(node, running_var, eps)
        if not all(isinstance(value, fx.Node) and _spec(value).dtype is wide for value in (mean, rstd)):
            return
        total, product = _items(node, add_call(node, own.batch_norm_sums.default, (gradient, x, mean, rstd)), 2)
        results: list[fx.Node | None] = [None, product, total]
        if mask[0] and training:  # type: ignore[index]
            known = (gradient, x, mean, rstd, weight, total, product)
            results[0] = add_call(node, own.batch_norm_input_gradient.default, known)
        elif mask[0]:  # type: ignore[index]
            step = rstd if weight is None else add_call(node, aten.mul.Tensor, (rstd, weight))
            ones = [1] * (len(_spec(x).shape) - 2)
            results[0] = add_call(
                node, aten.mul.Tensor, (gradient, add_call(node, aten.view.default, (step, [-1, *ones])))
            )
        for i, example in enumerate(value_of(node)):
            result = results[i]
            if result is not None and example is not None:
                results[i] = _cast(node, result, example.dtype)
    _replace(node, results)


def _rstd(node: fx.Node, variance: fx.Node, eps: Any) -> fx.Node:
    """Of the running variance."""
    moved = add_call(node, aten.add.Scalar, (_cast(node, variance, _wide(node.all_input_nodes[0])), eps))
    return add_call(node, aten.rsqrt.default, (moved,))


def _cast(like: fx.Node, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    return value if _spec(value).dtype is dtype else add_call(like, aten._to_copy.default, (value,), dtype=dtype)


def _is_plain(node: Any) -> bool:
    """A tensor of fixed size with channels."""
    facts = spec_of(node) if isinstance(node, fx.Node) else None
    return facts is not None and facts.symbolic is None and len(facts.shape) > 1 and facts.numel > 0


def _spec(node: Any) -> TensorSpec:
    found = spec_of(node)
    assert found is not None
    return found


def _wide(node: Any) -> torch.dtype:
    return torch.promote_types(_spec(node).dtype, torch.float32)


def _count(node: Any) -> int:
    shape = _spec(node).shape
    return math.prod(shape) // shape[1]


def _items(like: fx.Node, node: fx.Node, count: int) -> list[fx.Node]:
    return [add_call(like, operator.getitem, (node, i)) for i in range(count)]


def _replace(node: fx.Node, results: list[Any]) -> None:
    for user in list(node.users):
        place: Any = user.args[1]
        if user.target is operator.getitem and place < len(results) and results[place] is not None:
            user.replace_all_uses_with(results[place])
