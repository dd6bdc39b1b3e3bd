"""share_heads: grouped-query attention whose keys and values are not repeated.

Models that write `keys[:, :, None].expand(...).reshape(...)`, or `repeat_interleave`, before attention copy each head
of keys and values once for every head of queries that reads it; and add up as many gradients afterwards. The kernels of
attention read a shared head where it is, and give the sum of its gradients.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, is_call, laid_out_as
from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.ir.graph import JointGraph, calls, marks_of, spec_of
from aottrain.ir.tensor import TensorSpec

aten = torch.ops.aten

# Ops that take fewer heads of keys and values than of queries, and where key and value stand among their arguments.
_KEY_AND_VALUE: dict[Any, tuple[int, int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (1, 2),
    aten._scaled_dot_product_flash_attention.default: (1, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (2, 3),
    aten._scaled_dot_product_flash_attention_backward.default: (2, 3),
}
_BACKWARDS = tuple(target for target, positions in _KEY_AND_VALUE.items() if positions == (2, 3))
_COPIES = (aten.view.default, aten._unsafe_view.default, aten.clone.default)


def share_heads(joint: JointGraph) -> JointGraph:
    """The same program, in which the sum of a shared head's gradients rounds otherwise than eager's. The graph itself
    where no heads are repeated for attention alone."""
    if not any(_repeated_operands(node) for node in calls(joint.graph)):
        return joint
    graph = copy_graph(joint.graph)
    for node in list(calls(graph)):
        operands = _repeated_operands(node)
        if operands and node.target in _BACKWARDS:
            _share_backward(node, operands)
        elif operands:
            for position, repeated in operands.items():
                node.update_arg(position, _shared(node, repeated))
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


@dataclass(frozen=True)
class _Repeated:
    """Keys or values of which each head is repeated."""

    source: fx.Node
    """(batch, heads, keys, width), or where `transposed` (batch, keys, heads, width), before heads were repeated."""
    times: int
    transposed: bool


def _repeated_operands(node: fx.Node) -> dict[int, _Repeated]:
    """What is repeated for this attention, by its position among the arguments: keys and values alike, or nothing."""
    positions = _KEY_AND_VALUE.get(node.target, ())
    operands = {position: _repeated(node.args[position]) for position in positions}
    repeated = {position: operand for position, operand in operands.items() if operand is not None}
    same = len({operand.times for operand in repeated.values()}) == 1
    return repeated if same and len(repeated) == len(positions) and not marks_of(node) else {}


def _repeated(operand: Any) -> _Repeated | None:
    transposed = is_call(operand, aten.transpose.int) and set(operand.args[1:]) in ({1, 2}, {-3, -2})
    node = operand.args[0] if transposed else operand
    whole = _spec(node)
    if not is_call(node, *_COPIES) or whole is None or len(whole.shape) != 4:
        return None
    while is_call(node, *_COPIES):
        node = node.args[0]
    if not is_call(node, aten.expand.default) or not is_call(node.args[0], aten.unsqueeze.default):
        return None
    source, dim = node.args[0].args[0], 3 if transposed else 2
    spec, wide = _spec(source), _spec(node)
    if spec is None or wide is None or spec.stride[-1] != 1 or len(spec.shape) != 4:
        return None
    times = wide.shape[dim] if len(wide.shape) == 5 else 1
    one_by_one = (*spec.shape[:dim], times, *spec.shape[dim:])
    together = (*spec.shape[: dim - 1], spec.shape[dim - 1] * times, *spec.shape[dim:])
    if times < 2 or wide.shape != one_by_one or whole.shape != together or wide.stride[dim] != 0:
        return None
    return _Repeated(source, times, bool(transposed))


def _shared(node: fx.Node, repeated: _Repeated) -> fx.Node:
    if not repeated.transposed:
        return repeated.source
    with node.graph.inserting_before(node):
        return add_call(node, aten.transpose.int, (repeated.source, 1, 2))


def _share_backward(node: fx.Node, operands: dict[int, _Repeated]) -> None:
    """In the place of each sum over the heads that share one, the gradient as attention gives it."""
    items: dict[Any, fx.Node] = {user.args[1]: user for user in node.users if is_call(user, operator.getitem)}
    repeated = dict(zip((1, 2), operands.values(), strict=True))
    ends = {number: _summed(item, repeated.get(number)) for number, item in items.items()}
    if len(items) != len(node.users) or None in ends.values():
        return
    arguments, named = list(node.args), dict(node.kwargs)
    for position, operand in operands.items():
        arguments[position] = _shared(node, operand)
    with node.graph.inserting_before(node):
        new = add_call(node, node.target, tuple(arguments), None, **named)
        replacements: dict[fx.Node, fx.Node] = {}
        for number, end in ends.items():
            gradient = add_call(node, operator.getitem, (new, number))
            if number in repeated and repeated[number].transposed:
                gradient = add_call(node, aten.transpose.int, (gradient, 1, 2))
            assert end is not None
            laid_out = laid_out_as(gradient, end)
            if laid_out is None:
                return
            replacements[end] = laid_out
    for end, gradient in replacements.items():
        end.replace_all_uses_with(gradient)


def _summed(item: fx.Node, repeated: _Repeated | None) -> fx.Node | None:
    """What becomes of the gradient of repeated heads: their sum, without the dimension that was summed; None where it
    is anything else. Of others the gradient itself."""
    if repeated is None:
        return item
    node, dim = item, 3 if repeated.transposed else 2
    if repeated.transposed:
        node = _only_user(node, aten.transpose.int) or node
        if node is item or set(node.args[1:]) not in ({1, 2}, {-3, -2}):
            return None
    while (after := _only_user(node, *_COPIES)) is not None:
        node = after
    spec, source = _spec(node), _spec(repeated.source)
    total = _only_user(node, aten.sum.dim_IntList)
    if total is None or spec is None or source is None:
        return None
    if spec.shape != (*source.shape[:dim], repeated.times, *source.shape[dim:]) or total.kwargs:
        return None
    if tuple(total.args[1:]) != ([dim], True):
        return None
    end = _only_user(total, aten.squeeze.dim, aten.view.default)
    ended = None if end is None else _spec(end)
    return end if ended is not None and ended.shape == source.shape and ended.dtype is source.dtype else None


def _only_user(node: fx.Node, *targets: Any) -> fx.Node | None:
    """The one that reads it, where it is a call of these."""
    users = list(node.users)
    return users[0] if len(users) == 1 and is_call(users[0], *targets) else None


def _spec(node: Any) -> TensorSpec | None:
    spec = spec_of(node) if isinstance(node, fx.Node) else None
    return None if spec is None or spec.symbolic is not None else spec
