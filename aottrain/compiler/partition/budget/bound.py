"""A lower bound for all plans: the least time that any plan must add to a step whose peak is not above a limit.

At one instant of the backward, each forward value that its remaining ops read is alive, or is recomputed later. Which
values to hold in the bytes that are left is a knapsack whose items depend on one another: a recomputed value reads
others, which must be alive or recomputed in turn. With a price on bytes instead of a limit it is a minimum cut (a
project selection: Picard, "Maximal closure of a graph and applications to combinatorial problems", 1976). At any price
the cut, less the price of the bytes that are there, is a lower bound (Geoffrion, "Lagrangean relaxation for integer
programming", 1974). The best price is where two cuts cost the same; as in Newton's method, it takes a few cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from aottrain.compiler.graphs.algorithms.min_cut import min_vertex_cut
from aottrain.compiler.partition.budget.marginal import scheduled_ops
from aottrain.compiler.partition.budget.simulation import Emitter, OpSchedule, seconds_beyond, simulate
from aottrain.compiler.partition.costs.storages import StorageGraph
from aottrain.explain.report import Gap
from aottrain.ir.analysis.liveness import freed_after, last_uses
from aottrain.ir.graph import PartitionedGraph
from aottrain.ir.plan import PartitionPlan

_UNITS_PER_S = 10**15  # of the cut's whole numbers
_MOST_CUTS = 32


def find_gap(graph: StorageGraph, plan: PartitionPlan, parts: PartitionedGraph) -> Gap | None:
    """None where the ops of the plan's backward cannot be told. graph: the plan's joint graph, contracted."""
    backward = scheduled_ops(graph, plan, parts)
    if backward is None:
        return None
    by_name = {root.name: storage for storage, root in enumerate(graph.roots)}
    saved = frozenset(by_name[name] for name in plan.saved)
    emitter = Emitter(graph)
    schedule = OpSchedule(saved, emitter.forward(saved), backward)
    least = least_added_seconds(graph, emitter.always, simulate(graph, schedule).peak_bytes)
    once = emitter.least_seconds()
    return Gap(once, max(seconds_beyond(graph, schedule, once), 0.0), least)


def least_added_seconds(graph: StorageGraph, always: frozenset[int], peak_bytes: int) -> float:
    """Of any schedule with late ops in program order, whose peak is not higher; inf where there is none.

    always: ops that the forward runs in any case; a run of others in the backward may be their first.
    """
    instant = _fullest(graph)
    room = peak_bytes - instant.other_bytes
    unpriced = 0.0, sum(graph.sizes[s] for s in instant.waiting)
    if unpriced[1] <= room:
        return 0.0
    network = _Choice(graph, always, instant)
    # (seconds, bytes) on either side of what the room is; the line between them is the next price.
    below, above = network.without_holding(), unpriced
    if below[1] > room:
        return inf
    for _ in range(_MOST_CUTS):
        price = (below[0] - above[0]) / (above[1] - below[1])
        value, choice = network.cut(price)
        if choice in (below, above) or value >= (1 - 1e-9) * (above[0] + price * above[1]):
            break
        below, above = (below, choice) if choice[1] > room else (choice, above)
    return max(value - price * room, 0.0)


@dataclass(frozen=True)
class _LateInstant:
    """What is alive while one late op runs."""

    waiting: tuple[int, ...]
    """Storages of the forward that ops after it read and it does not."""
    there: frozenset[int]
    """Storages that are alive in any case."""
    other_bytes: int
    """Of all that is alive besides what waits."""


def _fullest(graph: StorageGraph) -> _LateInstant:
    """Where most would be alive if nothing of the forward were made again."""
    late = [i for i, op in enumerate(graph.ops) if op.late]
    made = {s for i in late for s in graph.writes[i]}
    last = last_uses((*graph.writes[i], *graph.reads[i]) for i in late)
    last.update(dict.fromkeys(graph.gradients, len(late)))
    free = graph.at_hand | graph.outputs
    held = {s: k for s, k in last.items() if s not in made and s not in free}
    dying = freed_after(last, free - made)
    now = sum(graph.sizes[s] for s in (*(graph.outputs - graph.at_hand), *held)) + graph.tangent_bytes
    most, fullest = -1, 0
    for k, i in enumerate(late):
        now += graph.write_bytes[i]
        if now + graph.workspaces[i] > most:
            most, fullest = now + graph.workspaces[i], k
        now -= sum(graph.sizes[s] for s in dying.get(k, ()))
    read = frozenset(graph.reads[late[fullest]]) if late else frozenset()
    waiting = tuple(s for s, k in held.items() if k >= fullest and s not in read)
    return _LateInstant(waiting, free | read, max(most, 0) - sum(graph.sizes[s] for s in waiting))


class _Choice:
    """Which waiting values to hold and which to recompute, as a minimum cut between ops that do not run again and these
    values.

    A storage is one vertex, which is cut where the storage is held. An op is two vertices, of which the first is cut
    where the op runs again.
    """

    def __init__(self, graph: StorageGraph, always: frozenset[int], instant: _LateInstant):
        self.graph, self.waiting = graph, instant.waiting
        self.storages: list[int] = []
        self.weights: dict[int, int | None] = {}
        self.edges: list[tuple[int, int]] = []
        self.sources: list[int] = []
        self.first = len(graph.sizes)  # of the ops' vertices
        seen, stack, ops = set(instant.waiting), list(instant.waiting), set[int]()
        while stack:
            storage = stack.pop()
            self.storages.append(storage)
            op = graph.producers[storage]
            if op < 0 or storage in graph.must:
                self.sources.append(storage)
                continue
            self.edges.append((self.first + 2 * op + 1, storage))
            if op in ops:
                continue
            ops.add(op)
            self._add(op, graph.rerun_seconds[op] if op in always else 0.0)
            for read in graph.reads[op]:
                if read not in instant.there:
                    self.edges.append((read, self.first + 2 * op + 1))
                    if read not in seen:
                        seen.add(read)
                        stack.append(read)

    def _add(self, op: int, seconds: float) -> None:
        vertex = self.first + 2 * op
        self.weights |= {vertex: int(seconds * _UNITS_PER_S), vertex + 1: None}
        self.sources.append(vertex)
        self.edges.append((vertex, vertex + 1))

    def cut(self, price: float) -> tuple[float, tuple[float, int]]:
        """The least seconds and price of bytes, and the seconds and the bytes of that choice. Rounded down."""
        sizes = self.graph.sizes
        priced = {storage: int(price * sizes[storage] * _UNITS_PER_S) for storage in self.storages}
        value, chosen = min_vertex_cut({**self.weights, **priced}, self.edges, self.sources, self.waiting)
        seconds = sum(self.weights[v] or 0 for v in chosen if v >= self.first)
        return value / _UNITS_PER_S, (seconds / _UNITS_PER_S, sum(sizes[v] for v in chosen if v < self.first))

    def without_holding(self) -> tuple[float, int]:
        """The seconds and bytes where as little as can be is held."""
        total = sum(weight or 0 for weight in self.weights.values()) / _UNITS_PER_S
        return self.cut(1.0 + 2 * total)[1]  # a byte costs more than all ops
