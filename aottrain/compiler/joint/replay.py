"""The forward as ordinary differentiable ops: what a backward that is itself differentiated falls back on.

The functional forward graph, before simplification, holds the user's own detaches; ops that the user called under
no_grad run under no_grad again, and draws come from the same (seed, offset). So autograd sees what it saw in eager.
There is no replay where it would not.
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
from aottrain.ir.graph import (
    InputKind,
    JointGraph,
    OutputKind,
    as_module,
    calls,
    copy_meta,
    grad_mode_of,
    info,
    made_in_backward,
    results,
)
from aottrain.ir.ops import argument_at, uses_generator
from aottrain.runtime.program import Replay

_DETACH = torch.ops.aten.detach.default

UNRECORDED_WRITE = "a write that autograd does not record"


def writes_unrecorded(graph: fx.Graph) -> bool:
    """Whether something is written, under no_grad or by a detached name, to what may have a history: for autograd the
    history stays what it was. In a functional graph the value after the write has none."""
    written = ((node, argument_at(node, i)) for node in calls(graph) for i in info(node).writes)
    return any(_keeps_history(node, value) for node, value in written)


def _keeps_history(write: fx.Node, written: Any) -> bool:
    if isinstance(written, (list, tuple)):
        return any(_keeps_history(write, item) for item in written)
    recorded, owner = grad_mode_of(write), written
    while isinstance(owner, fx.Node) and owner.op == "call_function":
        recorded &= owner.target is not _DETACH
        following = (*info(owner).writes[:1], info(owner).view_of)[0]
        if following is None:
            return not recorded and grad_mode_of(owner) and bool(owner.all_input_nodes)
        owner = argument_at(owner, following)
    return False


def replay_of(step: CapturedStep, functional: JointGraph) -> Replay | None:
    """None where a replay would be wrong: a custom Function's own backward is not in the graph, state that the program
    updates has another value by then, and eager's generator would be moved again."""
    if {CUSTOM_FUNCTION, UNRECORDED_WRITE} & step.notes or any(value.mutated for value in functional.signature.inputs):
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
            saved = _saved_result(node)
            new[node] = copy_into(graph, node, new.__getitem__) if saved is None else new[saved]
    graph.output([new[node] for node in outputs if node is not None])
    return graph


def _saved_result(node: fx.Node) -> fx.Node | None:
    """Of which op's result this is what a gradient formula reads, which the program has called itself: autograd saves a
    result detached, and gives it its history back without an op, so that the formula can be differentiated."""
    saved = node.args[0] if node.target is _DETACH and made_in_backward(node) and grad_mode_of(node) else None
    if not (isinstance(saved, fx.Node) and saved.target is _DETACH) or made_in_backward(saved):
        return None
    (result,) = saved.all_input_nodes
    only_saved = all(user.target is _DETACH and made_in_backward(user) for user in saved.users)
    return result if only_saved else None


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
