"""The forward as ordinary differentiable ops: what a backward that is itself differentiated falls back on.

The functional forward graph, before simplification, holds the user's own detaches; ops that the user called under
no_grad run under no_grad again, and draws come from the same (seed, offset). So autograd sees what it saw in eager.
There is no replay where it would not.

Two things a functional graph does not hold: the history that a value keeps where it is written under no_grad or by a
detached name, and the formula of a custom Function. Where there are such, the graph is that of the trace, with its
writes, and the Function is called again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from aottrain.compiler.capture.capture import CapturedStep
from aottrain.compiler.capture.substitutes import CUSTOM_FUNCTION
from aottrain.compiler.graphs.rewriting import copy_into
from aottrain.compiler.joint.function_calls import FunctionCall, call_of, is_within
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
    placeholders,
    results,
    set_provenance,
    storage_roots,
)
from aottrain.ir.ops import argument_at, uses_generator
from aottrain.runtime.autograd.double_backward import Replay

aten = torch.ops.aten
_DETACH = aten.detach.default
_BATCH_NORM, _WITHOUT_STATISTICS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
)

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


def replay_of(step: CapturedStep, traced: JointGraph, functional: JointGraph) -> Replay | None:
    """traced: the program before mutation was removed. None where a replay would be wrong: eager's generator would be
    moved again; an input that the program has written is another by then, and what was is nowhere where a gradient
    comes to it; or a custom Function is called as none of its calls can be made again.
    """
    if any(uses_generator(node.target) for node in calls(functional.graph)):
        return None
    num_links = len(functional.signature.output_indices(OutputKind.LINKED))
    as_traced = bool({CUSTOM_FUNCTION, UNRECORDED_WRITE} & step.notes)
    if as_traced and num_links:  # what is written later is not yet in the value of a link where that is made
        return None
    graph = _forward(traced if as_traced else functional, as_traced)
    if graph is None:
        return None
    read = frozenset(i for i, node in enumerate(placeholders(graph)) if node.users)
    written = frozenset(i for i, value in enumerate(functional.signature.inputs) if value.mutated)
    if any(functional.signature.inputs[i].requires_grad for i in written):
        return None
    modules: list[fx.GraphModule] = []

    def run(inputs: Sequence[Tensor | None], stand_ins: Mapping[int, Tensor]) -> Sequence[Tensor]:
        if not modules:
            modules.append(as_module(graph))
        return list(_Replayer(modules[0], num_links, stand_ins).run(*inputs))

    return Replay(run, read, written)


def _forward(program: JointGraph, as_traced: bool) -> fx.Graph | None:
    """Outputs, then the values of links. as_traced: with custom Functions as calls, and with writes; None where a call
    cannot be made again."""
    values = program.results
    outputs = [values[i] for i in program.signature.output_indices(OutputKind.OUTPUT, OutputKind.LINKED)]
    returned = [node for node in outputs if node is not None]
    needed = _needed(program.graph, returned)
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    tangents = set(program.inputs_of(InputKind.TANGENT))
    for node in program.graph.nodes:
        if node.op == "placeholder" and node not in tangents:
            new[node] = graph.placeholder(node.name)
            copy_meta(node, new[node])
        elif node in new or node not in needed or node.op != "call_function":
            continue
        elif as_traced and is_within(node):
            call = call_of(node)
            if call is None or not all(operand in new for operand in call.operands):
                return None
            new.update(_called(graph, call, [new[operand] for operand in call.operands]))
        elif not all(source in new for source in _read_by(node)):
            return None  # a custom Function's formula reads what is in that Function's own hands
        else:
            saved = _saved_result(node)
            new[node] = _copied(graph, node, new, needed) if saved is None else new[saved]
    graph.output([new[node] for node in returned])
    return graph


def _needed(graph: fx.Graph, returned: Sequence[fx.Node]) -> set[fx.Node]:
    """What these nodes need: what they read, and what is written to its memory."""
    roots = storage_roots(node for node in graph.nodes if node.op != "output")
    written: dict[fx.Node, list[fx.Node]] = {}
    for node in calls(graph):
        for i in info(node).writes:
            value = argument_at(node, i)
            for each in value if isinstance(value, (list, tuple)) else [value]:
                written.setdefault(roots[each], []).append(node)
    needed, stack = set[fx.Node](), list(returned)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [*_read_by(node), *written.get(roots[node], ())]
    return needed


def _read_by(node: fx.Node) -> Sequence[fx.Node]:
    """What a node reads. A batch norm in training reads the old statistics for the new ones alone; a custom Function
    that is called again reads what it is given."""
    if is_within(node):
        call = call_of(node)
        return () if call is None else call.operands
    if node.target is _BATCH_NORM:
        return [value for value in node.args[:3] if isinstance(value, fx.Node)]
    if node.target is operator.getitem and _is_new_statistic(node):
        return [*node.all_input_nodes, *node.args[0].all_input_nodes]  # type: ignore[union-attr]
    return node.all_input_nodes


def _is_new_statistic(item: fx.Node) -> bool:
    source, i = item.args[:2]
    return isinstance(source, fx.Node) and source.target is _BATCH_NORM and isinstance(i, int) and i > 2


def _copied(graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node, fx.Node], needed: set[fx.Node]) -> fx.Node:
    """Where new statistics are not needed a batch norm is given no old ones: its formula can then be differentiated."""
    if node.target is not _BATCH_NORM or any(_is_new_statistic(user) and user in needed for user in node.users):
        return copy_into(graph, node, new.__getitem__)
    x, weight, bias, *_, momentum, epsilon = node.args
    operands = fx.node.map_arg((x, weight, bias), new.__getitem__)
    norm = graph.call_function(_WITHOUT_STATISTICS, (*operands, True, momentum, epsilon))
    copy_meta(node, norm)
    return norm


def _called(graph: fx.Graph, call: FunctionCall, operands: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Of each result of the Function its node, and that of the call that is made again."""
    again = graph.call_function(call.again, tuple(operands))
    set_provenance(again, (), "", call.records)
    for i, result in enumerate(call.results):
        if result is not None:
            yield result, graph.call_function(operator.getitem, (again, i))


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
