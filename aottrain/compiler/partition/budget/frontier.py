"""The trade between peak memory and time: a family of plans that no budget changes, from which each budget picks one.

The search starts from all that the backward reads. At the instant of the peak it gives up values, those first that free
most bytes for each second (refinement.reexecute). Every schedule on the way, and the plans of other strategies, then
lose the recompute that their peak leaves room for (refinement.relax). The undominated ones are kept. Nothing depends on
a budget, so the cheapest plan whose peak fits is monotone: a smaller budget never has a higher peak. (In the spirit of
Kirisame et al., "Dynamic Tensor Rematerialization", 2021, but ahead of time, on exact lifetimes.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aottrain.compiler.partition.budget.refinement import neighbours, reexecute, relax, trim
from aottrain.compiler.partition.budget.simulation import Emitter, OpSchedule, Timeline, seconds_beyond, simulate
from aottrain.compiler.partition.costs.storages import StorageGraph
from aottrain.counted import tell

# A round of the search is linear in the ops; deep graphs give up several values a round to stay within a second.
_ROUNDS_TIMES_OPS = 120_000
_LEAST_ROUNDS = 12
# In a graph of up to so many ops every schedule that is one move away from the path of the search joins, too.
_SMALL = 64


@dataclass(frozen=True)
class Point:
    """One plan of the family."""

    timeline: Timeline
    seconds: float
    """Of what is computed twice."""
    origin: str
    """The search, or the strategy that it came from."""

    @property
    def peak_bytes(self) -> int:
        """Beside what is alive throughout."""
        return self.timeline.peak_bytes

    @property
    def schedule(self) -> OpSchedule:
        return self.timeline.schedule


@dataclass(frozen=True)
class Frontier:
    """The undominated plans of one program."""

    graph: StorageGraph
    points: tuple[Point, ...]
    """From the highest peak to the lowest."""

    @property
    def lowest(self) -> Point:
        return self.points[-1]

    def within(self, peak_bytes: int) -> Point | None:
        """The cheapest plan whose peak is at most that; None where there is none."""
        fitting = [point for point in self.points if point.peak_bytes <= peak_bytes]
        return min(fitting, key=lambda point: (point.seconds, point.peak_bytes), default=None)

    def apart(self, ratio: float) -> list[Point]:
        """Points of which each peaks at most at that share of the one before; the fastest and the lowest are there."""
        points = [self.points[0]]
        for point in self.points[1:]:
            if point.peak_bytes <= ratio * points[-1].peak_bytes or point is self.lowest:
                points.append(point)
        return points


def find_frontier(graph: StorageGraph, others: dict[str, frozenset[int]]) -> Frontier:
    """others: saved sets of other strategies, by name; they join the family."""
    emitter = Emitter(graph)
    base = emitter.least_seconds()

    def point(timeline: Timeline, origin: str) -> Point:
        return Point(timeline, max(seconds_beyond(graph, timeline.schedule, base), 0.0), origin)

    plans = [(origin, saved, False) for origin, saved in others.items()]
    plans.append(("borders of blocks", _at_borders(graph, emitter), True))
    points = [point(simulate(graph, emitter.emit(saved, forget)), origin) for origin, saved, forget in plans]
    start = simulate(graph, emitter.emit(_start(graph), False))
    rounds = max(_LEAST_ROUNDS, _ROUNDS_TIMES_OPS // max(len(graph.ops), 1))
    several = -(-3 * len(start.schedule.saved) // (2 * rounds))
    # Prices, and whether what is computed again is held for later uses: first so, then not, from where that ends.
    searches: list[tuple[list[float], tuple[bool, ...]]] = [(graph.rerun_seconds, (True, False))]
    if several == 1:
        searches.append(([op.fused_cost for op in graph.ops], (False,)))
    if several == 1 and graph.rerun_seconds != graph.costs:
        searches.append((graph.costs, (True, False)))
    for prices, kinds in searches:
        path = [start]
        for hold in kinds:
            for timeline in reexecute(emitter, min(path, key=_peak), prices, hold, several, rounds):
                path.append(timeline)
                tell("plans tried", len(points) + len(path))
        if len(graph.ops) <= _SMALL:
            path += [near for timeline in path for near in neighbours(emitter, timeline)]
        points += undominated(point(trim(graph, timeline), "search") for timeline in path)
    return Frontier(graph, undominated(point(relax(emitter, each.timeline), each.origin) for each in points))


def _peak(timeline: Timeline) -> int:
    return timeline.peak_bytes


def _at_borders(graph: StorageGraph, emitter: Emitter) -> frozenset[int]:
    """What lies between blocks, as checkpointing each block would save, and what may not be made again."""
    num_early = len(graph.early)
    fixed = {s for s in graph.must | (graph.outputs & graph.demanded) if graph.producers[s] < num_early}
    return frozenset(fixed | (emitter.cuts - graph.dropped))


def _start(graph: StorageGraph) -> frozenset[int]:
    """What the backward reads, where that is made by the user's forward. What only gradient formulas make, as eager
    does in its backward, is followed back to what they read."""
    saved: set[int] = set()
    seen: set[int] = set()
    stack = list(graph.demanded)
    first_late = min((op.order for op in graph.ops if op.late), default=0)
    while stack:
        storage = stack.pop()
        if storage in seen or storage in graph.at_hand:
            continue
        seen.add(storage)
        producer = graph.producers[storage]
        if producer < 0 or storage in graph.must:
            saved.add(storage)
        elif graph.ops[producer].order > first_late or storage in graph.dropped:
            stack += graph.reads[producer]
        else:
            saved.add(storage)
    return frozenset(saved)


def undominated(points: Iterable[Point]) -> tuple[Point, ...]:
    """Those that no other one beats, from the highest peak to the lowest."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.peak_bytes)):
        if not best or point.peak_bytes < best[-1].peak_bytes:
            best.append(point)
    return tuple(best)
