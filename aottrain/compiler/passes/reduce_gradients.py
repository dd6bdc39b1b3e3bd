"""reduce_gradients: gradients of parameters are summed over the processes of a group where the backward has made them.

Each gradient is one operator while the program is planned. Processes make them in the order of the graph, which is the
same for all of them where the program is.
"""

from __future__ import annotations

import torch
from torch import fx

import aottrain.ops.collectives  # noqa: F401  # makes the operators known
from aottrain.compiler.graphs.rewriting import add_call
from aottrain.compiler.graphs.simplification import copy_graph
from aottrain.ir.graph import InputKind, JointGraph, OutputKind, spec_of


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
            after = value if value.op == "call_function" else twin.placeholders[-1]
            with graph.inserting_after(after):
                sums[value] = add_call(value, torch.ops.aottrain_parallel.all_sum.default, (value, group))
        values[place] = sums[value]
    output.args = (values,)
    graph.lint()
    return twin
