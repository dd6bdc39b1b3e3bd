"""What planning under a budget has found of a program is kept for other processes: its family of plans, and the peaks
of those plans' kernels.

Both only say where to look. Of the family the orders of ops are kept, and bytes and seconds are found anew. Peaks are
believed once one of them was found anew and is the same. The plan that is chosen is cut and verified as any other. So a
kept value that is of no use costs time, and at worst a plan that is not the best.
"""

from __future__ import annotations

from typing import Any

from aottrain.compiler.partition.budget.frontier import Frontier, Point, find_frontier, undominated
from aottrain.compiler.partition.budget.simulation import Emitter, OpSchedule, seconds_beyond, simulate
from aottrain.compiler.partition.costs.storages import StorageGraph
from aottrain.ir.settings.decisions import Decision
from aottrain.measure.decisions import Ledger, ledger_of_measurements
from aottrain.toolchain.kept import code_of, keep, key_of, read_kept

FAMILIES, PEAKS = "families", "peaks"
_CODE = ("compiler/partition", "compiler/graphs", "ir")
_SETS = ("at_hand", "must", "outputs", "updates", "gradients", "demanded", "copied", "dropped")


def frontier_of(graph: StorageGraph, others: dict[str, frozenset[int]]) -> tuple[Frontier, str]:
    """As `find_frontier`, and the key that it is kept by; "" where nothing is kept: where a fixed model or a record
    answers instead of what was measured and kept, or a size is no number."""
    key = _family_key(graph, others) if ledger_of_measurements() is not None else ""
    if not key:
        return find_frontier(graph, others), ""
    frontier = _read(graph, read_kept(FAMILIES, key))
    if frontier is None:
        frontier = find_frontier(graph, others)
        points = [[each.origin, sorted(each.schedule.saved), each.schedule.backward] for each in frontier.points]
        keep(FAMILIES, key, points)
    return frontier, key


def _family_key(graph: StorageGraph, others: dict[str, frozenset[int]]) -> str:
    """Of all that the search reads."""
    if any(type(size) is not int for size in (*graph.sizes, graph.tangent_bytes, *graph.workspaces)):
        return ""
    ops = [(op.reads, op.writes, op.cost, op.fused_cost, op.workspace, op.order, op.late) for op in graph.ops]
    sets = [sorted(getattr(graph, name)) for name in _SETS]
    saved = [(name, sorted(numbers)) for name, numbers in others.items()]
    numbers = graph.sizes, graph.producers, graph.tangent_bytes, graph.rerun_seconds
    return key_of((code_of(*_CODE), ops, sets, saved, *numbers))


def _read(graph: StorageGraph, kept: Any) -> Frontier | None:
    """The family, by its orders; None where these are of another program."""
    try:
        emitter = Emitter(graph)
        base = emitter.least_seconds()
        points = []
        for origin, numbers, backward in kept:
            saved = frozenset(numbers)
            schedule = OpSchedule(saved, emitter.forward(saved), tuple(backward))
            seconds = max(seconds_beyond(graph, schedule, base), 0.0)
            points.append(Point(simulate(graph, schedule), seconds, origin))
    except (TypeError, ValueError, LookupError):
        return None
    family = undominated(points)
    return Frontier(graph, family) if family and family == tuple(points) else None


class KeptPeaks:
    """Of one program the peaks of its plans' kernels, by a plan's number, and what they are at least."""

    def __init__(self, key: str):
        """key: of the program and of all that its schedules hang on; "": nothing is kept."""
        self._key, self._ledger = key, ledger_of_measurements()
        self.peaks: dict[int, int] = {}
        self.least: dict[int, int] = {}
        self._asked: list[Decision] = []
        kept = read_kept(PEAKS, key) if key and self._ledger is not None else None
        try:
            if kept is not None:
                self.peaks = {int(number): int(size) for number, size in kept["peaks"].items()}
                self.least = {int(number): int(size) for number, size in kept["least"].items()}
                self._asked = [Decision(each["kind"], each["key"], each["choice"], "cache") for each in kept["asked"]]
        except (TypeError, ValueError, LookupError, AttributeError):
            self.forget()
        self._before = None if self._ledger is None else dict(self._ledger.decisions)

    def forget(self) -> None:
        self.peaks, self.least, self._asked = {}, {}, []

    def agrees(self) -> bool:
        """Whether what the schedules of these plans asked was answered as it is now."""
        found = {} if self._ledger is None else self._ledger.decisions
        return all(found.get((each.kind, each.key), each).choice == each.choice for each in self._asked)

    def believe(self) -> None:
        """The peaks are right: what was asked for them counts as asked."""
        for each in self._asked:
            assert self._ledger is not None
            self._ledger.decisions.setdefault((each.kind, each.key), each)

    def keep(self, peaks: dict[int, int], least: dict[int, int]) -> None:
        """Where any is new, and all that was asked for them was answered by what other processes find, too."""
        if not self._key or self._ledger is None or (peaks.keys() <= self.peaks.keys() and self.peaks):
            return
        asked = _new(self._ledger, self._before or {}) + self._asked
        if all(each.source in ("measured", "cache") and _is_plain(each.choice) for each in asked):
            texts = [{"kind": each.kind, "key": each.key, "choice": each.choice} for each in asked]
            keep(PEAKS, self._key, {"peaks": peaks, "least": least, "asked": texts})


def _new(ledger: Ledger, before: dict[tuple[str, str], Decision]) -> list[Decision]:
    return [each for question, each in ledger.decisions.items() if question not in before]


def _is_plain(choice: object) -> bool:
    return choice is None or type(choice) in (str, int, float, bool)
