"""join_casts: the casts of weights and of their gradients, which autocast asks for one by one, by few calls.

Each is a kernel between two products that takes less time than its launch, and nothing fuses with it. What is cast
early is held until it is read, and what is cast late until then: a call takes so many bytes and no more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

import aottrain.ops.casts  # noqa: F401  (the op)
from aottrain.compiler.graphs.rewriting import add_call, producer_of
from aottrain.compiler.graphs.simplification import copy_graph
from aottrain.ir.graph import PartitionedGraph, calls, info, readers_of, spec_of, storage_bytes, storage_root
from aottrain.ir.ops import OpKind

aten = torch.ops.aten

_MOST_BYTES = 32 << 20  # of the halves that a call reads or writes
_HALVES = (torch.bfloat16, torch.float16)
_KEYWORDS = {"dtype", "layout", "device"}  # without "memory_format" the layout stays
_SUMS = (aten.sum.dim_IntList, aten.sum.default)


def join_casts(parts: PartitionedGraph) -> PartitionedGraph:
    """Both graphs with casts joined, bit for bit the same. Gradients are, where one tangent reaches all of them."""
    forward = _joined(parts.forward, (_early,))
    if parts.backward is None:
        return replace(parts, forward=forward)
    kinds = (_early, _late) if len(parts.tangents) == 1 else (_early,)
    return replace(parts, forward=forward, backward=_joined(parts.backward, kinds))


def _joined(graph: fx.Graph, kinds: Sequence[Callable[[fx.Node], bool]]) -> fx.Graph:
    """The graph itself where there is nothing to join."""
    if not any(len(batch) > 1 for kind in kinds for batch in _batches(graph, kind)):
        return graph
    graph = copy_graph(graph)
    for kind in kinds:
        for batch in list(_batches(graph, kind)):
            if len(batch) > 1:
                _join(batch, at_first=kind is _early)
    graph.lint()
    return graph


def _batches(graph: fx.Graph, kind: Callable[[fx.Node], bool]) -> Iterator[list[fx.Node]]:
    """Casts of one pair of types that are neighbours in program order."""
    open_batches: dict[object, list[fx.Node]] = {}
    for node in calls(graph):
        if not _is_plain_cast(node) or not kind(node):
            continue
        types = tuple(_spec(each).dtype for each in (node.args[0], node))
        batch = open_batches.setdefault(types, [])
        if batch and _halves([*batch, node]) > _MOST_BYTES:
            yield batch
            batch = open_batches[types] = []
        batch.append(node)
    yield from open_batches.values()


def _join(batch: Sequence[fx.Node], at_first: bool) -> None:
    graph, dtype = batch[0].graph, _spec(batch[0]).dtype
    place = graph.inserting_before(batch[0]) if at_first else graph.inserting_after(batch[-1])
    with place:
        joined = add_call(batch[0], torch.ops.aottrain.cast_many.default, ([cast.args[0] for cast in batch], dtype))
    with graph.inserting_after(joined):
        for number, cast in reversed(list(enumerate(batch))):
            item = add_call(cast, operator.getitem, (joined, number))
            cast.replace_all_uses_with(item)
            graph.erase_node(cast)


def _is_plain_cast(node: fx.Node) -> bool:
    """Whether a call only changes the type, of a dense tensor of a size that is known, to or from a half."""
    if node.target is not aten._to_copy.default or not {"dtype"} <= set(node.kwargs) <= _KEYWORDS:
        return False
    if not isinstance(node.args[0], fx.Node):
        return False  # a number
    made, source = spec_of(node), spec_of(node.args[0])
    if made is None or source is None or made.symbolic is not None or made.device != source.device:
        return False
    dense = made.nbytes == math.prod(made.shape) * made.dtype.itemsize
    halves = (made.dtype in _HALVES) != (source.dtype in _HALVES) and torch.float32 in (made.dtype, source.dtype)
    return halves and dense and made.stride == source.stride and 0 < _halves([node]) <= _MOST_BYTES


def _early(node: fx.Node) -> bool:
    """Of an input of the graph, for products alone; it may be saved for those of the backward."""
    return is_for_products(node, saved_too=True)


def is_for_products(cast: fx.Node, saved_too: bool = False) -> bool:
    """Whether a cast is of an input of the graph, and read by products alone; saved_too: or given back."""
    source = cast.args[0]
    if not isinstance(source, fx.Node) or source.op != "placeholder":
        return False
    readers = [reader for reader in readers_of(cast) if not (saved_too and reader.op == "output")]
    return bool(readers) and all(map(_is_product, readers))


def _late(node: fx.Node) -> bool:
    """A result of the graph, of what a library or a sum over rows has made for it alone."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    root = storage_root(source)
    if root.op != "call_function" or [user.op for user in node.users] != ["output"]:
        return False
    return readers_of(root) == [node] and (_is_product(producer_of(root)) or root.target in _SUMS)


def _is_product(node: fx.Node) -> bool:
    return node.op == "call_function" and info(node).kind is OpKind.COMPUTE


def _halves(casts: Sequence[fx.Node]) -> int:
    return sum(min(storage_bytes(cast), math.prod(_spec(cast).shape) * 2) for cast in casts)


def _spec(node: object):  # type: ignore[no-untyped-def]
    assert isinstance(node, fx.Node)
    spec = spec_of(node)
    assert spec is not None
    return spec
