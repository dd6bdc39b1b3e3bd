"""views_first: what is read in parts alone is computed in parts, each where it is read.

A bias is added to the two halves of a gate at once, a sequence is padded and read at several shifts: the whole value
would be in memory before any part of it is read, for no loop nest that goes through the parts goes through the whole.
Elementwise work on a part is that work on the same part of its operands. A part of a padded value is the operand with
less padding, what is padded twice is padded once, and a sum of a concatenation is the concatenation of the sums. A
copy of a concatenation in another order of dimensions is the concatenation of its parts in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import RESHAPES, add_call, is_call, reads_alike
from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.compiler.lowering import rules_for
from aottrain.compiler.lowering.reductions import reduced_dims
from aottrain.compiler.lowering.rules import argument, arguments
from aottrain.compiler.passes.splits.paddings import Steps, crop, is_pad, pad_once, padded_part, pads_of
from aottrain.compiler.passes.splits.stacks import lay_out_parts, parts_of_copy
from aottrain.compiler.schedule.grouping.cheap import VIEWS, cheap_rule
from aottrain.ir.graph import JointGraph, calls, info, required_spec, spec_of, value_of
from aottrain.ir.ops import OpKind
from aottrain.ir.tensor import tensor_spec

aten = torch.ops.aten

# How often an element may be computed, where that is cheap and reads one large operand.
_MOST_TIMES = 4
# What is smaller is in a cache when it is read.
_LEAST = 1 << 16
_MOST_PARTS = 8


def views_first(joint: JointGraph) -> JointGraph:
    """The same program; sums of concatenations may be rounded otherwise. The graph itself where nothing is read so."""
    if not any(_may_change(node) for node in calls(joint.graph)):
        return joint
    graph = copy_graph(joint.graph)
    for node in list(calls(graph)):
        crop(node)
    for node in list(calls(graph)):
        pad_once(node)
        _work_on_parts(node)
        _work_on_turns(node)
        _sum_parts(node)
        lay_out_parts(node)
    remove_dead_code(graph)
    for node in reversed(list(calls(graph))):
        _compute_parts(node)
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


def _may_change(node: fx.Node) -> bool:
    if is_call(node, aten.cat.default):
        return _is_large(node)
    if any(_interleaved(source) for source in node.all_input_nodes):
        return True
    if is_call(node, aten.sum.dim_IntList):
        return is_call(arguments(node)[0], aten.cat.default)
    if is_call(node, aten.constant_pad_nd.default):
        return is_pad(node) and _is_large(node)
    if not _is_large(node) or info(node).kind in VIEWS:
        return False
    if parts_of_copy(node) is not None:
        return True
    return all(user.op == "call_function" and (info(user).kind in VIEWS or is_pad(user)) for user in node.users)


def _is_large(node: fx.Node) -> bool:
    spec = spec_of(node)
    return spec is not None and spec.symbolic is None and spec.is_known and spec.nbytes >= _LEAST


# Parts.


@dataclass(frozen=True)
class _Part:
    """A view that something reads, and the views that lead to it from a value, itself the last."""

    chain: tuple[fx.Node, ...]

    @property
    def node(self) -> fx.Node:
        return self.chain[-1]


def _parts(node: fx.Node) -> list[_Part] | None:
    """The views through which all of a value is read; None where something reads it as it is, or a view is a result."""
    found: list[_Part] = []
    stack: list[tuple[fx.Node, ...]] = [(node,)]
    while stack:
        chain = stack.pop()
        readers = [user for user in chain[-1].users if user.op != "call_function" or info(user).kind not in VIEWS]
        if readers and (len(chain) == 1 or any(user.op == "output" or not rules_for(user) for user in readers)):
            return None
        if readers:
            found.append(_Part(chain[1:]))
        stack += [(*chain, user) for user in chain[-1].users if user not in readers]
    return found[::-1]


def _steps(part: _Part) -> Steps | None:
    """The same for parts at the same place; None where it is not known."""
    steps: list[tuple[Any, tuple[Any, ...]]] = []
    for view in part.chain:
        if info(view).kind is OpKind.STRUCTURE:
            found = _item(view)
            if found is None:
                return None
            steps.append(found)
        elif not isinstance(value_of(view), torch.Tensor):
            continue  # which its items tell
        elif view.kwargs or any(isinstance(argument, fx.Node) for argument in arguments(view)[1:]):
            return None
        elif view.target is aten.slice.Tensor:
            shape = value_of(view.all_input_nodes[0]).shape
            dim, start, end, step = arguments(view)[1:] + (0, None, None, 1)[len(arguments(view)) - 1 :]
            first, last, step = slice(start, end, step).indices(shape[dim])
            steps.append((aten.slice.Tensor, (dim % len(shape), first, last) + ((step,) if step > 1 else ())))
        else:
            steps.append((view.target, tuple(map(_hashable, arguments(view)[1:]))))
    return tuple(steps)


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument


def _item(item: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """An item of what is split as a view of its own."""
    call, number = arguments(item)
    if not isinstance(call, fx.Node) or not isinstance(number, int) or call.kwargs:
        return None
    source = value_of(arguments(call)[0])
    sizes = [piece.shape for piece in value_of(call)]
    if is_call(call, aten.split.Tensor, aten.split_with_sizes.default):
        dim = argument(call, "dim", 2, 0) % source.dim()
        start = sum(size[dim] for size in sizes[:number])
        return aten.slice.Tensor, (dim, start, start + sizes[number][dim])
    if is_call(call, aten.unbind.int):
        dim = argument(call, "dim", 1, 0) % source.dim()
        return aten.select.int, (dim, number)
    return None


def _compute_parts(node: fx.Node) -> None:
    """Compute each part of a value where it is read, if that is elementwise work or padding."""
    if not _may_change(node) or not node.users or is_call(node, aten.sum.dim_IntList):
        return
    pads = pads_of(node)
    parts = _parts(node) if pads is not None or _is_elementwise(node) else None
    if not parts or any(part.chain[0].op != "call_function" for part in parts):
        return
    steps = {part.node: each for part in parts if (each := _steps(part)) is not None}
    whole = required_spec(node).numel
    sizes = {each: required_spec(part).numel for part, each in steps.items()}
    if len(steps) < len(parts) or max(sizes.values()) >= whole:
        return
    if pads is None and not _is_worth(node, sum(sizes.values()) / whole):
        return
    new: dict[Steps, fx.Node] = {}
    with node.graph.inserting_before(node):
        for each in sizes:
            one = _elementwise_part(node, each) if pads is None else padded_part(node, pads, each)
            if one is None:
                return
            new[each] = one
    made = {part: new[each] for part, each in steps.items()}
    if all(reads_alike(user, made) for old in made for user in old.users if info(user).kind not in VIEWS):
        for old, one in made.items():
            for user in list(old.users):
                if info(user).kind not in VIEWS:
                    user.replace_input_with(old, one)
    _erase(node)


def _erase(node: fx.Node) -> None:
    """What nothing reads any more does not count as a reader of what it was made from."""
    for user in list(node.users):
        if user.op == "call_function" and info(user).kind in VIEWS:
            _erase(user)
    if not node.users:
        node.graph.erase_node(node)


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element follows from those of the operands at its place alone."""
    if info(node).kind is not OpKind.CHEAP or not isinstance(value_of(node), torch.Tensor):
        return False
    rules, shape = rules_for(node), required_spec(node).shape
    if len(rules) != 1 or rules[0].shape != shape or rules[0].reduced or rules[0].columns or not node.all_input_nodes:
        return False
    if any(operand.free for operand in rules[0].operands) or any(isinstance(a, (list, tuple)) for a in arguments(node)):
        return False
    rank = len(shape)
    aligned = all(
        all(d is None or d == rank - len(operand.dims) + i for i, d in enumerate(operand.dims))
        for operand in rules[0].operands
    )
    return aligned and "memory_format" not in node.kwargs and node.target not in _OF_PLACES


# Elementwise to a rule, but what an element is depends on where it lies.
_OF_PLACES = (aten.tril.default, aten.triu.default, aten.clone.default)


def _is_worth(node: fx.Node, times: float) -> bool:
    if times <= 1:
        return True
    large = [source for source in node.all_input_nodes if 2 * required_spec(source).numel >= required_spec(node).numel]
    return times <= _MOST_TIMES and cheap_rule(node) is not None and len(large) == 1


def _elementwise_part(node: fx.Node, steps: Steps, known: Mapping[fx.Node, fx.Node] | None = None) -> fx.Node | None:
    """known: what stands for the parts of some operands."""
    shape = list(required_spec(node).shape)

    def part_of(argument: Any) -> Any:
        if not isinstance(argument, fx.Node) or not value_of(argument).dim():
            return argument
        if known and argument in known:
            return known[argument]
        part = argument
        if list(value_of(argument).shape) != shape:
            part = add_call(node, aten.expand.default, (argument, shape))
        for target, rest in steps:
            part = add_call(node, target, (part, *(list(each) if isinstance(each, tuple) else each for each in rest)))
        return part

    try:
        kwargs: dict[str, Any] = {key: part_of(value) for key, value in node.kwargs.items()}
        return add_call(node, node.target, tuple(map(part_of, arguments(node))), **kwargs)
    except (RuntimeError, ValueError):  # no view of an operand has that shape
        return None


# Concatenations.


def _work_on_parts(node: fx.Node) -> None:
    """Elementwise work on a concatenation and on what else is read in parts, as the gradient of an activation before a
    gate is, is that work on each part; so is work on what was gathered, as an activation of a larger image beside
    another one."""
    if not _is_large(node) or not _is_elementwise(node):
        return
    wholes: list[Any] = [source for source in node.all_input_nodes if is_call(source, aten.cat.default)]
    others = [source for source in node.all_input_nodes if source not in wholes]
    if len(wholes) != 1 or _shape_of(wholes[0]) != _shape_of(node):
        return
    if not (any(map(_is_read_in_parts, others)) if others else _is_gathered(wholes[0])):
        return
    (whole,) = wholes
    parts, rank = whole.args[0], len(_shape_of(node))
    dim = argument(whole, "dim", 1, 0) % rank
    dtype = required_spec(whole).dtype
    if len(parts) > _MOST_PARTS or any(required_spec(part).dtype is not dtype for part in parts):
        return
    made, start = [], 0
    with node.graph.inserting_before(node):
        for part in parts:
            end = start + _shape_of(part)[dim]
            made.append(_elementwise_part(node, ((aten.slice.Tensor, (dim, start, end)),), {whole: part}))
            start = end
        if any(part is None for part in made):
            return
        new = add_call(node, aten.cat.default, (made, dim))
    if tensor_spec(value_of(new)).same_layout(required_spec(node)):
        node.replace_all_uses_with(new)


def _is_gathered(whole: fx.Node) -> bool:
    """Whether something makes a part of it that is no cheap work, to be done again where the concatenation is read, and
    nothing else reads that: as a larger image."""
    made = [part for part in arguments(whole)[0] if part.op == "call_function" and info(part).kind not in VIEWS]
    return len(whole.users) == 1 and any(rules_for(part) and cheap_rule(part) is None for part in made)


def _shape_of(node: fx.Node) -> tuple[int, ...]:
    return required_spec(node).shape


def _is_read_in_parts(value: fx.Node) -> bool:
    return value.op == "call_function" and any(
        user.op == "call_function" and info(user).kind in VIEWS for user in value.users
    )


def _sum_parts(node: fx.Node) -> None:
    """A sum of each part of a concatenation along another dimension, and the concatenation of these few numbers; so of
    parts that take turns."""
    if not is_call(node, aten.sum.dim_IntList) or not _is_large_sum(node):
        return
    whole: Any = arguments(node)[0]
    joined = _interleaved(whole) or whole
    if not is_call(joined, aten.cat.default) and joined is whole:
        return
    parts, rank = joined.args[0], len(required_spec(joined).shape)
    dim, dims = argument(joined, "dim", 1, 0) % rank, reduced_dims(whole, arguments(node)[1])
    keeps = bool(argument(node, "keepdim", 2, False))
    alike = {required_spec(part).dtype for part in parts} == {required_spec(joined).dtype}
    alike &= joined is not whole or all(len(required_spec(part).shape) == rank for part in parts)
    # Where parts take turns, two dimensions of the stack are one: those before it are the same in both.
    last = dim if joined is whole else dim - 1
    if dim in dims or len(parts) > _MOST_PARTS or not alike or (joined is not whole and max(dims) >= last):
        return
    with node.graph.inserting_before(node):
        kwargs: dict[str, Any] = dict(node.kwargs)
        sums = [add_call(node, node.target, (part, *arguments(node)[1:]), **kwargs) for part in parts]
        new = add_call(node, joined.target, (sums, dim if keeps else dim - sum(d < dim for d in dims)))
        if joined is not whole:
            new = add_call(node, aten.view.default, (new, list(_shape_of(node))))
    if tensor_spec(value_of(new)).same_layout(required_spec(node)):
        node.replace_all_uses_with(new)


def _interleaved(value: Any) -> Any:
    """The stack, a node, of which a value is a view with the stack's dimension and the one before it in one, so that
    its parts take turns; None of another value."""
    if not is_call(value, *RESHAPES):
        return None
    stack = arguments(value)[0]
    if not is_call(stack, aten.stack.default):
        return None
    shape, own = _shape_of(stack), _shape_of(value)
    dim = argument(stack, "dim", 1, 0) % len(shape)
    merged = (*shape[: dim - 1], shape[dim - 1] * shape[dim], *shape[dim + 1 :]) if dim else ()
    return stack if own == merged else None


def _work_on_turns(node: fx.Node) -> None:
    """Elementwise work on values that take turns is that work on each, as a rounding of what was turned in float32."""
    sources = node.all_input_nodes
    stack = _interleaved(sources[0]) if len(sources) == 1 and _is_large(node) and _is_elementwise(node) else None
    if stack is None or len(stack.users) > 1 or len(sources[0].users) > 1 or sources[0] not in arguments(node):
        return
    parts, dtype = arguments(stack)[0], required_spec(stack).dtype
    if len(parts) > _MOST_PARTS or any(required_spec(part).dtype is not dtype for part in parts):
        return
    with node.graph.inserting_before(node):
        kwargs: dict[str, Any] = dict(node.kwargs)
        made = []
        for part in parts:
            given = tuple(part if each is sources[0] else each for each in arguments(node))
            made.append(add_call(node, node.target, given, **kwargs))
        new = add_call(node, stack.target, (made, argument(stack, "dim", 1, 0)))
        new = add_call(node, aten.view.default, (new, list(_shape_of(node))))
    if tensor_spec(value_of(new)).same_layout(required_spec(node)):
        node.replace_all_uses_with(new)


def _is_large_sum(node: fx.Node) -> bool:
    source = arguments(node)[0]
    return isinstance(source, fx.Node) and _is_large(source)
