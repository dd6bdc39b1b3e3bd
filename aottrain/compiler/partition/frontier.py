"""The trade between peak memory and time: a family of plans that no budget changes, from which each budget picks one.

Peak-driven greedy: start from what the backward reads; simulate; at the instant of the peak stop saving the value that
frees most bytes for each second of recompute; note (peak, seconds); go on until nothing helps. The path does not depend
on a budget, so the cheapest plan whose peak fits is monotone: a smaller budget never has a higher peak. (In the spirit
of Kirisame et al., "Dynamic Tensor Rematerialization", 2021, but ahead of time, on exact lifetimes.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aottrain.compiler.partition.schedule import Emitter, Schedule, Timeline, simulate
from aottrain.compiler.partition.storages import StorageGraph

# Emissions and simulations are linear in the ops; deep graphs drop several values a round to stay within a second.
_ROUNDS_TIMES_OPS = 60_000
_LEAST_ROUNDS = 16
# In a small graph so many other drops are tried where the best one does not lower the peak.
_NUM_TRIALS, _SMALL = 32, 64


@dataclass(frozen=True)
class Point:
    """One plan of the family. peak_bytes: beside what is alive throughout; seconds: of what is computed twice."""

    peak_bytes: int
    seconds: float
    saved: frozenset[int]
    forget: bool
    origin: str


@dataclass(frozen=True)
class Frontier:
    """points: undominated, from the highest peak to the lowest."""

    graph: StorageGraph
    points: tuple[Point, ...]

    @property
    def lowest(self) -> Point:
        return self.points[-1]

    def within(self, peak_bytes: int) -> Point | None:
        """The cheapest plan whose peak is at most that; None where there is none."""
        fitting = [point for point in self.points if point.peak_bytes <= peak_bytes]
        return min(fitting, key=lambda point: (point.seconds, point.peak_bytes), default=None)


def find_frontier(graph: StorageGraph, others: dict[str, frozenset[int]]) -> Frontier:
    """others: saved sets of other strategies, by name; they join the family."""
    emitter = Emitter(graph)
    base = _least_seconds(graph, emitter)
    points: list[Point] = []

    def note(saved: frozenset[int], forget: bool, origin: str) -> tuple[Timeline, Point]:
        timeline = simulate(graph, emitter.emit(saved, forget))
        point = Point(timeline.peak_bytes, _seconds(graph, timeline.schedule) - base, saved, forget, origin)
        points.append(point)
        return timeline, point

    for name, saved in others.items():
        for forget in (False, True):
            note(saved, forget, name)
    start = _start(graph)
    for forget, price in ((False, "time"), (False, "fused"), (True, "time"), (True, "fused")):
        _descend(graph, start, forget, price, lambda s, f=forget: note(s, f, "greedy")[0])  # type: ignore[misc]
    return Frontier(graph, _undominated(points))


def schedule_of(graph: StorageGraph, point: Point) -> Schedule:
    return Emitter(graph).emit(point.saved, point.forget)


def _start(graph: StorageGraph) -> frozenset[int]:
    """What the backward reads, where that is made by the user's forward. What only gradient formulas make, as eager
    does in its backward, is followed back to what they read."""
    found: set[int] = set()
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
            found.add(storage)
        elif graph.ops[producer].order > first_late or storage in graph.dropped:
            stack += graph.ops[producer].reads
        else:
            found.add(storage)
    return frozenset(found)


def _descend(
    graph: StorageGraph, saved: frozenset[int], forget: bool, price: str, note: Callable[[frozenset[int]], Timeline]
) -> None:
    """Drop values until the peak cannot be lowered by dropping one; `note` simulates and archives each state.

    Where the best drop of a small graph does not lower the peak, others are tried.
    """
    rounds = max(_LEAST_ROUNDS, _ROUNDS_TIMES_OPS // max(len(graph.ops), 1))
    several = -(-len(saved) // rounds)
    trials = _NUM_TRIALS if len(graph.ops) <= _SMALL else 0

    def without(dropped: list[int]) -> frozenset[int]:
        left = saved
        for storage in dropped:
            left = (left - {storage}) | _needed_musts(graph, left, storage)
        return left

    timeline = note(saved)
    while True:
        ranked = _candidates(graph, timeline, price)
        rest = sorted(saved - graph.must - graph.outputs - set(ranked), key=lambda s: (-graph.sizes[s], s))
        attempts = [ranked[:several]] if ranked else []
        attempts += [[storage] for storage in [*ranked[several:], *rest][:trials]]
        best: tuple[Timeline, frozenset[int]] | None = None
        for dropped in attempts:
            left = without(dropped)
            found = note(left)
            if best is None or found.peak_bytes < best[0].peak_bytes:
                best = found, left
            if found.peak_bytes < timeline.peak_bytes:
                break
        if best is None or (not ranked and best[0].peak_bytes >= timeline.peak_bytes):
            return
        timeline, saved = best


def _candidates(graph: StorageGraph, timeline: Timeline, price: str) -> list[int]:
    """Saved values that lie unused through the peak, best first: bytes for each second that their recompute adds."""
    schedule = timeline.schedule
    end = len(schedule.forward)
    op = timeline.peak_op
    read_at_peak = set() if op is None else {*graph.ops[op].reads, *graph.ops[op].writes}
    waiting = schedule.saved - graph.must - graph.outputs - read_at_peak
    if timeline.peak <= end:
        before, after = schedule.forward[: timeline.peak], schedule.forward[timeline.peak + 1 :]
        made = {s for i in before for s in graph.ops[i].writes}
        waiting &= made
    else:
        after = schedule.backward[timeline.peak - end :]
    read_later = {s for i in after for s in graph.ops[i].reads}
    waiting = waiting - read_later if timeline.peak <= end else waiting & read_later
    running = {i for i in schedule.backward if not graph.ops[i].late}
    scored = []
    for storage in sorted(waiting):
        added, own = _added_seconds(graph, schedule.saved - {storage}, storage, running, price)
        needed = _needed_musts(graph, schedule.saved, storage) - schedule.saved
        freed = graph.sizes[storage] - sum(graph.sizes[s] for s in needed)
        if freed > 0:
            scored.append((freed / (added + 0.05 * own + 1e-9), storage))
    return [storage for _, storage in sorted(scored, key=lambda pair: (-pair[0], -pair[1]))]


def _added_seconds(
    graph: StorageGraph, saved: frozenset[int], storage: int, running: set[int], price: str
) -> tuple[float, float]:
    """Of computing this storage again, what is not computed again already; and of its own op."""
    total, seen, stack = 0.0, set(), [storage]
    while stack:
        producer = graph.producers[stack.pop()]
        if producer < 0 or producer in seen or producer in running:
            continue
        seen.add(producer)
        total += _price(graph, producer, price)
        stack += [s for s in graph.ops[producer].reads if s not in saved and s not in graph.at_hand]
    own = graph.producers[storage]
    return total, _price(graph, own, price) if own >= 0 else 0.0


def _price(graph: StorageGraph, op: int, price: str) -> float:
    """Recompute by its time, or by its time where what only moves memory is free."""
    return graph.ops[op].fused_cost if price == "fused" else graph.ops[op].cost


def _needed_musts(graph: StorageGraph, saved: frozenset[int], dropped: int) -> frozenset[int]:
    """What may not be made again and is not saved yet, but would be read to make the dropped value again."""
    if graph.must <= saved:
        return frozenset()
    found: set[int] = set()
    seen: set[int] = set()
    stack = [dropped]
    while stack:
        producer = graph.producers[stack.pop()]
        if producer < 0 or producer in seen:
            continue
        seen.add(producer)
        for storage in graph.ops[producer].reads:
            if storage in saved and storage != dropped or storage in graph.at_hand:
                continue
            (found.add if storage in graph.must else stack.append)(storage)
    return frozenset(found)


def _seconds(graph: StorageGraph, schedule: Schedule) -> float:
    return sum(graph.ops[i].cost for i in (*schedule.forward, *schedule.backward))


def _least_seconds(graph: StorageGraph, emitter: Emitter) -> float:
    """Every op once."""
    schedule = emitter.emit(graph.demanded, False)
    return sum(graph.ops[i].cost for i in {*schedule.forward, *schedule.backward})


def _undominated(points: Iterable[Point]) -> tuple[Point, ...]:
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.peak_bytes)):
        if not best or point.peak_bytes < best[-1].peak_bytes:
            best.append(point)
    return tuple(best)
