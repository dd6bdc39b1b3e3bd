"""Backward graphs for calls in which some tangents are undefined, because nothing downstream reads those outputs.

Eager never runs the gradient formulas of such outputs: it gives None, and it never multiplies a zero by an infinity.
So an undefined tangent is propagated, which is exact because a gradient is linear in the tangents. Where all arguments
of an op that depend on tangents are undefined, its value is undefined, but where it puts them beside values that depend
on none. A sum of a defined and an undefined value is the defined one. Any other op reads zeros in the place of what is
undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import copy_into
from aottrain.compiler.graphs.simplification import remove_dead_code
from aottrain.errors import UnsupportedError
from aottrain.ir.graph import (
    InputKind,
    JointGraph,
    PartitionedGraph,
    copy_meta,
    is_tuple,
    placeholders,
    required_spec,
    results,
    spec_of,
    storage_root,
    value_of,
)
from aottrain.ir.ops import ZEROS, packet_name
from aottrain.ir.sizes.expressions import Size, SizeExpression
from aottrain.ir.tensor import contiguous_strides, start_of

aten = torch.ops.aten

# Ops that read a tensor's shape alone: their result does not depend on a tangent among their arguments.
_SHAPE_ONLY = {
    "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided",
    "ones_like", "full_like", "empty_like",  # not zeros_like: of a tangent it is a gradient that is zero, as sign's is
}  # fmt: skip


def check_constants(backward: fx.Graph, num_held: int) -> None:
    """Raises UnsupportedError where part of a gradient depends on no tangent, as torch.normal's, which is zero: which
    output it stands for, whose tangent may be undefined, cannot be told."""
    tangents = placeholders(backward)[num_held:]
    if len(tangents) < 2:
        return
    late = _dependent(tangents)
    parts = [node for node in results(backward) if node is not None]
    for node in backward.nodes:
        if packet_name(node.target) == "add" and node in late:
            parts += [source for source in node.all_input_nodes if spec_of(source) is not None]
    if any(part not in late for part in parts):
        raise UnsupportedError("a gradient is zero whatever the tangents are, and some output may go unused")


def expected_tangents(joint: JointGraph) -> tuple[bool, ...]:
    """Which tangents most likely come: a loss among other results is what a training step goes back from, and the
    others' are then undefined. () where all may come: where there is no scalar among several, or more than one."""
    scalars = [spec.spec.shape == () for spec in joint.signature.inputs if spec.kind is InputKind.TANGENT]
    return tuple(scalars) if len(scalars) > 1 and sum(scalars) == 1 else ()


def with_tangents(joint: JointGraph, defined: tuple[bool, ...]) -> JointGraph:
    """The program for calls in which these tangents alone come. It has the same inputs and outputs."""
    if not defined:
        return joint
    graph = specialise_backward(joint.graph, len(joint.placeholders) - len(defined), defined)
    return replace(joint, graph=graph, defined=defined)


def for_tangents(parts: PartitionedGraph, defined: tuple[bool, ...]) -> PartitionedGraph:
    """The program cut in two, with the backward for these tangents alone."""
    if parts.backward is None or not defined:
        return parts
    num_held = parts.signature.num_sizes + len(parts.residuals)
    return replace(parts, backward=specialise_backward(parts.backward, num_held, defined), defined=defined)


def specialise_backward(backward: fx.Graph, num_held: int, defined: Sequence[bool]) -> fx.Graph:
    """The backward for a pattern of defined tangents, which follow its first `num_held` inputs. Inputs stay the same;
    gradients become None where undefined."""
    if all(defined):
        return backward
    inputs = placeholders(backward)
    tangents = inputs[num_held:]
    late = _dependent(tangents)
    undefined = {node for node, flag in zip(tangents, defined, strict=True) if not flag}
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node | None] = {}
    for node in inputs:
        new[node] = graph.create_node("placeholder", node.name, name=node.name)
        copy_meta(node, new[node])  # type: ignore[arg-type]
        if node in undefined:
            new[node] = None
    for node in backward.nodes:
        if node.op == "call_function":
            new[node] = _rewrite(graph, node, new, late)
    graph.output([None if node is None else new[node] for node in results(backward)])
    remove_dead_code(graph)
    return graph


def _rewrite(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node | None], late: set[fx.Node]) -> fx.Node | None:
    undefined = [source for source in node.all_input_nodes if source in new and new[source] is None]
    if undefined:
        defined = [source for source in node.all_input_nodes if new[source] is not None and source in late]
        if not defined and node in late and not _holds_more(node, late):
            return None
        if packet_name(node.target) == "add" and len(node.args) == 2 and len(defined) == 1 and not node.kwargs:
            survivor, total = spec_of(defined[0]), spec_of(node)
            if survivor and total and survivor.same_shape(total) and survivor.dtype == total.dtype:
                kept = new[defined[0]]
                assert kept is not None
                # A gradient that is returned as it is has the layout and the strides that eager gives it.
                returned = all(user.op == "output" for user in node.users)
                if not returned and value_of(defined[0]).layout is not value_of(node).layout:
                    # A sparse part of a dense sum: what follows was traced for a dense one.
                    kept = graph.call_function(aten._to_dense.default, (kept,))
                    copy_meta(node, kept)
                    return kept
                return kept if returned or _lie_alike(defined[0], node) else copied(graph, node, kept)

    waits = packet_name(node.target) == "held_back"  # for those tangents that come

    def value(source: fx.Node) -> Any:
        if waits and new[source] is None:
            return None
        return _zeros(graph, source) if new[source] is None else new[source]

    copy = copy_into(graph, node, value)
    if waits:
        held, tangents = copy.args
        copy.args = (held, [tangent for tangent in tangents if tangent is not None])  # type: ignore[union-attr]
    return copy


def _lie_alike(term: fx.Node, total: fx.Node) -> bool:
    """Whether views of the sum are right of the term, too: they also count from where the sum begins in its memory."""
    term_spec, total_spec = required_spec(term), required_spec(total)
    return term_spec.same_layout(total_spec) and start_of(value_of(term)) == start_of(value_of(total)) is not None


def _holds_more(node: fx.Node, late: set[fx.Node]) -> bool:
    """Whether parts of the value are given by what depends on no tangent and is not zero."""
    if packet_name(node.target) not in ("cat", "stack"):
        return False
    return any(
        source not in late and packet_name(storage_root(source).target) not in ZEROS for source in node.all_input_nodes
    )


def _dependent(tangents: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes whose values depend on a tangent, tangents included."""
    dependent, stack = set(tangents), list(tangents)
    while stack:
        for user in stack.pop().users:
            if user not in dependent and user.op == "call_function" and packet_name(user.target) not in _SHAPE_ONLY:
                dependent.add(user)
                stack.append(user)
    return dependent


def copied(graph: fx.Graph, like: fx.Node, value: fx.Node) -> fx.Node:
    """The value with the strides that the whole backward gave `like`: later views were traced for them."""
    spec = spec_of(like)
    assert spec is not None
    if spec.symbolic is None and spec.stride == contiguous_strides(spec.shape):
        node = graph.call_function(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
        copy_meta(like, node)
        return node
    sizes, strides = _numbers(graph, spec.sizes), _numbers(graph, spec.strides)
    memory = graph.call_function(aten.new_empty_strided.default, (value, sizes, strides))
    node = graph.call_function(aten.copy.default, (memory, value))
    for new in (memory, node):
        copy_meta(like, new)
    return node


def _zeros(graph: fx.Graph, source: fx.Node) -> fx.Node:
    """Zeros in the place of an undefined value that an op needs to see; eager materialises them at the same places."""
    spec = spec_of(source)
    assert spec is not None and not is_tuple(source), f"{source.name} has no single tensor to stand for it"
    options: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device}
    node = graph.call_function(aten.zeros.default, (_numbers(graph, spec.sizes),), options)
    copy_meta(source, node)
    contiguous = spec.symbolic is None and spec.stride == contiguous_strides(spec.shape)
    return node if contiguous else copied(graph, source, node)


def _numbers(graph: fx.Graph, sizes: Sequence[Size]) -> list[Any]:
    """Sizes as arguments of an op: symbolic ones are computed in the graph, from its inputs of those names."""
    symbols = {node.name: node for node in placeholders(graph)}
    return [
        graph.call_function(size, tuple(symbols[name] for name in size.names))
        if isinstance(size, SizeExpression)
        else size
        for size in sizes
    ]
