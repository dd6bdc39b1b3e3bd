"""place_collectives: where a program talks to other processes.

Gradients of parameters are summed over the processes of a group where the backward has made them; a weight that is
gathered from its parts is so where it is read first, and its gradient is summed and cut where it is made. Each is one
operator while the program is planned. Processes make them in the order of the graph, which is the same for all of them
where the program is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import fx

import aottrain.ops.collectives  # noqa: F401  # makes the operators known
from aottrain.compiler.graphs.rewriting import add_call
from aottrain.compiler.graphs.simplification import copy_graph
from aottrain.ir.graph import InputKind, JointGraph, OutputKind, calls, spec_of


def placed(joint: JointGraph, group: str | None, run: Callable[..., JointGraph]) -> JointGraph:
    """The program with its collectives in their places, by `run(name, stage, joint)`; itself where there are none to
    place."""
    return run("place_collectives", partial(with_collectives, group), joint) if talks(joint, group) else joint


def talks(joint: JointGraph, group: str | None) -> bool:
    """Whether there is anything to place."""
    return group is not None or any(is_gather(node) for node in calls(joint.graph))


def is_gather(node: fx.Node) -> bool:
    return node.target is torch.ops.aottrain_parallel.gather_rows.default


def with_collectives(group: str | None, joint: JointGraph) -> JointGraph:
    """The same program with its collectives in their places. group: over which gradients are summed, if they are."""
    joint = lift_sums(sink_gathers(joint))
    return joint if group is None else reduce_gradients(group, joint)


def reduce_gradients(group: str, joint: JointGraph) -> JointGraph:
    """The same program, whose gradients of parameters are sums over the processes of `group`. One that several
    parameters have is summed once."""
    graph = copy_graph(joint.graph)
    twin = joint.with_graph(graph)
    output = graph.output_node()
    values = list(twin.results)
    sums: dict[fx.Node, fx.Node] = {}
    for place, spec in enumerate(twin.signature.outputs):
        value = values[place]
        if spec.kind is not OutputKind.GRADIENT or value is None or spec.target is None:
            continue
        if twin.signature.inputs[spec.target].kind is not InputKind.PARAMETER or spec_of(value) is None:
            continue
        if value not in sums:
            with graph.inserting_after(_earliest_place(twin, value)):
                sums[value] = add_call(value, torch.ops.aottrain_parallel.all_sum.default, (value, group))
        values[place] = sums[value]
    output.args = (values,)
    graph.lint()
    return twin


def sink_gathers(joint: JointGraph) -> JointGraph:
    """The same program."""
    graph = copy_graph(joint.graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in reversed(calls(graph)):
        readers = [user for user in node.users if user.op == "call_function"]
        if is_gather(node) and readers:
            min(readers, key=places.__getitem__).prepend(node)
    graph.lint()
    return joint.with_graph(graph)


def lift_sums(joint: JointGraph) -> JointGraph:
    """The same program. A model's weights are all gathered before it runs, and autograd takes what was made first last:
    without this no gradient would be summed and cut before all of them are there."""
    graph = copy_graph(joint.graph)
    twin = joint.with_graph(graph)
    for node in reversed(calls(graph)):
        if _is_cut_sum(node):
            _earliest_place(twin, node.all_input_nodes[0]).append(node)
    graph.lint()
    return twin


def _is_cut_sum(node: fx.Node) -> bool:
    return node.target is torch.ops.aottrain_parallel.scatter_sum.default


def _earliest_place(joint: JointGraph, value: fx.Node) -> fx.Node:
    """After this node a call that reads the value alone can stand."""
    return value if value.op == "call_function" else joint.placeholders[-1]
