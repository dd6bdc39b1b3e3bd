"""Changes to one schedule, op by op: undo recompute that its peak leaves room for, and lower the peak by forgetting a
value that lies unused through it and computing it again just before its next use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from aottrain.compiler.graphs.algorithms.range_maximum import RangeMaximum
from aottrain.compiler.partition.budget.simulation import Emitter, OpSchedule, Timeline, simulate
from aottrain.compiler.partition.costs.storages import StorageGraph

_PATIENCE = 40
# Of a value's own op, counted where it runs in any case: of two values that cost nothing more, the cheaper goes.
_OWN_SHARE = 0.05
# A storage, the op before which it is computed again, the op at the peak.
MoveKey = tuple[int, int, int | None]


class BackwardUses:
    """Where the backward of a schedule runs each early op, and where it reads or makes each storage, in order."""

    def __init__(self, graph: StorageGraph, backward: tuple[int, ...]):
        self.runs: dict[int, list[int]] = {}
        self.touched: list[list[int]] = [[] for _ in graph.sizes]
        touches, touched, num_early = graph.touches, self.touched, len(graph.early)
        for position, i in enumerate(backward):
            for storage in touches[i]:
                touched[storage].append(position)
            if i < num_early:
                self.runs.setdefault(i, []).append(position)


def relax(emitter: Emitter, timeline: Timeline) -> Timeline:
    """The same or a cheaper schedule, whose peak is not higher: values are held, or saved, where there is room."""
    schedule = _Relaxation(emitter, timeline).run()
    return timeline if schedule is None else trim(emitter.graph, simulate(emitter.graph, schedule))


class _Relaxation:
    """One pass over the recomputed ops of a schedule, those first that cost most for each byte that they make."""

    def __init__(self, emitter: Emitter, timeline: Timeline):
        self.graph, self.emitter, self.schedule = emitter.graph, emitter, timeline.schedule
        self.limit, self.peak, self.live = timeline.peak_bytes, timeline.peak, RangeMaximum(timeline.live)
        self.start = len(self.schedule.forward) + 1  # of the backward
        self.uses = BackwardUses(self.graph, self.schedule.backward)
        self.saved = set(self.schedule.saved)
        self.removed: set[int] = set()

    def run(self) -> OpSchedule | None:
        graph = self.graph
        worth = {i: graph.rerun_seconds[i] / (graph.write_bytes[i] + 1) for i in self.uses.runs}
        for i in sorted(worth, key=lambda i: (-worth[i], i)):
            runs = self.uses.runs[i]
            for position in reversed(runs[1:]):
                self._hold(i, position)
            if not self.removed.issuperset(runs[1:]):
                continue
            self._save(i, runs[0])
        if not self.removed:
            return None
        backward = tuple(i for p, i in enumerate(self.schedule.backward) if p not in self.removed)
        saved = frozenset(self.saved)
        return OpSchedule(saved, self.emitter.forward(saved), backward)

    def _needed_results(self, op: int, position: int) -> list[int]:
        """What is read of this run's results before the op runs again."""
        runs = self.uses.runs[op]
        after = runs[runs.index(position) + 1 :]
        end = next((p for p in after if p not in self.removed), len(self.schedule.backward))
        needed = []
        for storage in self.graph.writes[op]:
            touched = self.uses.touched[storage]
            index = bisect_left(touched, position) + 1
            read = index < len(touched) and any(p < end and p not in after for p in touched[index:])
            if storage not in self.saved and (read or storage in self.graph.gradients):
                needed.append(storage)
        return needed

    def _hold(self, op: int, position: int) -> None:
        """Keep the results of the run before instead of running the op here, where there is room."""
        spans = []
        for storage in self._needed_results(op, position):
            touched = self.uses.touched[storage]
            last = touched[bisect_left(touched, position) - 1]
            spans.append((self.start + last + 1, self.start + position, self.graph.sizes[storage]))
        self._take(spans, position)

    def _save(self, op: int, position: int) -> None:
        """Save the results instead of computing them in the backward, where there is room."""
        graph = self.graph
        if op not in self.emitter.always:
            return
        death, end = graph.forwards[self.schedule.forward][1], self.start + position
        if self.peak < end and all(death.get(s, 0) <= self.peak for s in graph.writes[op] if s not in self.saved):
            return  # they would lie through the peak
        needed = self._needed_results(op, position)
        if graph.dropped.intersection(needed):
            return
        spans = [(death.get(s, self.start - 1), end, graph.sizes[s]) for s in needed]
        if self._take([span for span, s in zip(spans, needed, strict=True) if s not in graph.outputs], position):
            self.saved.update(needed)

    def _take(self, spans: list[tuple[int, int, int]], position: int) -> bool:
        for n, (first, end, size) in enumerate(spans):
            if first < end and self.live.largest(first, end) + size > self.limit:
                for first, end, size in spans[:n]:
                    self.live.add(first, end, -size)
                return False
            self.live.add(first, end, size)
        self.removed.add(position)
        return True


def trim(graph: StorageGraph, timeline: Timeline) -> Timeline:
    """Without runs of early ops whose results are not read before they are made again."""
    saved, num_early = timeline.schedule.saved, len(graph.early)
    alive = set(graph.gradients)
    kept: list[int] = []
    for i in reversed(timeline.schedule.backward):
        if i < num_early:
            made = alive.intersection(graph.writes[i]) - saved
            if not made:
                continue
            alive -= made
        alive.update(graph.early_reads[i])
        kept.append(i)
    kept.reverse()
    if len(kept) == len(timeline.schedule.backward):
        return timeline
    return simulate(graph, replace(timeline.schedule, backward=tuple(kept)))


def reexecute(
    emitter: Emitter, timeline: Timeline, prices: list[float], hold: bool, several: int, rounds: int
) -> Iterator[Timeline]:
    """Schedules along a search for lower peaks. (Tabu search: Glover, "Future paths for integer programming", 1986.)

    At each peak some values are alive but not used. Those that free most bytes for each second are forgotten, and
    computed again just before their next use: `several` at a time, fewer where that does not help. No move is made
    twice. The search ends after `rounds`, or after a while without a lower peak.

    prices: seconds of each op. hold: where an op of those would run again later, its results are held until then.
    """
    best, waited = timeline, 0
    tabu: set[MoveKey] = set()
    for _ in range(rounds):
        moves = _best_moves(emitter.graph, timeline, prices, hold, several, tabu)
        if moves:
            tabu.update(move.key for move in moves)
            timeline = simulate(emitter.graph, _apply(emitter, timeline.schedule, moves))
            yield timeline
        if moves and timeline.peak_bytes < best.peak_bytes:
            best, waited = timeline, 0
        elif several > 1:
            timeline, several = best, several // 2
        elif moves and waited < _PATIENCE:
            waited += 1
        else:
            return


def neighbours(emitter: Emitter, timeline: Timeline) -> Iterator[Timeline]:
    """Every schedule that is one move of `reexecute` away."""
    graph = emitter.graph
    for hold in (True, False):
        for move in _candidates(graph, timeline, graph.rerun_seconds, hold, set()):
            yield simulate(graph, _apply(emitter, timeline.schedule, [move]))


@dataclass(frozen=True)
class _Move:
    """One value is forgotten, and made again later."""

    key: MoveKey
    storage: int
    """What to forget."""
    position: int
    """In the backward, before which the chain makes it again."""
    chain: list[int]
    """The ops that make it."""
    relied: set[int]
    """What the chain reads."""
    merged: list[int]
    """Later runs of the chain's ops, which are left out."""


def _apply(emitter: Emitter, schedule: OpSchedule, moves: list[_Move]) -> OpSchedule:
    saved = schedule.saved.difference(move.storage for move in moves)
    merged = {position for move in moves for position in move.merged}
    chains: dict[int, list[int]] = {}
    for move in moves:
        chains.setdefault(move.position, []).extend(move.chain)
    backward: list[int] = []
    start = 0
    for position in sorted({*chains, *merged}):
        backward += schedule.backward[start:position]
        backward += chains.get(position, ())
        start = position + (position in merged)
    backward += schedule.backward[start:]
    return OpSchedule(saved, emitter.forward(saved), tuple(backward))


def _best_moves(
    graph: StorageGraph, timeline: Timeline, prices: list[float], hold: bool, several: int, tabu: set[MoveKey]
) -> list[_Move]:
    """Moves that do not touch one another, those first that free most bytes for each second."""
    chosen: list[_Move] = []
    forgotten, relied = set[int](), set[int]()
    for move in _candidates(graph, timeline, prices, hold, tabu):
        if move.storage not in relied and forgotten.isdisjoint(move.relied):
            chosen.append(move)
            forgotten.add(move.storage)
            relied |= move.relied
            if len(chosen) == several:
                break
    return chosen


def _candidates(
    graph: StorageGraph, timeline: Timeline, prices: list[float], hold: bool, tabu: set[MoveKey]
) -> list[_Move]:
    """All moves, best first."""
    state, peak_op = _PeakState(graph, timeline), timeline.peak_op
    scored = []
    for storage in state.idle():
        position = state.next_use(storage)
        key = storage, timeline.schedule.backward[position], peak_op
        chain = None if key in tabu else state.chain(storage, position)
        if chain is None:
            continue
        ops, relied, lengthened = chain
        merged = state.later_runs(ops, position) if hold else {}
        seconds = sum(prices[i] for i in ops if i not in merged)
        freed = graph.sizes[storage] - lengthened
        if freed > 0:
            score = freed / (seconds + _OWN_SHARE * prices[graph.producers[storage]] + 1e-9)
            scored.append((-score, storage, _Move(key, storage, position, ops, relied, [*merged.values()])))
    scored.sort(key=lambda each: each[:2])
    return [move for _, _, move in scored]


class _PeakState:
    """What is alive at a schedule's peak."""

    def __init__(self, graph: StorageGraph, timeline: Timeline):
        self.graph, self.schedule = graph, timeline.schedule
        self.backward = self.schedule.backward
        # Of the peak in the backward; -1 for the forward and its end.
        self.position = max(timeline.peak - len(self.schedule.forward) - 1, -1)
        self.peak = timeline.peak
        uses = BackwardUses(graph, self.backward)
        self.touched, self.runs = uses.touched, uses.runs

    def idle(self) -> list[int]:
        """Values of early ops that are alive, that the op at the peak does not touch, and that may be made again."""
        saved, backward, instant = self.schedule.saved, self.backward, self.position
        producers, all_touched = self.graph.producers, self.touched
        death = self.graph.forwards[self.schedule.forward][1]
        idle = []
        for storage in self.graph.repeatable:
            touched = all_touched[storage]
            if not touched or touched[-1] <= instant:
                continue
            if storage in saved:
                if touched[0] > instant and (instant >= 0 or death.get(storage, 0) <= self.peak):
                    idle.append(storage)
            elif touched[0] < instant:
                index = bisect_left(touched, instant)
                if touched[index] != instant and backward[touched[index]] != producers[storage]:
                    idle.append(storage)
        return idle

    def next_use(self, storage: int) -> int:
        touched = self.touched[storage]
        return touched[bisect_left(touched, self.position)]

    def later_runs(self, ops: list[int], position: int) -> dict[int, int]:
        """By op, where it runs next."""
        next_runs = {}
        for op in ops:
            runs = self.runs.get(op, ())
            index = bisect_left(runs, position)
            if index < len(runs):
                next_runs[op] = runs[index]
        return next_runs

    def alive(self, storage: int, position: int) -> bool:
        """Whether it holds a value just before that position that is read there or later."""
        touched = self.touched[storage]
        index = bisect_left(touched, position)
        if index == len(touched):
            return False
        if storage in self.schedule.saved:
            return True
        return index > 0 and self.backward[touched[index]] != self.graph.producers[storage]

    def chain(self, storage: int, position: int) -> tuple[list[int], set[int], int] | None:
        """The ops that make it from what is alive there, in order; what they read of that; and the bytes of saved
        values that live through the peak for it. None where it cannot be made."""
        graph, saved = self.graph, self.schedule.saved
        ops, relied, lengthened, stack, seen = set[int](), set[int](), 0, [storage], {storage}
        while stack:
            op = graph.producers[stack.pop()]
            if op < 0:
                return None
            if op in ops:
                continue
            ops.add(op)
            for read in graph.reads[op]:
                if read in seen or graph.at_hand_flags[read]:
                    continue
                seen.add(read)
                if self.alive(read, position) or (read in saved and self._outlives_peak(read)):
                    relied.add(read)
                elif read in graph.must and read in saved:
                    relied.add(read)
                    lengthened += graph.sizes[read]
                elif read in graph.must:
                    return None
                else:
                    stack.append(read)
        return sorted(ops), relied, lengthened

    def _outlives_peak(self, storage: int) -> bool:
        """Whether a saved value is alive at the peak, or any time: then it may be read later, too."""
        touched = self.touched[storage]
        return storage in self.graph.outputs or (bool(touched) and touched[-1] > self.position)
