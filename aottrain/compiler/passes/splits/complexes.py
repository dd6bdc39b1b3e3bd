"""split_complex: a product of complex numbers that is read as pairs of reals is computed as four real products.

Rotary embeddings are often written so: view_as_real(view_as_complex(x) * table). Kernels are of real numbers, so such a
product and its gradient are calls of their own, and what comes before and after them (casts, other products) is written
to memory and read again. As pairs all of it is one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import CAST_KEYWORDS, RESHAPES, add_call, cast, fake_result
from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.ir.graph import JointGraph, calls, marks_of, required_spec, spec_of, value_of

aten = torch.ops.aten

_COPIES = (aten.clone.default, aten.resolve_conj.default, aten._conj.default, aten._conj_physical.default)


def split_complex(joint: JointGraph) -> JointGraph:
    """The same program up to rounding; the graph itself where it has no such product."""
    if not any(map(_readers, calls(joint.graph))):
        return joint
    graph = copy_graph(joint.graph)
    for product in list(calls(graph)):
        if readers := _readers(product):
            left, right = (_parts(product, operand) for operand in product.args if isinstance(operand, fx.Node))
            parts = multiplied(product, left, right)
            for reader in readers:
                _replace(reader, parts)
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


class Parts(NamedTuple):
    real: fx.Node
    imaginary: fx.Node
    is_conjugate: bool
    """The imaginary part is the other one's negative."""


def _readers(product: fx.Node) -> list[fx.Node]:
    """The views as reals that read a product, if nothing else does; empty where the call is another, or an operand that
    is as large as the product would have to be copied."""
    spec = spec_of(product)
    if product.target is not aten.mul.Tensor or spec is None or not spec.dtype.is_complex or spec.symbolic is not None:
        return []
    readers = list(product.users)
    operands = [spec_of(operand) if isinstance(operand, fx.Node) else None for operand in product.args]
    if any(other is None or other.dtype is not spec.dtype for other in operands) or marks_of(product):
        return []
    if any(reader.target is not aten.view_as_real.default or marks_of(reader) for reader in readers):
        return []
    copied = [required_spec(origin).numel for origin in map(_origin, product.args) if not _is_of_pairs(origin)]
    if not readers or len(copied) == 2 or any(2 * count > spec.numel for count in copied):
        return []
    stacked = fake_result(aten.view_as_real.default, (_contiguous(product),), {})
    return readers if all(value_of(reader).stride() == stacked.stride() for reader in readers) else []


def _contiguous(product: fx.Node) -> torch.Tensor:
    value = value_of(product)
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _origin(operand: Any) -> fx.Node:
    """What a value is a copy or a conjugate of."""
    node: fx.Node = operand
    while node.target in _COPIES and not marks_of(node):
        node = node.all_input_nodes[0]
    return node


def _is_of_pairs(node: fx.Node) -> bool:
    return node.target is aten.view_as_complex.default


def _parts(product: fx.Node, operand: fx.Node) -> Parts:
    origin = _origin(operand)
    is_conjugate, node = False, operand
    while node is not origin:
        is_conjugate ^= node.target in (aten._conj.default, aten._conj_physical.default)
        node = node.all_input_nodes[0]
    with product.graph.inserting_before(product):
        dtype = required_spec(product).dtype.to_real()
        if _is_of_pairs(origin):
            pairs = _before_cast(product, origin.all_input_nodes[0])
        else:
            plain = add_call(product, aten.clone.default, (origin,)) if value_of(origin).is_conj() else origin
            view = add_call(product, aten.view_as_real.default, (plain,))
            pairs = add_call(product, aten.clone.default, (view,), memory_format=torch.contiguous_format)
        halves = (add_call(product, aten.select.int, (pairs, -1, place)) for place in (0, 1))
        real, imaginary = (cast(product, half, dtype) for half in halves)
    return Parts(real, imaginary, is_conjugate)


def _before_cast(product: fx.Node, pairs: fx.Node) -> fx.Node:
    """What was cast as a whole, in pairs: the kernel of the products then casts what it reads."""
    views, source = [], pairs
    while source.target in RESHAPES:
        views.append(source)
        source = source.all_input_nodes[0]
    if not _is_cast(source) or required_spec(source).stride != required_spec(source.all_input_nodes[0]).stride:
        return pairs
    value = source.all_input_nodes[0]
    for view in reversed(views):
        value = add_call(product, view.target, (value, *view.args[1:]))
    return value


def _is_cast(node: fx.Node) -> bool:
    """Of real numbers to another type, on one device."""
    if node.target is not aten._to_copy.default or not set(node.kwargs) <= CAST_KEYWORDS or marks_of(node):
        return False
    own, source = required_spec(node), required_spec(node.all_input_nodes[0])
    return own.device == source.device and own.dtype.is_floating_point and source.dtype.is_floating_point


def _replace(reader: fx.Node, parts: Sequence[fx.Node]) -> None:
    """The pairs of a product, and a cast of them if nothing else reads them, which the kernel that makes them does."""
    views, last = [reader], reader
    while len(last.users) == 1 and (user := next(iter(last.users))).target in RESHAPES and not marks_of(user):
        views.append(user)
        last = user
    following = next(iter(last.users)) if len(last.users) == 1 else last
    with reader.graph.inserting_before(reader):
        if following is not last and _is_cast(following):
            value: fx.Node = stacked(reader, [cast(reader, part, required_spec(following).dtype) for part in parts])
            for view in views[1:]:
                value = add_call(view, view.target, (value, *view.args[1:]))
            if value_of(value).stride() == value_of(following).stride():
                following.replace_all_uses_with(value)
        reader.replace_all_uses_with(stacked(reader, parts))


def stacked(reader: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
    return add_call(reader, aten.stack.default, ([*parts], -1))


def multiplied(product: fx.Node, left: Parts, right: Parts) -> list[fx.Node]:
    """Both parts of (a + bi)(c + di) = (ac - bd) + (ad + bc)i, with the signs of b and d as they are."""
    with product.graph.inserting_before(product):

        def times(a: fx.Node, b: fx.Node) -> fx.Node:
            return add_call(product, aten.mul.Tensor, (a, b))

        def added(a: fx.Node, b: fx.Node, signs: tuple[bool, bool]) -> fx.Node:
            target = aten.sub.Tensor if signs[0] != signs[1] else aten.add.Tensor
            total = add_call(product, target, (a, b))
            return add_call(product, aten.neg.default, (total,)) if signs[0] else total

        same = left.is_conjugate == right.is_conjugate
        real = added(times(left.real, right.real), times(left.imaginary, right.imaginary), (False, same))
        cross = times(left.real, right.imaginary), times(left.imaginary, right.real)
        imaginary = added(*cross, (right.is_conjugate, left.is_conjugate))
        return [real, imaginary]
