"""sum_messages: rows that are looked up, scaled, and added to others by their numbers, as one call.

A layer of a graph network sends along each edge the features of one end, times a weight of the edge, and adds up what
arrives at the other. Its gradient is the same along the reversed edges. There are many more edges than nodes: one loop
reads the features where they lie and adds them where they belong, and what is sent is nowhere in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import RESHAPES, add_call, is_call
from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.compiler.passes.rows.order_scatters import MANY, viewed
from aottrain.ir.graph import JointGraph, calls, marks_of, required_spec, spec_of, value_of
from aottrain.ir.ops import ZEROS, packet_name
from aottrain.ops.rows import SUM_MESSAGES
from aottrain.toolchain.native import find_compiler

aten = torch.ops.aten


class _Messages(NamedTuple):
    """Of a sum of messages."""

    values: fx.Node
    source: fx.Node
    wraps: bool
    """Whether numbers in `source` count from the end, too."""
    scale: fx.Node | None
    target: fx.Node


def sum_messages(joint: JointGraph) -> JointGraph:
    """The same program with `aottrain::sum_messages` for sums of many rows of float32 on a CPU that are looked up by
    one index, and multiplied by a number of each, or of each of equal parts of a row. The graph itself where there is
    none."""
    if not any(_messages(node) for node in calls(joint.graph)) or find_compiler() is None:
        return joint
    graph = copy_graph(joint.graph)
    for node in list(calls(graph)):
        if messages := _messages(node):
            _replace(node, messages)
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


def _replace(node: fx.Node, messages: _Messages) -> None:
    values, source, wraps, scale, target = messages
    own, rows = required_spec(node).shape, required_spec(values).shape[0]
    edges = required_spec(source).shape[0]
    with node.graph.inserting_before(node):
        source, target = (_first_of_each(node, numbers) for numbers in (source, target))
        flat = viewed(values, (rows, required_spec(values).numel // rows))
        if scale is not None:
            scale = viewed(scale, (edges, required_spec(scale).numel // edges))
        arguments = flat, source, scale, target, own[0], wraps
        total = add_call(node, SUM_MESSAGES, arguments)
        node.replace_all_uses_with(viewed(total, own))


def _first_of_each(like: fx.Node, numbers: fx.Node) -> fx.Node:
    """Of numbers that are the same all along a row one for each."""
    while len(required_spec(numbers).shape) > 1:
        numbers = add_call(like, aten.select.int, (numbers, -1, 0))
    return numbers


def _messages(node: fx.Node) -> _Messages | None:
    """That a call adds up."""
    added = _added(node)
    if added is None or marks_of(node) or not _is_plain(node):
        return None
    rows, target = added
    while is_call(rows, *RESHAPES) and _is_read_by(rows, node):
        rows = rows.args[0]  # type: ignore[assignment]
    if not _is_read_by(rows, node) or not _is_plain(rows) or required_spec(rows).numel < MANY:
        return None
    if required_spec(rows).shape[0] != required_spec(target).shape[0]:
        return None
    if not is_call(rows, aten.mul.Tensor):
        looked_up = _looked_up(rows)
        return None if looked_up is None else _Messages(*looked_up, None, target)
    for one, other in (rows.args, rows.args[::-1]):
        looked_up = _looked_up(one)
        if looked_up is not None and isinstance(other, fx.Node) and _is_scale(other, one, rows):
            return _Messages(*looked_up, other, target)
    return None


def _added(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What is added to zeros by rows, and the numbers of these."""
    if node.kwargs:
        return None
    if node.target is aten.embedding_dense_backward.default:
        rows, target, _, padding, by_frequency = node.args
        plain = padding == -1 and not by_frequency and _is_index(target)
        return (rows, target) if plain else None  # type: ignore[return-value]
    if node.target not in (aten.index_add.default, aten.scatter_add.default) or len(node.args) != 4:
        return None
    into, dim, target, rows = node.args
    if packet_name(getattr(into, "target", None)) not in ZEROS or dim != 0:
        return None
    plain = _is_index(target, required_spec(rows).shape if node.target is aten.scatter_add.default else None)
    return (rows, target) if plain and _fits(rows, node) else None  # type: ignore[return-value]


def _fits(rows: Any, node: fx.Node) -> bool:
    """Whether they are as long as those that they are added to."""
    return required_spec(rows).shape[1:] == required_spec(node).shape[1:]


def _looked_up(node: Any) -> tuple[fx.Node, fx.Node, bool] | None:
    """Of rows that are looked up the values, their numbers, and whether these count from the end, too."""
    if not isinstance(node, fx.Node) or node.kwargs or marks_of(node):
        return None
    shape, whole = required_spec(node).shape, None
    match node.target, node.args:
        case aten.index.Tensor, (values, [source]):
            wraps = True
        case aten.index_select.default, (values, 0, source):
            wraps = False
        case aten.embedding.default, (values, source, *_):
            wraps = False
        case aten.gather.default, (values, 0, source):
            wraps, whole = False, shape  # of which it takes as many columns as there are numbers
        case _:
            return None
    plain = _is_index(source, whole) and _is_plain(values)
    plain = plain and required_spec(values).shape[1:] == shape[1:]
    return (values, source, wraps) if plain else None  # type: ignore[return-value]


def _is_scale(node: fx.Node, looked_up: Any, rows: fx.Node) -> bool:
    """Whether `rows` are what was looked up times this, which has one number for each of equal parts of each row. With
    as many numbers as rows have elements it would be read as they are."""
    spec, whole = spec_of(node), required_spec(rows).shape
    if spec is None or spec.dtype is not torch.float32 or spec.symbolic is not None or len(spec.shape) != len(whole):
        return False
    if required_spec(looked_up).shape != whole:
        return False
    same = next((d for d, (one, other) in enumerate(zip(spec.shape, whole, strict=True)) if one != other), len(whole))
    return same > 0 and set(spec.shape[same:]) == {1}


def _is_read_by(rows: Any, total: fx.Node) -> bool:
    """Whether nothing else reads them but for what their sum, or a view for it, begins with: zeros of their type."""
    if not isinstance(rows, fx.Node) or marks_of(rows):
        return False
    readers = [user for user in rows.users if packet_name(user.target) not in ZEROS or [*user.users] != [total]]
    return len(readers) == 1


def _is_plain(node: Any) -> bool:
    """Rows of float32 on a CPU, without gaps, of fixed size, with elements."""
    spec = spec_of(node) if isinstance(node, fx.Node) else None
    if spec is None or spec.symbolic is not None or spec.dtype is not torch.float32 or spec.device.type != "cpu":
        return False
    return bool(spec.numel) and len(spec.shape) > 1 and value_of(node).is_contiguous()


def _is_index(node: Any, shape: tuple[int, ...] | None = None) -> bool:
    """Numbers of rows, one after the other; shape: of a view that has the same number all along each row."""
    spec = spec_of(node) if isinstance(node, fx.Node) else None
    if spec is None or spec.symbolic is not None or spec.dtype is not torch.int64 or spec.device.type != "cpu":
        return False
    if shape is None:
        return len(spec.shape) == 1 and spec.stride == (1,)
    return spec.shape == shape and spec.stride == (1, *[0] * (len(shape) - 1))
