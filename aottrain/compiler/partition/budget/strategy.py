"""The budget strategy: the cheapest plan of the family whose peak is within the budget."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from aottrain.compiler.graphs.measured_calls import workspaces_of
from aottrain.compiler.partition.budget.frontier import Frontier, Point
from aottrain.compiler.partition.budget.kept import KeptPeaks, frontier_of
from aottrain.compiler.partition.budget.simulation import Emitter, simulate
from aottrain.compiler.partition.costs.kernel_cost import FusionModel, Way, fused_prices
from aottrain.compiler.partition.costs.op_cost import price_of
from aottrain.compiler.partition.costs.storages import StorageGraph, contract
from aottrain.errors import BudgetError
from aottrain.ir.graph import PRIMALS, InputKind, JointGraph, Mark, info, storage_root
from aottrain.ir.ops import OpKind
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.settings.budget import Budget, unmet
from aottrain.ir.units import format_bytes, format_seconds
from aottrain.measure.decisions import note, planned_for, recorded
from aottrain.toolchain.kept import key_of

# Scheduling a plan's kernels takes a while. So of plans whose peaks are closer than this ratio one is scheduled, and of
# these so many are scheduled whatever the budget is.
_APART = 0.97
_NUM_SAMPLES = 8


@dataclass(frozen=True)
class Family:
    """All plans of one joint graph."""

    frontier: Frontier
    fixed_bytes: int
    """Alive throughout: parameters, buffers, batch, what is reserved."""
    reference: int
    """Peak of the min-cut plan, with what collectives have under way, which a budget of 1.0 stands for."""
    device: torch.device
    key: str = ""
    """Of the frontier, where that is kept."""
    unbounded: PartitionPlan | None = None
    """What runs without a budget, where plans run as generated kernels. Op by op it may peak high."""

    def limit(self, budget: Budget) -> int:
        """Bytes beside the fixed ones that a budget allows. Raises BudgetError where no plan is that small."""
        lowest = self.frontier.lowest.peak_bytes
        if isinstance(budget, str):
            # The reserved bytes and the inputs are in memory already.
            return self._at_least(self.fixed_bytes + self.free_bytes(), budget)
        if isinstance(budget, float):
            return lowest + int(budget * max(self.reference - lowest, 0))
        return self._at_least(budget, budget)

    def _at_least(self, total: int, budget: Budget) -> int:
        lowest = self.fixed_bytes + self.frontier.lowest.peak_bytes
        if total < lowest:
            raise unmet(budget, lowest)
        return total - self.fixed_bytes

    def free_bytes(self) -> int:
        """What the device could still give when this was first asked, or what a record says that it could."""
        question = "free bytes", f"{self.device.type} beside {self.fixed_bytes} bytes"
        decision = recorded(*question)
        if decision is not None and isinstance(decision.choice, (int, float)):
            note(*question, decision.choice, decision.source)
            return int(decision.choice)
        num_bytes = free_bytes(self.device)
        note(*question, num_bytes, "measured")
        return num_bytes

    def curve(self) -> tuple[tuple[int, float], ...]:
        """(peak in bytes, seconds of recompute) of every plan that no other one beats, from the highest peak down."""
        return tuple((self.fixed_bytes + point.peak_bytes, point.seconds) for point in self.frontier.points)


def find_family(
    joint: JointGraph,
    others: Iterable[PartitionPlan],
    marks: dict[fx.Node, Mark],
    reserved: int,
    cost: str,
    fusion: FusionModel | None = None,
    unbounded: PartitionPlan | None = None,
) -> Family:
    """others: plans of other strategies, min_cut first; they join the family. fusion: as `plan_partition`. unbounded:
    as a Family has it."""
    graph = contract(joint, price_of(cost, joint.graph), workspaces_of(joint.graph))
    if fusion is not None and fusion.fits is not None:
        graph.rerun_seconds = fused_prices(graph, fusion.fits)
    by_name = {root.name: i for i, root in enumerate(graph.roots)}
    must = {by_name[storage_root(node).name] for node, mark in marks.items() if mark is Mark.MUST_SAVE}
    graph.must = graph.must | (must & graph.demanded)
    graph.dropped = frozenset(
        by_name[node.name] for node, mark in marks.items() if mark <= Mark.PREFER_RECOMPUTE and node.name in by_name
    )
    plans = list(others)
    sets = {plan.strategy: frozenset(by_name[name] for name in plan.saved) for plan in plans}
    frontier, key = frontier_of(graph, sets)
    reference = simulate(graph, Emitter(graph).emit(sets[plans[0].strategy], False)).peak_bytes
    kinds = (*PRIMALS, InputKind.RNG) if joint.num_draws else PRIMALS
    fixed = sum(spec.spec.at_hand().storage_bytes for spec in joint.signature.inputs if spec.kind in kinds) + reserved
    device = joint.signature.inputs[joint.signature.input_indices(InputKind.RNG)[0]].spec.device
    if fusion is not None and fusion.reference_bytes is not None:
        reference = max(reference, fusion.reference_bytes(plans[0]) - fixed)
    return Family(frontier, fixed, reference, device, key, unbounded)


def free_bytes(device: torch.device) -> int:
    """What a device could still give, a twentieth left alone."""
    if (target := planned_for()) is not None:
        return int(0.95 * target.memory_bytes)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(0.95 * (free + idle))
    return int(0.95 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def plan_of(family: Family, budget: Budget, fusion: FusionModel | None = None) -> PartitionPlan:
    """The family's plan for a budget: a fraction between the lowest peak and min_cut's, bytes (int), or "auto".

    fusion: where plans run as generated kernels. What counts is then the peak of the kernels, which hold all that they
    read and write at once, and keep within them what operators write: 0.0 is the lowest of those, and a plan's kernels
    fit or another plan is taken. Where the plan that runs without a budget fits, it is that one: kernels have in
    registers what it computes again, which the family, planned op by op, does not know. Where no plan's kernels fit
    into the bytes, or at 1.0, it is that of a run op by op. Where processes talk to each other it is the fastest of
    those that leave room for what is under way.

    Raises BudgetError where no plan is that small: with the lowest peak op by op, and that of kernels.
    """
    chosen, peaks = None, None if fusion is None else _KernelPeaks(family, fusion)
    if peaks is not None and fusion is not None and fusion.fits is not None:
        chosen = peaks.choose(budget)
    if chosen is None:
        try:
            limit = family.limit(budget)
        except BudgetError as error:
            error.lowest_of_kernels = None if peaks is None else peaks.lowest_bytes()
            raise
        cheapest = family.frontier.within(limit)
        assert cheapest is not None
        plan = _plan_at(family, cheapest, budget, limit)
    else:
        assert peaks is not None
        number, limit = chosen
        plan = peaks.plan(number, budget, limit)
    if peaks is None or fusion is None or not fusion.ways:
        return plan
    return _with_room(peaks, fusion.ways, plan, budget, limit)


def _with_room(
    peaks: _KernelPeaks, ways: Iterable[Way], plan: PartitionPlan, budget: Budget, limit: int
) -> PartitionPlan:
    """plan: the fastest that fits where nothing is under way beside other calls. For each way it is the fastest that
    fits, and of these the one with the fastest step. Nothing but what fits depends on the budget: a smaller one has no
    higher peak."""
    found: list[tuple[Way, PartitionPlan]] = []
    for way in ways:
        point = peaks.of(way).within(limit)
        if point is None:
            continue
        with_room = replace(_plan_at(peaks.family, point, budget, limit), under_way=way.under_way)
        found.append((way, with_room))
        if with_room.schedule == plan.schedule:  # a way with less under way has no other plan, and waits no less
            break
    if len(found) < 2:
        return found[0][1] if found else plan
    return min(found, key=lambda pair: pair[0].seconds(pair[1]))[1]


class _KernelPeaks:
    """Plans by the peaks of their kernels: samples, from the fastest plan to the lowest, and the plans between them.

    Neither samples nor their order depend on a budget. The first sample that fits is taken. From there faster plans
    whose peak is no lower are tried, by bisection. So of two budgets that end at different plans the larger one has met
    a peak that the smaller one had no room for: a smaller budget never has a higher peak. Before all of them comes the
    plan that runs without a budget: what it fits into ends with it, and what it does not with a lower peak.
    """

    def __init__(self, family: Family, fusion: FusionModel):
        self.family, self._fusion = family, fusion
        self._points = family.frontier.apart(_APART)
        last = len(self._points) - 1
        self._unbounded = None if family.unbounded is None or fusion.ways else len(self._points)
        self._samples = sorted({last * i // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES)})
        self._plans: dict[int, PartitionPlan] = {}
        self._kept = KeptPeaks(key_of((family.key, fusion.key())) if family.key and fusion.key() else "")
        self._least, self._peaks = dict(self._kept.least), dict(self._kept.peaks)
        self._tries_before = False

    def of(self, way: Way) -> _KernelPeaks:
        """With what is under way. None of these is kept, and each counts as no lower than without."""
        if way.peak_bytes is self._fusion.peak_bytes:
            return self
        found = _KernelPeaks(self.family, replace(self._fusion, peak_bytes=way.peak_bytes, key=lambda: ""))
        known = dict(enumerate(point.peak_bytes for point in self._points)) if self._fusion.fits is None else {}
        found._plans, found._least = self._plans, {**self._least, **known, **self._peaks}
        found._tries_before = True
        return found

    def choose(self, budget: Budget) -> tuple[int, int] | None:
        """The number of the plan, and the bytes beside the fixed ones that the budget allows; None where none fits."""
        chosen = self._choose(budget)
        if self._kept.peaks and not self._is_confirmed(chosen[0] if chosen else self._samples[-1]):
            self._kept.forget()
            self._least, self._peaks = {}, {}
            chosen = self._choose(budget)
        self._kept.keep(self._peaks, self._least)
        return chosen

    def plan(self, number: int, budget: Budget, limit: int) -> PartitionPlan:
        family = self.family
        if number != self._unbounded:
            return _plan_at(family, self._points[number], budget, limit)
        assert family.unbounded is not None
        bounds = {"budget": budget, "curve": family.curve(), "limit": family.fixed_bytes + limit}
        return replace(family.unbounded, strategy="budget", **bounds)  # type: ignore[arg-type]

    def _is_confirmed(self, number: int) -> bool:
        """Whether a kept peak, of this plan or of the nearest to it, is what it is found to be now."""
        nearest = min(self._kept.peaks, key=lambda other: abs(other - number))
        if nearest >= len(self._points) and nearest != self._unbounded:
            return False
        found = self._fusion.peak_bytes(self._plan(nearest)) - self.family.fixed_bytes
        if found != self._kept.peaks[nearest] or not self._kept.agrees():
            return False
        self._kept.believe()
        return True

    def lowest_bytes(self) -> int | None:
        """The lowest peak, with the fixed bytes; None where calls run one by one."""
        if self._fusion.fits is None:
            return None
        lowest = self.family.fixed_bytes + self._lowest()
        self._kept.keep(self._peaks, self._least)
        return lowest

    def _choose(self, budget: Budget) -> tuple[int, int] | None:
        if isinstance(budget, float):
            limit = self.family.reference
            if budget < 1.0:
                lowest = self._lowest()
                if lowest > limit:
                    return None
                limit = lowest + int(budget * (limit - lowest))
        elif isinstance(budget, str):
            limit = self.family.free_bytes()
        else:
            limit = budget - self.family.fixed_bytes
        number = self._within(limit)
        return None if number is None else (number, limit)

    def within(self, limit: int) -> Point | None:
        """The fastest plan whose kernels peak within so many bytes beside the fixed ones."""
        number = self._within(limit)
        return None if number is None else self._points[number]

    def _within(self, limit: int) -> int | None:
        if self._unbounded is not None and self._fits(self._unbounded, limit):
            return self._unbounded
        sample = self._first(limit)
        return None if sample is None else self._faster(sample, limit)

    def _first(self, limit: int) -> int | None:
        """The fastest sample whose kernels peak within the limit."""
        return next((number for sample in self._samples if (number := self._sampled(sample, limit)) is not None), None)

    def _sampled(self, sample: int, limit: int) -> int | None:
        """The sample, where it fits. With what is under way the plan before it often peaks lower, as it waits for other
        collectives: it then takes the sample's place, whatever the limit is."""
        before = sample - 1
        if self._tries_before and before >= 0 and min(map(self._least_peak, (before, sample))) <= limit:
            lower = self._least_peak(before) <= self._peak(sample) and self._peak(before) <= self._peak(sample)
            sample = before if lower else sample
        return sample if self._fits(sample, limit) else None

    def _lowest(self) -> int:
        """The lowest peak of a sample, or of what runs without a budget. The last ones, which save least, come first:
        of most others what they save is more than that."""
        lowest = self._peak(self._samples[-1])
        others = [*self._samples[:-1], *([] if self._unbounded is None else [self._unbounded])]
        for sample in reversed(others):
            if self._least_peak(sample) < lowest:
                lowest = min(lowest, self._peak(sample))
        return lowest

    def _faster(self, sample: int, limit: int) -> int:
        """A point between this sample and the one before, or the sample."""
        low = max((other for other in self._samples if other < sample), default=sample)
        while low + 1 < sample:
            middle = (low + sample) // 2
            if self._fits(middle, limit) and self._peak(sample) <= self._peak(middle):
                sample = middle
            else:
                low = middle
        return sample

    def _fits(self, number: int, limit: int) -> bool:
        return self._least_peak(number) <= limit and self._peak(number) <= limit

    def _peak(self, number: int) -> int:
        """Bytes beside the fixed ones, here and below."""
        if number not in self._peaks:
            self._peaks[number] = self._fusion.peak_bytes(self._plan(number)) - self.family.fixed_bytes
        return self._peaks[number]

    def _least_peak(self, number: int) -> int:
        """What the peak is at least, without scheduling."""
        if number in self._peaks:
            return self._peaks[number]
        if number not in self._least:
            self._least[number] = self._fusion.least_bytes(self._plan(number)) - self.family.fixed_bytes
        return self._least[number]

    def _plan(self, number: int) -> PartitionPlan:
        if number not in self._plans:
            self._plans[number] = self.plan(number, 0.0, 0)
        return self._plans[number]


def _plan_at(family: Family, point: Point, budget: Budget, limit: int) -> PartitionPlan:
    graph = family.frontier.graph
    schedule = point.schedule
    read = {s for i in schedule.backward for s in graph.ops[i].reads} | graph.gradients
    saved = [s for s in sorted(schedule.saved) if s in read and s not in graph.at_hand]
    again = [i for i in dict.fromkeys(schedule.backward) if not graph.ops[i].late]
    return PartitionPlan(
        "budget",
        tuple(graph.roots[s].name for s in saved),
        tuple(graph.ops[i].node.name for i in sorted(again)),
        _reasons(graph, point, saved, again),
        sum(graph.sizes[s] for s in saved),
        budget,
        tuple(graph.ops[i].node.name for i in schedule.backward),
        family.curve(),
        family.fixed_bytes + limit,
    )


WRITTEN_INPUT = "must: an input that the step or the caller may write to before the backward"


def _reasons(graph: StorageGraph, point: Point, saved: list[int], again: list[int]) -> dict[str, str]:
    reasons = {}
    for storage in saved:
        producer = graph.producers[storage]
        if storage in graph.must:
            text = WRITTEN_INPUT if producer < 0 else "must: not repeatable, or marked"
        elif storage in graph.outputs:
            text = "output: alive anyway"
        else:
            label, size = info(graph.ops[producer].node).label, format_bytes(graph.sizes[storage])
            text = f"{label}: worth more than its {size} at the peak"
        reasons[graph.roots[storage].name] = text
    for i in again:
        op = graph.ops[i]
        random = info(op.node).kind is OpKind.RANDOM
        size = format_bytes(sum(graph.sizes[s] for s in op.writes))
        text = f"computed again: {size} less held through the forward, for {format_seconds(graph.rerun_seconds[i])}"
        reasons[op.node.name] = "drawn again from the saved seed" if random else text
    return reasons
