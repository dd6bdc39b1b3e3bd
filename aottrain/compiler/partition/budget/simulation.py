"""From a set of saved storages to the exact order of both programs, and from that to the bytes alive at each instant.

A backward schedule may hold an op of the forward several times: what is forgotten is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from aottrain.compiler.partition.costs.storages import Array, StorageGraph
from aottrain.ir.analysis.liveness import last_uses

# What is alive at a cut, relative to the largest storage alive.
_BESIDE_A_CUT = 1.25


@dataclass(frozen=True)
class OpSchedule:
    """The order of both programs, ops by number. What is saved is read as it was saved; of what is made several times,
    the newest is read."""

    saved: frozenset[int]
    """Storages."""
    forward: tuple[int, ...]
    """In program order."""
    backward: tuple[int, ...]
    """Late ops in program order, recomputed ones between them."""


@dataclass(frozen=True)
class Timeline:
    """The memory of a schedule."""

    schedule: OpSchedule
    live: tuple[int, ...]
    """Bytes beside what is alive throughout, while each scheduled op runs, the end of the forward among them; that of
    the backward, too, where gradients are copied then."""
    peak: int
    """The position of the largest."""

    @property
    def peak_bytes(self) -> int:
        return self.live[self.peak]

    @property
    def peak_op(self) -> int | None:
        """The op that runs at the peak; None for the end of the forward, and of the backward."""
        return (*self.schedule.forward, None, *self.schedule.backward, None)[self.peak]


def find_units(graph: StorageGraph) -> tuple[list[int], frozenset[int]]:
    """The stretch of the forward that each early op is in, and the storages at which stretches meet.

    Stretches meet at cuts. At such an instant of the forward all later ops depend on earlier ones through one storage,
    the output of a block, and perhaps through small ones such as a table of positions. The backward passes the same
    instants in reverse.
    """
    count = len(graph.early)
    needed = _closure(graph, graph.outputs | graph.updates)
    inputs = graph.at_hand | graph.copied
    last = last_uses(set(graph.reads[i]) - inputs if i in needed else () for i in range(count))
    units, cuts, open_storages, unit = [0] * count, set(), set[int](), 0
    for i in range(count):
        units[i] = unit
        if i not in needed:
            continue
        open_storages -= {s for s in graph.reads[i] if last.get(s) == i}
        open_storages |= {s for s in graph.writes[i] if s in last}
        sizes = [graph.sizes[s] for s in open_storages]
        if sizes and sum(sizes) <= _BESIDE_A_CUT * max(sizes):
            cuts |= open_storages
            unit += 1
    return units, frozenset(cuts)


def _closure(graph: StorageGraph, storages: Iterable[int]) -> set[int]:
    """Early ops that these storages need."""
    ops: set[int] = set()
    stack = list(storages)
    while stack:
        producer = graph.producers[stack.pop()]
        if producer >= 0 and producer not in ops:
            ops.add(producer)
            stack += graph.reads[producer]
    return ops


class Emitter:
    """Writes schedules for one graph."""

    def __init__(self, graph: StorageGraph):
        self.graph = graph
        self.units, self.cuts = find_units(graph)
        self._late = [i for i, op in enumerate(graph.ops) if op.late]
        effects = {s for i in graph.early for s in graph.writes[i] if s in graph.must}
        self.always = frozenset(_closure(graph, graph.outputs | graph.updates | effects))
        self._forward = tuple(sorted(self.always))
        self._unit_of_late = self._late_units()

    def emit(self, saved: frozenset[int], forget: bool) -> OpSchedule:
        """Lazy: what is missing is computed just before the first op that reads it. `forget`: once the backward of a
        stretch of the forward is done, recomputed values of earlier stretches go, except those where stretches meet."""
        graph, reads, writes = self.graph, self.graph.reads, self.graph.writes
        present = bytearray(graph.at_hand_flags)
        for storage in saved:
            present[storage] = 1
        held: dict[int, list[int]] = {}
        order: list[int] = []
        for late in self._late:
            for storage in reads[late]:
                if not present[storage]:
                    for i in self._recompute([s for s in reads[late] if not present[s]], present):
                        order.append(i)
                        for made in writes[i]:
                            if forget and not present[made] and made not in self.cuts:
                                held.setdefault(self.units[i], []).append(made)
                            present[made] = 1
                    break
            order.append(late)
            for storage in writes[late]:
                present[storage] = 1
            if held:
                unit = self._unit_of_late[late]
                for earlier in [u for u in held if u < unit]:
                    for storage in held.pop(earlier):
                        present[storage] = 0
        order += self._recompute([s for s in graph.gradients if not present[s]], present)
        return OpSchedule(saved, self.forward(saved), tuple(order))

    def forward(self, saved: Iterable[int]) -> tuple[int, ...]:
        """What the forward runs: for its outputs, its effects, and what is saved."""
        producers = self.graph.producers
        more = [s for s in saved if producers[s] >= 0 and producers[s] not in self.always]
        return tuple(sorted(self.always | _closure(self.graph, more))) if more else self._forward

    def least_seconds(self) -> float:
        """Every op once; what only the backward needs, where that is cheapest."""
        graph, schedule = self.graph, self.emit(self.graph.demanded, False)
        ran = {*schedule.forward, *schedule.backward}
        return sum(graph.costs[i] if i in self.always else graph.rerun_seconds[i] for i in ran)

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
                stack += [s for s in graph.reads[producer] if not present[s]]
        return sorted(needed)

    def _late_units(self) -> dict[int, int]:
        """The stretch of the forward whose gradient each late op belongs to: the last one whose values it reads."""
        unit_of_op, current = {}, max(self.units, default=0)
        for late in self._late:
            producers = [self.graph.producers[s] for s in self.graph.reads[late]]
            read = [self.units[p] for p in producers if 0 <= p < len(self.units)]
            if read:
                current = min(current, max(read))
            unit_of_op[late] = current
        return unit_of_op


def seconds_beyond(graph: StorageGraph, schedule: OpSchedule, base: float) -> float:
    """How much longer than `base` seconds both programs take."""
    costs, again = graph.costs, graph.rerun_seconds
    return sum(costs[i] for i in schedule.forward) + sum(again[i] for i in schedule.backward) - base


def simulate(graph: StorageGraph, schedule: OpSchedule) -> Timeline:
    """Exact for programs that free each storage after its last use. Outputs live from the forward on, tangents through
    the whole backward, gradients until its end, residuals until their last use."""
    outputs = graph.outputs - graph.at_hand
    ops = np.fromiter(schedule.backward, np.int64, len(schedule.backward))
    read, freed = _releases(graph, schedule.saved, ops)
    residuals = [s for s in schedule.saved if read[s] and s not in outputs]
    start = sum(graph.sizes[s] for s in (*outputs, *residuals)) + graph.tangent_bytes
    made = graph.op_bytes[:, 0][ops]
    late = start + np.cumsum(made) - np.cumsum(freed) + freed + graph.op_bytes[:, 1][ops]
    if graph.copied_gradient_bytes:
        late = np.append(late, start + made.sum() - freed.sum() + graph.copied_gradient_bytes)
    live = np.concatenate([_forward_bytes(graph, schedule.forward, residuals), late])
    return Timeline(schedule, tuple(live.tolist()), int(live.argmax()))


def _releases(graph: StorageGraph, saved: frozenset[int], ops: Array) -> tuple[Array, Array]:
    """By storage, whether the backward reads it from outside; and the bytes that die with each of its ops: what is read
    last there, and what it makes that nothing reads.

    All accesses, sorted by storage and then by time: a storage dies with its last one, or with the last before it is
    made again. What is saved is read, not its copy: that dies at once.
    """
    sizes = graph.size_array
    accesses = graph.accesses
    count = accesses.starts[ops + 1] - accesses.starts[ops]
    ends = np.cumsum(count)
    chosen = np.arange(ends[-1] if len(ends) else 0) + np.repeat(accesses.starts[ops] - (ends - count), count)
    storages, makes, times = accesses.storages[chosen], accesses.makes[chosen], np.repeat(np.arange(len(ops)), count)
    kept, is_saved = np.zeros(len(sizes), bool), np.zeros(len(sizes), bool)
    kept[[*graph.gradients, *(graph.outputs & saved)]] = True
    is_saved[[*saved]] = True
    copies = makes & is_saved[storages]
    freed = np.zeros(len(ops))
    freed += np.bincount(times[copies], sizes[storages[copies]], len(ops))
    storages, makes, times = storages[~copies], makes[~copies], times[~copies]
    order = np.argsort(storages, kind="stable")
    storages, makes, times = storages[order], makes[order], times[order]
    last = np.append(storages[1:] != storages[:-1], True)[: len(storages)]
    dies = np.where(last, ~kept[storages], np.append(makes[1:], False)[: len(storages)])
    freed += np.bincount(times[dies], sizes[storages[dies]], len(ops))
    first = np.append(True, last[:-1])[: len(storages)]
    kept[storages[first]] = ~makes[first]
    return kept, freed.astype(np.int64)  # sums of whole numbers below 2^53 are exact


def _forward_bytes(graph: StorageGraph, order: tuple[int, ...], residuals: Iterable[int]) -> Array:
    """Bytes alive while each op of the forward runs, and at its end."""
    if order not in graph.forwards:
        graph.forwards[order] = _forward_alone(graph, order)
    alone, death = graph.forwards[order]
    kept = graph.outputs | graph.updates
    more = np.zeros(len(order) + 1, np.int64)
    for storage in residuals:
        if storage not in kept:
            more[death.get(storage, -1)] += graph.sizes[storage]
    return alone + np.cumsum(more)


def _forward_alone(graph: StorageGraph, order: tuple[int, ...]) -> tuple[Array, dict[int, int]]:
    """Bytes alive while each op runs and at the end where nothing is saved; and the position from which on each storage
    is dead, if it dies."""
    sizes = graph.sizes
    kept = graph.outputs | graph.updates
    death: dict[int, int] = {}
    for position, i in enumerate(order):
        for storage in (*graph.writes[i], *graph.reads[i]):
            death[storage] = position + 1
    made = {s for i in order for s in graph.writes[i]}
    death = {s: position for s, position in death.items() if s in made and s not in kept}
    changes = [0] * (len(order) + 2)
    for position, i in enumerate(order):
        changes[position] += graph.write_bytes[i]
    for storage, position in death.items():
        changes[position] -= sizes[storage]
    live = [now + graph.workspaces[i] for now, i in zip(accumulate(changes), order, strict=False)]
    # Updates that are inputs or views of inputs that the step writes are copied last.
    return np.array([*live, sum(sizes[s] for s in kept if s not in graph.at_hand)], np.int64), death
