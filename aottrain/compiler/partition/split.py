"""apply_partition: cut the joint graph into a forward and a backward graph as a plan says."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import copy_into
from aottrain.compiler.graphs.simplification import remove_dead_code
from aottrain.compiler.partition.late_gradients import late_gradients
from aottrain.errors import VerificationError
from aottrain.ir.analysis.reach import ancestors, descendants
from aottrain.ir.graph import (
    FORWARD_OUTPUTS,
    PRIMALS,
    InputKind,
    JointGraph,
    OutputKind,
    PartitionedGraph,
    copy_meta,
    is_size,
    is_tuple,
    placeholders,
    storage_root,
    view_source,
)
from aottrain.ir.plan import PartitionPlan

aten = torch.ops.aten


def apply_partition(joint: JointGraph, plan: PartitionPlan) -> PartitionedGraph:
    """The backward runs in the joint graph's order, but for gradients that wait (`late_gradients`); a recomputed value
    is computed just before its first use.

    Raises VerificationError where the plan leaves a gradient without what it needs.
    """
    by_name = {node.name: node for node in joint.graph.nodes}
    missing = [name for name in plan.saved if name not in by_name]
    if missing:
        raise VerificationError(f"the plan saves {missing[0]}, which the graph does not hold")
    saved = [by_name[name] for name in plan.saved]
    primals = joint.inputs_of(*PRIMALS)
    copied = {node for node, spec in zip(primals, joint.signature.inputs, strict=False) if spec.copied}
    gradients = [joint.results[i] for i in joint.signature.output_indices(OutputKind.GRADIENT)]
    effects, late_effects = joint.effects()
    again = set(plan.recomputed)
    handed = {node for node in saved if node.name in again}
    stop = set(saved) - handed
    needed = ancestors([*(node for node in gradients if node is not None), *late_effects], stop=stop)
    sizes = joint.inputs_of(InputKind.SIZE)
    inputs = [*primals, *joint.inputs_of(InputKind.RNG)]
    for node in inputs:
        if node in needed and node in copied and node not in saved:
            raise VerificationError(
                f"the backward reads {node.name}, which may be written before it, and it is not saved"
            )
    direct = {node: None for node in inputs if node in needed and node not in copied}
    residual_nodes = [*direct, *(node for node in saved if node not in direct and node in needed)]
    positions = {node: i for i, node in enumerate(inputs)}
    residuals = tuple((node.name, positions[node] if node in direct else None) for node in residual_nodes)
    inputs = [*primals, *sizes, *joint.inputs_of(InputKind.RNG)]
    forward = _forward_graph(joint, inputs, residual_nodes, copied, effects)
    backward = None
    if gradients:
        # A plan for fewer tangents has zeros of its own, and leaves out sums: those are made where they are read.
        order = None if plan.schedule is None else [by_name[name] for name in plan.schedule if name in by_name]
        backward = backward_graph(joint, residual_nodes, gradients, late_effects, order, handed)
        throughout = {node.name for node in direct}
        late_gradients(backward, {node for node in placeholders(backward) if node.name in throughout})
    return PartitionedGraph(forward, backward, residuals, joint.signature, joint.num_draws, joint.constants)


def _forward_graph(
    joint: JointGraph,
    inputs: list[fx.Node],
    residuals: list[fx.Node],
    copied: set[fx.Node],
    effects: list[fx.Node],
) -> fx.Graph:
    values = joint.results
    outputs = [values[i] for i in joint.signature.output_indices(*FORWARD_OUTPUTS)]
    needed = ancestors([*(node for node in (*outputs, *residuals) if node is not None), *effects])
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = _placeholder(graph, node)
    for node in joint.graph.nodes:
        if node in needed and node.op == "call_function":
            new[node] = copy_into(graph, node, new.__getitem__)
    results = [None if node is None else new[node] for node in outputs]
    for node in residuals:
        if node in copied:
            # The step or the caller writes to this input: what the backward reads is the value that the forward read.
            copy = graph.call_function(aten.clone.default, (new[node],))
            copy_meta(node, copy)
            results.append(copy)
        else:
            results.append(new[node])
    graph.output(results)
    return graph


def backward_graph(
    joint: JointGraph,
    residuals: list[fx.Node],
    gradients: list[fx.Node | None],
    effects: Sequence[fx.Node] = (),
    order: list[fx.Node] | None = None,
    handed: Set[fx.Node] = frozenset(),
) -> fx.Graph:
    """(sizes, residuals, tangents) -> gradients. handed: residuals that it computes again instead of reading them."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    tangents = joint.inputs_of(InputKind.TANGENT)
    for node in (*joint.inputs_of(InputKind.SIZE), *residuals, *tangents):
        new[node] = _placeholder(graph, node)
    new = {node: copy for node, copy in new.items() if node not in handed}
    late = descendants(tangents)
    if order is not None:
        return _scheduled(graph, new, order, gradients, late, effects)

    def emit(root: fx.Node) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in new:
                stack.pop()
                continue
            waiting = [source for source in node.all_input_nodes if source not in new]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            if node.op != "call_function":
                raise VerificationError(f"the backward needs {node.name}, which is neither saved nor recomputable")
            new[node] = copy_into(graph, node, new.__getitem__)
            stack.pop()

    needed = ancestors([*(node for node in gradients if node is not None), *effects], stop=set(residuals) - handed)
    for node in joint.graph.nodes:
        if node in needed and node in late and node.op == "call_function":
            emit(node)
    for result in gradients:
        if result is not None:
            emit(result)
    graph.output([None if node is None else new[node] for node in gradients])
    return graph


def _scheduled(
    graph: fx.Graph,
    new: dict[fx.Node, fx.Node],
    order: list[fx.Node],
    gradients: list[fx.Node | None],
    late: set[fx.Node],
    effects: Sequence[fx.Node] = (),
) -> fx.Graph:
    """The calls in this order. What is called twice has two copies; what is read later reads the newest. Views are made
    where they are read: held, they would keep their memory."""
    views: dict[fx.Node, list[fx.Node]] = {}
    saved = set(new)

    def read(node: fx.Node) -> fx.Node:
        if node not in new:
            if node.op != "call_function" or not (is_size(node) or view_source(node) is not None or node in late):
                raise VerificationError(f"the backward needs {node.name}, which is neither saved nor recomputable")
            new[node] = copy_into(graph, node, read)
            if not is_size(node) and view_source(node) is not None:
                views.setdefault(storage_root(node), []).append(node)
        return new[node]

    for node in order:
        copy = copy_into(graph, node, read)
        items = [user for user in node.users if user.op == "call_function"] if is_tuple(node) else []
        for root in {node, *items} - saved:
            for view in views.pop(root, []):
                del new[view]
        new[node] = copy
        for item in items:
            if item not in saved:
                new[item] = copy_into(graph, item, lambda _, copy=copy: copy)  # type: ignore[misc]
    for node in effects:
        read(node)
    graph.output([None if node is None else read(node) for node in gradients])
    remove_dead_code(graph)
    return graph


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """An input of the node's name; without being told twice, fx makes `self_attention` of `SelfAttention`."""
    new = graph.create_node("placeholder", node.name, name=node.name)
    copy_meta(node, new)
    return new
