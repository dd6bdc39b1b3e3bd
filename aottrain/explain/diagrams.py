"""What a picture of a program shows: what runs, within which modules, and what flows between.

Views, items of tuples and sizes are no steps: what flows through them flows from what made the memory. Parameters and
buffers are no steps either, for nearly every step reads some.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from aottrain.explain.records import (
    BACKWARD,
    FORWARD,
    GIVEN,
    INPUT,
    IS_RECOMPUTED,
    IS_SAVED,
    KERNEL,
    LIBRARY,
    SAVED,
    Diagram,
    Flow,
    Step,
)
from aottrain.ir.analysis.reach import descendants
from aottrain.ir.graph import (
    InputKind,
    JointGraph,
    PartitionedGraph,
    calls,
    info,
    module_stack_of,
    placeholders,
    results,
    source_of,
    spec_of,
)
from aottrain.ir.ops import OpKind
from aottrain.ir.schedule import KernelCall, Schedule

_FREE = (OpKind.VIEW, OpKind.STRUCTURE, OpKind.SIZE)
_NUM_NAMED = 3


class _Drawn:
    """Steps and flows as they are found."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.flows: dict[tuple[int, int], Flow] = {}
        self.by_node: dict[fx.Node, int] = {}

    def add(self, step: Step, *made: fx.Node) -> int:
        self.steps.append(step)
        self.by_node.update(dict.fromkeys(made, len(self.steps) - 1))
        return len(self.steps) - 1

    def read(self, number: int, values: Iterable[fx.Node], fate_of: Callable[[fx.Node, int], str]) -> None:
        """That step `number` reads the values."""
        for value in values:
            passed = self._passed(value)
            start = self.by_node.get(passed[-1])
            if start is None or start == number:
                continue
            fates = [fate for node in passed if (fate := fate_of(node, start))]
            flow = Flow(start, number, _bytes(value), fates[0] if fates else "")
            known = self.flows.get((start, number), flow)
            self.flows[start, number] = replace(flow, num_bytes=max(flow.num_bytes, known.num_bytes))

    def _passed(self, value: fx.Node) -> list[fx.Node]:
        """The value and what it is a view or an item of, to the node that a step made."""
        passed = [value]
        while passed[-1] not in self.by_node and passed[-1].op == "call_function" and info(passed[-1]).kind in _FREE:
            sources = passed[-1].all_input_nodes
            if not sources:
                break
            passed.append(sources[0])
        return passed

    def diagram(self, title: str) -> Diagram:
        """What is saved stands beside what makes it, or reads it first."""
        beside: dict[int, int] = {}
        for start, end in self.flows:
            if self.steps[end].kind == SAVED:
                beside[end] = start
            elif self.steps[start].kind == SAVED:
                beside[start] = min(end, beside.get(start, end))
        for number, other in beside.items():
            self.steps[number] = replace(self.steps[number], modules=self.steps[other].modules)
        return Diagram(title, tuple(self.steps), tuple(self.flows.values()))


def joint_diagram(
    joint: JointGraph, saved: Collection[str] = (), recomputed: Collection[str] = (), title: str = "Joint graph"
) -> Diagram:
    """Forward and backward op by op, before they are cut in two. saved, recomputed: names of values, as in a plan."""
    drawn, late = _Drawn(), descendants(joint.inputs_of(InputKind.TANGENT))
    fates = dict.fromkeys(saved, IS_SAVED) | dict.fromkeys(recomputed, IS_RECOMPUTED)
    for kind, name in ((InputKind.BATCH, "batch"), (InputKind.TANGENT, "gradient of a result")):
        for node in joint.inputs_of(kind):
            drawn.add(_value(node, INPUT, name, BACKWARD if kind is InputKind.TANGENT else FORWARD), node)

    def crosses(number: int) -> Callable[[fx.Node, int], str]:
        half = drawn.steps[number].half
        return lambda node, start: fates.get(node.name, "") if half != drawn.steps[start].half else ""

    for node in calls(joint.graph):
        if info(node).kind in _FREE:
            continue
        half = BACKWARD if node in late else FORWARD
        fate = "" if half == BACKWARD else _fate(node, fates)
        number = drawn.add(_op(node, half, fate), node)
        drawn.read(number, node.all_input_nodes, crosses(number))
    return drawn.diagram(title)


def half_diagrams(parts: PartitionedGraph, schedules: Sequence[Schedule] = ()) -> list[Diagram]:
    """The forward and, where there is one, the backward as they run: generated kernels and library calls. schedules: of
    both, none where they run op by op."""
    forward, given = _Drawn(), results(parts.forward)
    inputs = dict(enumerate(placeholders(parts.forward)))
    for i in parts.signature.input_indices(InputKind.BATCH):
        if i in inputs:
            forward.add(_value(inputs[i], INPUT, "batch", FORWARD), inputs[i])
    _run(forward, parts.forward, FORWARD, schedules[0] if schedules else None, set())
    for value, (name, position) in zip(given[parts.num_forward_outputs :], parts.residuals, strict=False):
        if value is not None and position is None:
            number = forward.add(_value(value, SAVED, f"save {name}", FORWARD))
            forward.read(number, [value], lambda node, start: IS_SAVED)
    for value in dict.fromkeys(given[: parts.num_forward_outputs]):
        if value is not None and value.op == "call_function":
            forward.read(forward.add(_value(value, GIVEN, "result", FORWARD)), [value], lambda node, start: "")
    drawn = [forward.diagram("Forward graph")]
    if parts.backward is not None:
        drawn.append(_backward(parts, schedules).diagram("Backward graph"))
    return drawn


def _backward(parts: PartitionedGraph, schedules: Sequence[Schedule]) -> _Drawn:
    assert parts.backward is not None
    drawn, kept = _Drawn(), {name for name, position in parts.residuals if position is None}
    for node in placeholders(parts.backward):
        if node.name in kept:
            drawn.add(_value(node, SAVED, f"saved {node.name}", BACKWARD), node)
    for node in parts.tangents:
        drawn.add(_value(node, INPUT, "gradient of a result", BACKWARD), node)
    again = set(calls(parts.backward)) - descendants(parts.tangents)
    _run(drawn, parts.backward, BACKWARD, schedules[1] if len(schedules) > 1 else None, again)
    return drawn


def without_inputs(diagram: Diagram, types: Mapping[str, str]) -> Diagram:
    """The same without these inputs, {name: type}: parameters and buffers that came in as a batch does."""
    kept = [i for i, each in enumerate(diagram.steps) if each.kind != INPUT or types.get(each.name) != each.type]
    places = {i: place for place, i in enumerate(kept)}
    flows = [
        replace(flow, start=places[flow.start], end=places[flow.end])
        for flow in diagram.flows
        if flow.start in places and flow.end in places
    ]
    return Diagram(diagram.title, tuple(diagram.steps[i] for i in kept), tuple(flows))


def _run(drawn: _Drawn, graph: fx.Graph, half: str, schedule: Schedule | None, again: set[fx.Node]) -> None:
    """What runs, in order. again: the calls that the forward has made before."""

    def fate_of(node: fx.Node, start: int) -> str:
        return IS_SAVED if drawn.steps[start].kind == SAVED else ""

    for call in schedule.calls if schedule is not None else calls(graph):
        if isinstance(call, KernelCall):
            number = drawn.add(_kernel(call, half, again), *call.writes)
            drawn.read(number, call.reads, fate_of)
        elif info(call).kind not in _FREE:
            library = schedule.library(call) if schedule is not None else ""
            number = drawn.add(_op(call, half, IS_RECOMPUTED if call in again else "", library), call)
            drawn.read(number, call.all_input_nodes, fate_of)


def _op(node: fx.Node, half: str, fate: str, library: str = "") -> Step:
    label = short_name(info(node).name) + (f" ({library})" if library else "")
    return Step(
        node.name, LIBRARY, label, module_stack_of(node), half, source_of(node), _type(node), _bytes(node), fate
    )


def _kernel(call: KernelCall, half: str, again: set[fx.Node]) -> Step:
    """In the innermost modules that all its results are within."""
    stacks = [module_stack_of(node) for node in call.writes]
    common = [entries[0] for entries in zip(*stacks, strict=False) if len(set(entries)) == 1]
    fate = IS_RECOMPUTED if again and all(node in again for node in call.writes) else ""
    types = ", ".join(dict.fromkeys(map(_type, call.writes)))
    lines = ", ".join(dict.fromkeys(line for _, line in map(op_and_line, call.kernel.sources) if line))
    name, num_bytes = call.kernel.name, sum(map(_bytes, call.writes))
    return Step(name, KERNEL, ops_text(call.kernel.sources), tuple(common), half, lines, types, num_bytes, fate)


def ops_text(sources: Sequence[str], most: int = _NUM_NAMED) -> str:
    """`add, native_layer_norm and 4 more`, of the lines that a kernel notes of its ops."""
    names = list(dict.fromkeys(op for op, _ in map(op_and_line, sources)))
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def op_and_line(source: str) -> tuple[str, str]:
    """`add`, `model.py:12` of `add_3 = aten.add.Tensor  model.py:12`."""
    op, _, line = source.partition(" = ")[2].partition("  ")
    return short_name(op), line


def short_name(op: str) -> str:
    """`add` of `aten.add.Tensor`."""
    parts = op.split(".")
    return parts[1] if len(parts) == 3 else op


def _value(node: fx.Node, kind: str, label: str, half: str) -> Step:
    fate = IS_SAVED if kind == SAVED else ""
    return Step(node.name, kind, label, (), half, source_of(node), _type(node), _bytes(node), fate)


def _fate(node: fx.Node, fates: Mapping[str, str]) -> str:
    """Of what an op makes: saved where any of it is, its views and items too."""
    found, stack = set[str](), [node]
    while stack:
        each = stack.pop()
        found.add(fates.get(each.name, ""))
        stack += [user for user in each.users if user.op == "call_function" and info(user).kind in _FREE]
    return next((fate for fate in (IS_SAVED, IS_RECOMPUTED) if fate in found), "")


def _type(node: fx.Node) -> str:
    spec = spec_of(node)
    return "" if spec is None else str(spec)


def _bytes(node: fx.Node) -> int:
    spec = spec_of(node)
    return 0 if spec is None else spec.nbytes
