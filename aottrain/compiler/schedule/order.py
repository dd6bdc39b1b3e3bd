"""schedule: a graph's kernels and library calls in the order in which they run."""

from __future__ import annotations

from torch import fx

from aottrain.compiler.graphs.rewriting import producer_of
from aottrain.compiler.schedule.attention import choose_attentions
from aottrain.compiler.schedule.grouping.alike import sharing
from aottrain.compiler.schedule.grouping.fusion import Fusion, fuse
from aottrain.compiler.schedule.grouping.groups import Group
from aottrain.compiler.schedule.in_place import written_in_place
from aottrain.compiler.schedule.kernels import lower, slow_draws
from aottrain.compiler.schedule.padding import rows_in_padding
from aottrain.compiler.schedule.products import choose_products, placed_convolutions
from aottrain.compiler.schedule.rows import choose_rows
from aottrain.compiler.schedule.scans import choose_scans
from aottrain.errors import VerificationError
from aottrain.ir.analysis.unchanged import unchanged
from aottrain.ir.flights import verify_flights
from aottrain.ir.graph import calls, info, results, storage_root, view_source
from aottrain.ir.ops import OpKind, ends_flight
from aottrain.ir.schedule import KernelCall, Schedule
from aottrain.ir.verify import verify_schedule


@sharing()
@unchanged()
def schedule(
    graph: fx.Graph, prefix: str = "", local: bool = False, given: frozenset[fx.Node] = frozenset()
) -> Schedule:
    """Program order, but that each kernel waits for the first reader of one of its results outside it.

    prefix: of the kernels' names. local: keep values no longer alive than op by op (see `fuse`). given: inputs that may
    be written over (see `written_in_place`).
    """
    fusion = fuse(graph, local)
    ordered, apart = _ordered(graph, fusion, prefix)
    if apart:
        fusion = fuse(graph, local, apart)
        ordered, _ = _ordered(graph, fusion, prefix)
    calls_in_order = tuple(rows_in_padding(graph, ordered))
    libraries = choose_products(graph, not local) | choose_scans(graph) | choose_rows(graph)
    libraries |= {} if local else choose_attentions(graph)
    in_place = written_in_place(graph, calls_in_order, given)
    planned = Schedule(calls_in_order, fusion.reasons, libraries, placed_convolutions(graph), in_place)
    verify_schedule(graph, planned)
    verify_flights(graph, planned.calls, planned.memory_of)
    return planned


def _ordered(graph: fx.Graph, fusion: Fusion, prefix: str) -> tuple[list[KernelCall | fx.Node], set[fx.Node]]:
    """The order, and calls that are faster on their own."""
    done: set[fx.Node | int] = set()
    begun: set[fx.Node | int] = set()  # their needs come first
    ordered: list[KernelCall | fx.Node] = []
    apart: set[fx.Node] = set()
    previous: dict[fx.Node, fx.Node] = {}
    effects = [node for node in calls(graph) if info(node).kind is OpKind.EFFECT]
    previous.update(zip(effects[1:], effects, strict=False))

    def needs(unit: fx.Node | Group) -> list[fx.Node]:
        if isinstance(unit, fx.Node):
            before = [previous[unit]] if unit in previous else []
            return before + [source for source in unit.all_input_nodes if source.op == "call_function"]
        members = {member.node for member in unit.members}
        return [end for member in unit.members for operand in member.rule.operands for end in _ends(operand.node)] + [
            source
            for member in unit.members
            for operand in member.rule.operands
            for source in [storage_root(operand.node)]
            if source.op == "call_function"
            and source not in members
            and fusion.group_of.get(producer_of(source)) is not unit
        ]

    def emit(start: fx.Node | Group) -> None:
        stack: list[fx.Node | Group] = [start]
        while stack:
            unit = stack[-1]
            key = unit if isinstance(unit, fx.Node) else unit.number
            if key in done:
                stack.pop()
                continue
            waiting = [fusion.group_of.get(producer_of(source), source) for source in needs(unit)]
            waiting = [w for w in waiting if (w if isinstance(w, fx.Node) else w.number) not in done]
            if waiting:
                if any((w if isinstance(w, fx.Node) else w.number) in begun for w in waiting):
                    raise VerificationError(f"{_name(unit)} and {_name(waiting[0])} wait for each other")
                begun.add(key)
                stack.extend(reversed(waiting))
                continue
            done.add(key)
            if isinstance(unit, fx.Node):
                ordered.append(unit)
            else:
                call = lower(unit, f"{prefix}kernel_{len(ordered)}")
                apart.update(slow_draws(unit, call))
                ordered.append(call)
            stack.pop()

    last = {group.number: group.members[-1].node for group in fusion.groups}
    for node in filter(fusion.inlined.needed.__contains__, calls(graph)):
        group = fusion.group_of.get(node)
        if group is not None:
            if last[group.number] is node:
                emit(group)
        elif ends_flight(node.target) or not (view_source(node) is not None or fusion.group_of.get(producer_of(node))):
            emit(node)
    for result in results(graph):
        # Views are made where something reads them outside of kernels.
        if result is not None and result.op == "call_function" and fusion.group_of.get(producer_of(result)) is None:
            emit(result)
    return ordered, apart


def _ends(node: fx.Node) -> list[fx.Node]:
    """What waits for memory that is under way, along the views through which this is read."""
    ends = []
    source: fx.Node | None = node
    while source is not None:
        ends += [source] if ends_flight(source.target) else []
        source = view_source(source)
    return ends


def _name(unit: fx.Node | Group) -> str:
    return unit.name if isinstance(unit, fx.Node) else f"the kernel of {unit.members[0].node.name}"
