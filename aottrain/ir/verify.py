"""The laws, as checks that run after the stage that could break them. Each raises VerificationError."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from aottrain.errors import VerificationError
from aottrain.ir.analysis.reach import ancestors, descendants
from aottrain.ir.graph import (
    FORWARD_OUTPUTS,
    InputKind,
    JointGraph,
    OutputKind,
    PartitionedGraph,
    calls,
    effects_of,
    info,
    is_size,
    placeholders,
    results,
    spec_of,
    value_of,
)
from aottrain.ir.ops import OpKind, hidden_mutation, is_pure, packet_name, uses_generator
from aottrain.ir.schedule import KernelCall, Schedule
from aottrain.ir.tensor import start_of

# Views of all elements of a value, in another shape or order.
_WHOLE_VIEWS = frozenset(("alias", "detach", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "view"))


def verify_joint(joint: JointGraph) -> None:
    """Law 1: signature and graph agree; what must run in the forward and what must run in the backward are disjoint."""
    _require(len(joint.placeholders) == len(joint.signature.inputs), "the graph has other inputs than its signature")
    _require(len(joint.results) == len(joint.signature.outputs), "the graph has other outputs than its signature")
    from_tangents = descendants(joint.inputs_of(InputKind.TANGENT))
    for_outputs = ancestors(joint.outputs_of(*FORWARD_OUTPUTS))
    both = [node.name for node in joint.graph.nodes if node in from_tangents and node in for_outputs]
    _require(not both, f"{both[:1]} depends on a tangent, and an output or state update depends on it")
    draws = [node.name for node in from_tangents if node.op == "call_function" and uses_generator(node.target)]
    _require(not draws, f"{draws[:1]} draws from eager's generator in the backward")


def verify_functional(joint: JointGraph) -> None:
    """Law 2: nothing mutates, openly or hidden; each mutated input has its update; draws are numbered once."""
    draws: set[int] = set()
    plain: set[int] = set()  # operators, by identity, of which one call is as good as the other
    for node in calls(joint.graph):
        if id(node.target) in plain or is_size(node):
            continue
        _require(not info(node).writes, f"{node.name} mutates its argument")
        training = hidden_mutation(node.target) and _trains(node)
        _require(not training, f"{node.name} mutates its argument though its schema denies it")
        if info(node).kind is OpKind.RANDOM:
            number = node.args[1]
            _require(isinstance(number, int) and 0 <= number < joint.num_draws, f"{node.name} has no draw number")
            _require(number not in draws, f"{node.name} repeats draw {number}")
            draws.add(number)  # type: ignore[arg-type]
        elif info(node).kind is not OpKind.EFFECT or (joint.rng == "philox" and uses_generator(node.target)):
            _require(is_pure(node.target), f"{node.name} gives another value when it is run again")
            if info(node).kind is not OpKind.EFFECT and not hidden_mutation(node.target):
                plain.add(id(node.target))
    writes = (OutputKind.UPDATE, OutputKind.REPLACEMENT)
    updates = {value.target for value in joint.signature.outputs if value.kind in writes}
    mutated = {i for i, value in enumerate(joint.signature.inputs) if value.mutated}
    _require(updates == mutated, "the state updates are not those of the mutated inputs")


def _trains(node: fx.Node) -> bool:
    """Whether a batch-norm call updates its running statistics: they are given, and it is in training mode."""
    statistics = [node.args[i] for i in hidden_mutation(node.target) if i < len(node.args)]
    return any(isinstance(value, fx.Node) for value in statistics) and (len(node.args) <= 5 or node.args[5] is True)


def verify_partition(joint: JointGraph, parts: PartitionedGraph) -> None:
    """Law 3, and law 4 by structure: each half computes the joint graph's own expressions, from what it may read."""
    num_inputs = joint.signature.num_primals + joint.signature.num_sizes + 1
    _require(len(placeholders(parts.forward)) == num_inputs, "the forward has other inputs")
    expressions = _Expressions()
    for node in joint.placeholders:
        expressions.name(node, node.name)
    expected_outputs = [joint.results[i] for i in joint.signature.output_indices(*FORWARD_OUTPUTS)]
    for node in placeholders(parts.forward):
        expressions.name(node, node.name)
    values = results(parts.forward)
    count = len(expected_outputs)
    _require(len(values) == count + len(parts.residuals), "the forward does not return outputs, updates and residuals")
    _require(expressions.of(values[:count]) == expressions.of(expected_outputs), "the forward computes something else")
    effects, late_effects = joint.effects()
    _require(
        expressions.of(effects_of(parts.forward)) == expressions.of(effects),
        "the forward has other effects, or in another order",
    )
    if parts.backward is None:
        _require(not late_effects, "the effects of the backward are lost")
        return
    _verify_residuals(joint, parts, values[count:], expressions)
    expected_gradients = [joint.results[i] for i in joint.signature.output_indices(OutputKind.GRADIENT)]
    _require(
        expressions.of(results(parts.backward)) == expressions.of(expected_gradients),
        "the backward computes something else",
    )
    _require(
        expressions.of(effects_of(parts.backward)) == expressions.of(late_effects),
        "the backward has other effects, or in another order",
    )
    for node in calls(parts.backward):
        pure = is_pure(node.target) or info(node).kind is OpKind.EFFECT
        _require(pure, f"{node.name} is run in the backward and has an effect")


def _verify_residuals(
    joint: JointGraph, parts: PartitionedGraph, values: list[fx.Node | None], expressions: _Expressions
) -> None:
    assert parts.backward is not None
    inputs = placeholders(parts.backward)
    for placeholder, size in zip(inputs, joint.inputs_of(InputKind.SIZE), strict=False):
        expressions.name(placeholder, size.name)
    inputs = inputs[joint.signature.num_sizes :]
    by_name = {node.name: node for node in joint.graph.nodes}
    copied = {node for node, value in zip(joint.placeholders, joint.signature.inputs, strict=True) if value.copied}
    for (name, primal), value, placeholder in zip(parts.residuals, values, inputs, strict=False):
        original = by_name[name]
        expressions.name(placeholder, expressions.key(original))
        if original in copied:
            _require(primal is None, f"{name} may be written before the backward, which reads it unsaved")
            _require(value is not None and value.op == "call_function", f"the version of {name} that was read is lost")
            continue
        _require(expressions.of([value]) == expressions.of([original]), f"residual {name} is something else")
    tangents = joint.inputs_of(InputKind.TANGENT)
    rest = inputs[len(parts.residuals) :]
    _require(len(rest) == len(tangents), "the backward reads something that is neither residual nor tangent")
    for placeholder, tangent in zip(rest, tangents, strict=True):
        expressions.name(placeholder, tangent.name)


def verify_schedule(graph: fx.Graph, schedule: Schedule) -> None:
    """Law 5, order: each kernel writes something, and what a call reads is made before it, by one call alone; so is
    each result. And a view of a whole value begins where that does: what reads a view finds it by where it was traced
    to lie."""
    for node in calls(graph):
        moved = packet_name(node.target) in _WHOLE_VIEWS and _begins_elsewhere(node, node.args[0])
        _require(not moved, f"{node.name} does not begin where {node.all_input_nodes[:1]} does")
    made = set(placeholders(graph))
    for call in schedule.calls:
        reads: Sequence[fx.Node]
        writes: Sequence[fx.Node]
        if isinstance(call, KernelCall):
            name, reads, writes = call.kernel.name, call.reads, call.writes
        else:
            name, reads, writes = call.name, call.all_input_nodes, (call,)
        _require(writes, f"{name} writes nothing")
        for node in reads:
            _require(node in made, f"{name} reads {node.name}, which nothing has made yet")
        for node in writes:
            _require(node not in made, f"{name} makes {node.name}, which is there")
        made.update(writes)
    for result in filter(None, results(graph)):
        _require(result in made, f"nothing makes the result {result.name}")


def _begins_elsewhere(view: fx.Node, source: Any) -> bool:
    values = [value_of(view), value_of(source)]
    if not all(isinstance(value, torch.Tensor) and value.layout is torch.strided for value in values):
        return False
    one, other = map(start_of, values)
    return None not in (one, other) and one != other


class _Expressions:
    """Numbers expressions over several graphs: equal numbers mean the same ops on the same inputs."""

    def __init__(self) -> None:
        self._numbers: dict[Any, Any] = {}
        self._of_node: dict[fx.Node, Any] = {}

    def name(self, node: fx.Node, key: Any) -> None:
        self._of_node[node] = key

    def of(self, nodes: Sequence[fx.Node | None]) -> list[Any]:
        return [None if node is None else self.key(node) for node in nodes]

    def key(self, root: fx.Node) -> Any:
        stack = [root]
        while stack:
            node = stack[-1]
            waiting = [source for source in node.all_input_nodes if source not in self._of_node]
            if node in self._of_node or waiting:
                stack.pop() if node in self._of_node else stack.extend(waiting)
                continue
            expression: Any
            if (cast := _cast(node)) is not None:
                expression = "cast", self._of_node[cast[0]], cast[1]
            else:
                kwargs = tuple((name, self._part(value)) for name, value in node.kwargs.items())
                expression = (node.op, node.target, self._part(node.args), kwargs)
            self._of_node[node] = self._numbers.setdefault(expression, len(self._numbers))
            stack.pop()
        return self._of_node[root]

    def _part(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "node", self._of_node[value]
        if isinstance(value, (tuple, list)):
            return isinstance(value, list), *map(self._part, value)
        return type(value), repr(value)


def _cast(node: fx.Node) -> tuple[fx.Node, torch.dtype] | None:
    """What is cast and to which type, by a call that changes nothing else: one cast, or one of several in one call."""
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is operator.getitem and str(source.target) == "aottrain.cast_many.default":
        values, dtype = source.args
        return values[node.args[1]], dtype  # type: ignore[index, return-value]
    spec = spec_of(source) if node.target is torch.ops.aten._to_copy.default else None
    if spec is None:
        return None
    as_it_is = {"layout": (None, torch.strided), "device": (None, spec.device)}
    others = {name: value for name, value in node.kwargs.items() if name != "dtype"}
    if "dtype" not in node.kwargs or not all(value in as_it_is.get(name, ()) for name, value in others.items()):
        return None
    return source, node.kwargs["dtype"]  # type: ignore[return-value]


def _require(holds: Any, what: str) -> None:
    if not holds:
        raise VerificationError(what)
