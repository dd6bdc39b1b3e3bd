"""What one saved value is worth: the same plan without it, simulated."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from aottrain.compiler.partition.budget.simulation import Emitter, OpSchedule, seconds_beyond, simulate
from aottrain.compiler.partition.costs.storages import StorageGraph
from aottrain.ir.graph import PartitionedGraph, allocations, calls, view_source
from aottrain.ir.plan import PartitionPlan

# Each is a simulation of both programs.
_NUM_SIMULATED = 32


@dataclass(frozen=True)
class Marginal:
    """The effect of not saving a value but computing it just before its first use in the backward."""

    seconds: float
    """What it adds to the step."""
    peak_change: int | None
    """Bytes by which the step's peak changes; None: not simulated."""


def marginals(
    graph: StorageGraph, plan: PartitionPlan, parts: PartitionedGraph, num_simulated: int = _NUM_SIMULATED
) -> dict[str, Marginal]:
    """For each saved value that may be computed again; the peak for the largest `num_simulated` of them.

    graph: the plan's joint graph, contracted with the workspaces that the peak is to count.
    """
    backward = scheduled_ops(graph, plan, parts)
    if backward is None:
        return {}
    by_name = {root.name: storage for storage, root in enumerate(graph.roots)}
    saved = frozenset(by_name[name] for name in plan.saved)
    emitter = Emitter(graph)
    base = OpSchedule(saved, emitter.forward(saved), backward)
    base_peak, base_seconds = simulate(graph, base).peak_bytes, seconds_beyond(graph, base, 0.0)
    accesses = _FirstAccesses(graph, base)
    by_value: dict[str, Marginal] = {}
    simulated = 0
    for storage in sorted(saved - graph.must - graph.outputs, key=lambda s: (-graph.sizes[s], s)):
        again = accesses.recompute(storage)
        if again is None:
            continue
        position, ops = again
        still_saved = saved - {storage}
        # A plan with a schedule says when a value is computed again; without one it is once, and kept.
        rest = backward[position:] if plan.schedule is not None else [i for i in backward[position:] if i not in ops]
        without = OpSchedule(still_saved, emitter.forward(still_saved), (*backward[:position], *ops, *rest))
        change = None
        if simulated < num_simulated:
            simulated += 1
            change = simulate(graph, without).peak_bytes - base_peak
        by_value[graph.roots[storage].name] = Marginal(seconds_beyond(graph, without, base_seconds), change)
    return by_value


def scheduled_ops(graph: StorageGraph, plan: PartitionPlan, parts: PartitionedGraph) -> tuple[int, ...] | None:
    """The backward's ops by number, in the order in which it runs them; None where their names do not tell."""
    number = {op.node.name: i for i, op in enumerate(graph.ops)}
    if plan.schedule is not None:
        return tuple(number[name] for name in plan.schedule)
    if parts.backward is None:
        return None
    names = [node.name for node in calls(parts.backward) if view_source(node) is None and allocations(node)]
    return tuple(number[name] for name in names) if all(name in number for name in names) else None


class _FirstAccesses:
    """Where in a schedule's backward each storage is first read, and first written."""

    def __init__(self, graph: StorageGraph, schedule: OpSchedule):
        self.graph, self.schedule = graph, schedule
        self.read: dict[int, int] = {}
        self.written: dict[int, int] = {}
        for position, i in enumerate(schedule.backward):
            _first(self.read, graph.ops[i].reads, position)
            _first(self.written, graph.ops[i].writes, position)
        _first(self.read, graph.gradients, len(schedule.backward))

    def recompute(self, storage: int) -> tuple[int, list[int]] | None:
        """The position of the first use of a saved storage, and the ops that make it there from what is at hand; None
        where it is never read, or may not be made again."""
        position = self.read.get(storage)
        if position is None:
            return None
        if self.written.get(storage, position) < position:  # beside another result of its op
            return position, []
        order: dict[int, None] = {}  # as the backward makes what is missing: depth first
        stack = [storage]
        while stack:
            producer = self.graph.producers[stack[-1]]
            if producer < 0 or stack[-1] in self.graph.must:
                return None
            reads = self.graph.ops[producer].reads if producer not in order else ()
            waiting = [s for s in reads if not self._is_there(s, storage, position, order)]
            if waiting:
                stack.extend(reversed(waiting))
            else:
                order.setdefault(producer)
                stack.pop()
        return position, list(order)

    def _is_there(self, storage: int, without: int, position: int, order: Container[int]) -> bool:
        if storage in self.graph.at_hand or (storage in self.schedule.saved and storage != without):
            return True
        return self.graph.producers[storage] in order or self.written.get(storage, position) < position


def _first(places: dict[int, int], storages: Iterable[int], position: int) -> None:
    for storage in storages:
        places.setdefault(storage, position)
