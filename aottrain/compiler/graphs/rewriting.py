"""Calls in a graph: which one this is, and new ones, with all that a later stage reads of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from aottrain.compat import tree_flatten, tree_map
from aottrain.errors import VerificationError
from aottrain.ir.graph import (
    JointGraph,
    calls,
    copy_meta,
    copy_provenance,
    info,
    required_spec,
    set_value,
    spec_of,
    value_of,
    view_source,
)
from aottrain.ir.ops import OpKind
from aottrain.ir.tensor import TensorSpec, tensor_spec

aten = torch.ops.aten

# Of a cast without "memory_format": the layout stays.
CAST_KEYWORDS = {"dtype", "layout", "device"}
# The same elements in the same order, in another shape.
RESHAPES = (aten.view.default, aten._unsafe_view.default)


def add_call(like: fx.Node, target: Any, arguments: tuple[Any, ...], name: str | None = None, **kwargs: Any) -> fx.Node:
    """A call where the graph inserts now, with the value that it gives for fakes; written by the user where `like`,
    a node of the same graph, was."""
    node = like.graph.create_node("call_function", target, arguments, kwargs, name)
    copy_provenance(like, node)
    set_value(node, fake_result(target, arguments, kwargs, value_of(like)))
    return node


def is_cast(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a call gives the same numbers in this type, laid out as they were."""
    plain = node.target is aten._to_copy.default and {"dtype"} <= set(node.kwargs) <= CAST_KEYWORDS
    return plain and node.kwargs["dtype"] is dtype


def cast(like: fx.Node, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The value in this type, by a call as `add_call` makes it where it is of another."""
    if required_spec(value).dtype is dtype:
        return value
    return add_call(like, aten._to_copy.default, (value,), dtype=dtype)


def copy_into(graph: fx.Graph, node: fx.Node, operand: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A copy of a node as the last one of another graph. It does what `graph.node_copy` does, but that arguments are
    given to a node that is there: those of a new one fx looks through for symbols, which takes longer than all else.

    operand: the node there for each operand.
    """
    args, kwargs = fx.node.map_arg(node.args, operand), fx.node.map_arg(node.kwargs, operand)
    new = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    new.args = args
    if kwargs:
        new.kwargs = kwargs
    copy_meta(node, new)
    return new


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def producer_of(node: fx.Node) -> fx.Node:
    """The op that computes a value: for an item of a tuple the one that gives the tuple."""
    if node.op == "call_function" and info(node).kind is OpKind.STRUCTURE:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    return node


def fake_result(target: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any], like: Any = None) -> Any:
    """What a call gives for the fakes of its operands; of none, in the mode of another fake."""
    fake_args, fake_kwargs = tree_map(lambda v: value_of(v) if isinstance(v, fx.Node) else v, (arguments, kwargs))
    fakes = (value for value in tree_flatten((fake_args, fake_kwargs, like))[0] if hasattr(value, "fake_mode"))
    with getattr(next(fakes, None), "fake_mode", nullcontext()):
        return target(*fake_args, **fake_kwargs)


def laid_out_as(value: fx.Node, old: fx.Node) -> fx.Node | None:
    """The value in the layout of the node that it is to replace, copied if need be: readers of that node go by its
    strides and its start. None where no copy has that layout."""
    spec = spec_of(old)
    assert spec is not None
    if _lies_as(value, spec, value_of(old).storage_offset()):
        return value
    order = sorted(range(len(spec.shape)), key=lambda d: (-spec.stride[d], d))
    turned = add_call(value, aten.permute.default, (value, order))
    copy = add_call(value, aten.clone.default, (turned,), memory_format=torch.contiguous_format)
    back = add_call(value, aten.permute.default, (copy, sorted(range(len(order)), key=order.__getitem__)))
    return back if _lies_as(back, spec, value_of(old).storage_offset()) else None


def reads_alike(user: fx.Node, made: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether what a node gives lies in memory as it did, where others stand for its operands: what reads those goes by
    it. False of the graph's output."""
    if user.op != "call_function":
        return False

    def new(argument: fx.Node) -> fx.Node:
        return made.get(argument, argument)

    given, kwargs = fx.node.map_arg(user.args, new), fx.node.map_arg(user.kwargs, new)
    before, after = value_of(user), fake_result(user.target, given, kwargs)
    pairs = [(before, after)] if isinstance(before, torch.Tensor) else list(zip(before, after, strict=True))
    return all(
        one is None or tensor_spec(one).same_layout(tensor_spec(other))
        for one, other in pairs
        if isinstance(one, torch.Tensor) or one is None
    )


def _lies_as(node: fx.Node, spec: TensorSpec, start: int) -> bool:
    actual = spec_of(node)
    return actual is not None and actual.same_layout(spec) and value_of(node).storage_offset() == start


def verify_views(joint: JointGraph) -> None:
    """Raises VerificationError unless each view lies in memory where its op puts it, going by what it is a view of. A
    rewrite may have put another value there: generated kernels would then read other memory."""
    verified: set[Hashable] = set()
    for node in calls(joint.graph):
        source = view_source(node)
        if source is None or info(node).kind is OpKind.STRUCTURE or not isinstance(value_of(node), torch.Tensor):
            continue
        operands = tree_map(lambda v: _place(v) if isinstance(v, fx.Node) else v, (node.args, node.kwargs))
        key = node.target, repr(operands), repr(_place(node))
        if key in verified:  # in a model of equal blocks most are
            continue
        verified.add(key)
        expected = fake_result(node.target, node.args, node.kwargs)
        if _memory_of(expected) != _memory_of(value_of(node)):
            raise VerificationError(f"{node.name} is not where {node.target} of {source.name} lies")


def _memory_of(value: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides and start of a value: what of it says which elements it is. A dimension of one element is not
    stepped along, so whatever its stride is says nothing; a convolution to one pixel has other ones than its views."""
    strides = tuple(stride if size != 1 else 0 for size, stride in zip(value.shape, value.stride(), strict=True))
    return tuple(value.shape), strides, value.storage_offset()


def _place(node: fx.Node) -> tuple[Any, ...]:
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return (value,)
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype
