"""From a set of saved storages to the exact order of both programs, and from that to the bytes alive at each instant.

A backward schedule may hold an op of the forward several times: what is forgotten is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aottrain.compiler.partition.storages import StorageGraph

# What is alive at a cut, relative to the largest storage alive.
_BESIDE_A_CUT = 1.25


@dataclass(frozen=True)
class Schedule:
    """Ops by number. forward: in program order; backward: late ops in program order, recomputed ones between them."""

    saved: frozenset[int]
    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """Bytes beside what is alive throughout, while each scheduled op runs, the end of the forward among them; peak: the
    position of the largest."""

    schedule: Schedule
    live: tuple[int, ...]
    peak: int

    @property
    def peak_bytes(self) -> int:
        return self.live[self.peak]

    @property
    def peak_op(self) -> int | None:
        """The op that runs at the peak; None for the end of the forward."""
        return (*self.schedule.forward, None, *self.schedule.backward)[self.peak]


def find_units(graph: StorageGraph) -> tuple[list[int], frozenset[int]]:
    """The stretch of the forward that each early op is in, and the storages at which stretches meet.

    A cut is an instant of the forward at which all later ops depend on earlier ones through a single storage, the
    output of a block, and perhaps through small ones such as a table of positions. Gradients come back through the same
    instants in reverse.
    """
    count = len(graph.early)
    needed = _closure(graph, graph.outputs | graph.updates)
    last: dict[int, int] = {}
    for i in range(count):
        if i in needed:
            for storage in graph.ops[i].reads:
                if storage not in graph.at_hand and storage not in graph.copied:
                    last[storage] = i
    units, cuts, open_storages, unit = [0] * count, set(), set[int](), 0
    for i in range(count):
        units[i] = unit
        op = graph.ops[i]
        if i not in needed:
            continue
        open_storages -= {s for s in op.reads if last.get(s) == i}
        open_storages |= {s for s in op.writes if s in last}
        sizes = [graph.sizes[s] for s in open_storages]
        if sizes and sum(sizes) <= _BESIDE_A_CUT * max(sizes):
            cuts |= open_storages
            unit += 1
    return units, frozenset(cuts)


def _closure(graph: StorageGraph, storages: Iterable[int], stop: frozenset[int] = frozenset()) -> set[int]:
    """Early ops that these storages need; the search does not pass through `stop`."""
    found: set[int] = set()
    stack = [s for s in storages]
    while stack:
        producer = graph.producers[stack.pop()]
        if producer >= 0 and producer not in found:
            found.add(producer)
            stack += [s for s in graph.ops[producer].reads if s not in stop]
    return found


class Emitter:
    """Writes schedules for one graph."""

    def __init__(self, graph: StorageGraph):
        self.graph = graph
        self.units, self.cuts = find_units(graph)
        self._late = [i for i, op in enumerate(graph.ops) if op.late]
        effects = {s for i in graph.early for s in graph.ops[i].writes if s in graph.must}
        self._always = _closure(graph, graph.outputs | graph.updates | effects)
        self._unit_of_late = self._late_units()

    def emit(self, saved: frozenset[int], forget: bool) -> Schedule:
        """Lazy: what is missing is computed just before the first op that reads it. `forget`: once the backward of a
        stretch of the forward is done, recomputed values of earlier stretches go, except those where stretches meet."""
        graph, ops = self.graph, self.graph.ops
        present = bytearray(len(graph.sizes))
        for storage in (*saved, *graph.at_hand):
            present[storage] = 1
        held: dict[int, list[int]] = {}
        order: list[int] = []
        for late in self._late:
            missing = [s for s in ops[late].reads if not present[s]]
            if missing:
                for i in self._recompute(missing, present):
                    order.append(i)
                    for storage in ops[i].writes:
                        if forget and not present[storage] and storage not in self.cuts:
                            held.setdefault(self.units[i], []).append(storage)
                        present[storage] = 1
            order.append(late)
            for storage in ops[late].writes:
                present[storage] = 1
            if forget and held:
                unit = self._unit_of_late[late]
                for earlier in [u for u in held if u < unit]:
                    for storage in held.pop(earlier):
                        present[storage] = 0
        order += self._recompute([s for s in graph.gradients if not present[s]], present)
        return Schedule(saved, tuple(sorted(self._always | _closure(graph, saved))), tuple(order))

    def _recompute(self, missing: Iterable[int], present: bytearray) -> list[int]:
        """The early ops that make these storages from what is present, in program order."""
        graph = self.graph
        needed: set[int] = set()
        stack = list(missing)
        while stack:
            storage = stack.pop()
            producer = graph.producers[storage]
            assert producer >= 0, f"{graph.roots[storage].name} is neither saved nor recomputable"
            if producer not in needed:
                needed.add(producer)
                stack += [s for s in graph.ops[producer].reads if not present[s]]
        return sorted(needed)

    def _late_units(self) -> dict[int, int]:
        """The stretch of the forward whose gradient each late op belongs to: the last one whose values it reads."""
        found, current = {}, max(self.units, default=0)
        for late in self._late:
            producers = [self.graph.producers[s] for s in self.graph.ops[late].reads]
            read = [self.units[p] for p in producers if 0 <= p < len(self.units)]
            if read:
                current = min(current, max(read))
            found[late] = current
        return found


def simulate(graph: StorageGraph, schedule: Schedule) -> Timeline:
    """Exact for programs that free each storage after its last use. Outputs live from the forward on, tangents through
    the whole backward, gradients until its end, residuals until their last use."""
    read = {s for i in schedule.backward for s in graph.ops[i].reads}
    residuals = {s for s in schedule.saved if s in read or s in graph.gradients}
    kept = residuals | graph.outputs | graph.updates
    forward = _sweep(graph, schedule.forward, set(), kept - graph.copied)
    forward.append(_total(graph, kept))  # inputs that the step updates are copied last
    outputs = graph.outputs - graph.at_hand
    fixed = sum(graph.sizes[s] for s in outputs) + graph.tangent_bytes
    held = {s for s in residuals if s not in outputs}
    backward = [
        fixed + live for live in _sweep(graph, schedule.backward, held, graph.gradients - graph.at_hand - outputs)
    ]
    live = [*forward, *backward]
    return Timeline(schedule, tuple(live), max(range(len(live)), key=live.__getitem__, default=0))


def _total(graph: StorageGraph, storages: Iterable[int]) -> int:
    return sum(graph.sizes[s] for s in storages if s not in graph.at_hand)


def _sweep(graph: StorageGraph, order: tuple[int, ...], held: set[int], kept: Iterable[int]) -> list[int]:
    """Bytes alive while each op runs: before it started, its results, and what lives only within it."""
    sizes, ops = graph.sizes, graph.ops
    made = {s for i in order for s in ops[i].writes} | held
    needed = {s for s in kept if s in made}
    freed: list[int] = [0] * len(order)
    for position in range(len(order) - 1, -1, -1):
        op = ops[order[position]]
        total = 0
        for storage in op.writes:
            if storage in needed and storage not in held:  # what is saved is read, not its copy
                needed.discard(storage)
            else:
                total += sizes[storage]
        for storage in op.reads:
            if storage in made and storage not in needed:
                needed.add(storage)
                total += sizes[storage]
        freed[position] = total
    live, now = [], sum(sizes[s] for s in held)
    for position, i in enumerate(order):
        op = ops[i]
        for storage in op.writes:
            now += sizes[storage]
        live.append(now + op.workspace)
        now -= freed[position]
    return live
