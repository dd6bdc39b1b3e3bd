"""lay_out_parts: parts of a stack are written where a copy of the stack in another order of dimensions has them.

The gradients of queries, keys and values that are parts of one projection are stacked, and the stack is turned around:
it would be written and read once more, and no sum of the copy is made where its parts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, is_call
from aottrain.compiler.lowering.rules import argument, arguments
from aottrain.ir.graph import required_spec, spec_of, value_of

aten = torch.ops.aten

# Bytes that lie side by side in a part and in the copy: less is better turned around tile by tile.
_LEAST_ROW = 64


class _Copied(NamedTuple):
    joined: fx.Node
    """The stack or the concatenation."""
    order: Sequence[int]
    """Of its dimensions, in the copy."""


def parts_of_copy(node: fx.Node) -> _Copied | None:
    """What a call copies in another order of dimensions, where that is a stack which nothing else reads."""
    if not is_call(node, aten.clone.default) or node.kwargs != {"memory_format": torch.contiguous_format}:
        return None
    view = arguments(node)[0]
    if not is_call(view, aten.permute.default, aten.transpose.int) or len(view.users) > 1:
        return None
    joined, *dims = arguments(view)
    spec = spec_of(joined)
    if not is_call(joined, aten.stack.default, aten.cat.default) or len(joined.users) > 1 or spec is None:
        return None
    rank = len(spec.shape)
    order = [d % rank for d in (dims[0] if is_call(view, aten.permute.default) else range(rank))]
    if is_call(view, aten.transpose.int):
        first, second = (d % rank for d in dims)
        order[first], order[second] = second, first
    joins = argument(joined, "dim", 1, 0) % rank
    row = spec.shape[-1] * spec.dtype.itemsize
    same = all(value_of(part).dtype is spec.dtype for part in arguments(joined)[0])
    if order[-1] != rank - 1 or joins == rank - 1 or row < _LEAST_ROW or not same:
        return None
    return _Copied(joined, order)


def lay_out_parts(node: fx.Node) -> None:
    copied = parts_of_copy(node)
    if copied is None:
        return
    joined, order = copied
    joins = argument(joined, "dim", 1, 0) % len(order)
    order_of_parts = order
    if is_call(joined, aten.stack.default):
        order_of_parts = [d - (d > joins) for d in order if d != joins]
    with node.graph.inserting_before(node):
        parts = [add_call(node, aten.permute.default, (part, order_of_parts)) for part in arguments(joined)[0]]
        made = add_call(node, joined.target, (parts, order.index(joins)))
    if required_spec(made).same_layout(required_spec(node)):
        node.replace_all_uses_with(made)
