"""Writes to whole tensors that nothing is a view of yet: each becomes the operator that gives what it writes.

So are most of them: running statistics, activations in place, `x += 1`. A program without others need not be run again
under torch's functionalization, which takes as long as tracing it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import snapshot_fake

from aottrain.compiler.graphs.simplification import copy_graph
from aottrain.ir.graph import (
    FORWARD_OUTPUTS,
    JointGraph,
    calls,
    copy_provenance,
    info,
    placeholders,
    set_value,
    storage_roots,
    value_of,
)
from aottrain.ir.ops import packet_name, without_writing


def without_whole_writes(joint: JointGraph) -> tuple[fx.Graph, list[int]] | None:
    """A copy of the graph in which nothing is written, with the updates of inputs behind the program's outputs, and the
    positions of those inputs. None where a write goes to a view, or to what has one by then, or writes more than
    its first argument; and where an operator would give another shape, type or strides than what it writes to."""
    graph = copy_graph(joint.graph)
    written = [node for node in calls(graph) if info(node).writes]
    memories = _memories(graph, written)
    if memories is None or not all(_may_be_updated(memory, joint, graph) for memory in memories.values()):
        return None
    place: dict[fx.Node, float] = {node: at for at, node in enumerate(graph.nodes)}
    place[graph.output_node()] = inf
    latest: dict[fx.Node, fx.Node] = {}  # by the memory that was written
    for node in written:
        memory = memories[node]
        new = _out_of_place(graph, node)
        if new is None:
            return None
        at = place[new] = place[node]
        node.replace_all_uses_with(new)
        latest.get(memory, memory).replace_all_uses_with(new, lambda user, at=at: place[user] > at)  # type: ignore[misc]
        latest[memory] = new
        graph.erase_node(node)
    return graph, _add_updates(graph, latest, joint)


def _memories(graph: fx.Graph, written: Sequence[fx.Node]) -> dict[fx.Node, fx.Node] | None:
    """For each of the nodes that write, the node whose memory it writes; None where a view is written, or what a view
    sees is written later."""
    memories: dict[fx.Node, fx.Node] = {}
    for node in written:
        target = node.args[0] if node.args else None
        if info(node).writes != (0,) or not isinstance(target, fx.Node):
            return None
        memories[node] = memories.get(target, target)
    seen: set[fx.Node] = set()  # memories of which there is a view
    values = [node for node in graph.nodes if node.op != "output"]
    roots = storage_roots(values)
    for node, root in roots.items():
        if memories.get(node) in seen:
            return None
        if root is not node:
            seen.add(memories.get(root, root))
    is_of_a_view = any(roots[memory] is not memory for memory in memories.values())
    return None if is_of_a_view else memories


def _may_be_updated(memory: fx.Node, joint: JointGraph, graph: fx.Graph) -> bool:
    """Whether it is what the program computes, or one of its inputs: not a constant, nor a tangent."""
    is_primal = memory in placeholders(graph)[: joint.signature.num_primals]
    return isinstance(value_of(memory), Tensor) and (memory.op == "call_function" or is_primal)


def _out_of_place(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """What gives the values that the node writes, in front of it."""
    target = without_writing(node.target)
    if target is None or torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
        return None
    before = value_of(node.args[0])  # type: ignore[arg-type]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    with torch.no_grad():  # among fakes
        after = target(*args, **kwargs)
    if not isinstance(after, Tensor) or _layout(after) != _layout(before):
        return None
    with graph.inserting_before(node):
        new = graph.create_node("call_function", target, node.args, node.kwargs, packet_name(target))
    set_value(new, snapshot_fake(after))
    copy_provenance(node, new)
    return new


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype, value.device


def _add_updates(graph: fx.Graph, latest: Mapping[fx.Node, fx.Node], joint: JointGraph) -> list[int]:
    """Behind the program's own outputs: of each input that was written what it is in the end."""
    inputs = placeholders(graph)[: joint.signature.num_primals]
    updated = [i for i, node in enumerate(inputs) if node in latest]
    outputs = list(graph.output_node().args[0])  # type: ignore[arg-type]
    first = len(joint.signature.output_indices(*FORWARD_OUTPUTS))
    outputs[first:first] = [latest[inputs[i]] for i in updated]
    graph.output_node().args = (outputs,)
    return updated
