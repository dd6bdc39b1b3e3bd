"""The forward as ordinary differentiable ops: what a backward that is itself differentiated falls back on.

The functional forward graph, before simplification, holds the user's own detaches; ops that the user called under
no_grad run under no_grad again, and draws come from the same (seed, offset). So autograd sees what it saw in eager.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from aottrain.compiler.capture.capture import CapturedStep
from aottrain.compiler.capture.substitutes import CUSTOM_FUNCTION
from aottrain.compiler.graphs.rewriting import copy_into
from aottrain.ir.analysis.reach import ancestors
from aottrain.ir.graph import InputKind, JointGraph, OutputKind, as_module, calls, copy_meta, grad_mode_of, results
from aottrain.ir.ops import uses_generator
from aottrain.runtime.program import Replay


def replay_of(step: CapturedStep, functional: JointGraph) -> Replay | None:
    """None where a replay would be wrong: a custom Function's own backward is not in the graph, state that the program
    updates has another value by then, and eager's generator would be moved again."""
    if CUSTOM_FUNCTION in step.notes or any(value.mutated for value in functional.signature.inputs):
        return None
    if any(uses_generator(node.target) for node in calls(functional.graph)):
        return None
    modules: list[fx.GraphModule] = []
    num_links = len(functional.signature.output_indices(OutputKind.LINKED))

    def replay(inputs: Sequence[Tensor], stand_ins: Mapping[int, Tensor]) -> Sequence[Tensor]:
        if not modules:
            modules.append(as_module(_forward(functional)))
        return list(_Replayer(modules[0], num_links, stand_ins).run(*inputs))

    return replay


def _forward(functional: JointGraph) -> fx.Graph:
    """Outputs, then the values of links."""
    values = functional.results
    outputs = [values[i] for i in functional.signature.output_indices(OutputKind.OUTPUT, OutputKind.LINKED)]
    needed = ancestors([node for node in outputs if node is not None])
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    tangents = set(functional.inputs_of(InputKind.TANGENT))
    for node in functional.graph.nodes:
        if node.op == "placeholder" and node not in tangents:
            new[node] = graph.placeholder(node.name)
            copy_meta(node, new[node])
        elif node.op == "call_function" and node in needed:
            new[node] = copy_into(graph, node, new.__getitem__)
    graph.output([new[node] for node in outputs if node is not None])
    return graph


class _Replayer(fx.Interpreter):
    """Goes on with the stand-ins, by number, where it comes to the value of a link."""

    def __init__(self, module: fx.GraphModule, num_links: int, stand_ins: Mapping[int, Tensor]):
        super().__init__(module)
        values = results(module.graph)
        self.outputs = values[: len(values) - num_links]
        self.stand_ins = {values[len(self.outputs) + number]: value for number, value in stand_ins.items()}
        self.computed: dict[fx.Node, Tensor] = {}

    def run_node(self, node: fx.Node) -> Any:
        if node.op == "output":
            return [self.computed.get(value, self.env[value]) for value in self.outputs if value is not None]
        with torch.set_grad_enabled(grad_mode_of(node)):
            value = super().run_node(node)
        if node not in self.stand_ins:
            return value
        self.computed[node] = value
        return self.stand_ins[node]
