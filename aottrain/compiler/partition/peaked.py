"""The budget strategy: the cheapest plan of the family whose peak is within the budget."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from aottrain.compiler.partition.cost import price_of
from aottrain.compiler.partition.frontier import Frontier, Point, find_frontier
from aottrain.compiler.partition.fused import Fused, fused_prices
from aottrain.compiler.partition.schedule import Emitter, simulate
from aottrain.compiler.partition.storages import StorageGraph, contract
from aottrain.compiler.partition.workspace import workspaces_of
from aottrain.errors import BudgetError
from aottrain.ir.budget import Budget
from aottrain.ir.graph import PRIMALS, InputKind, JointGraph, Mark, info, storage_root
from aottrain.ir.ops import OpKind
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.units import format_bytes

# Scheduling a plan's kernels takes a while: of plans whose peaks are closer than this ratio, one is asked for them.
_APART = 0.97
_MOST_TRIES = 8


@dataclass(frozen=True)
class Family:
    """All plans of one joint graph. fixed_bytes: alive throughout: parameters, buffers, batch, what is reserved.
    reference: peak of the min-cut plan, which a budget of 1.0 stands for."""

    frontier: Frontier
    fixed_bytes: int
    reference: int
    device: torch.device

    def limit(self, budget: Budget) -> int:
        """Bytes beside the fixed ones that a budget allows. Raises BudgetError where no plan is that small."""
        lowest = self.frontier.lowest.peak_bytes
        if isinstance(budget, str):
            # The reserved bytes and the inputs are in memory already.
            return self._at_least(self.fixed_bytes + free_bytes(self.device), "auto")
        if isinstance(budget, float):
            return lowest + int(budget * max(self.reference - lowest, 0))
        return self._at_least(budget, format_bytes(budget))

    def _at_least(self, total: int, text: str) -> int:
        smallest = self.fixed_bytes + self.frontier.lowest.peak_bytes
        if total < smallest:
            raise BudgetError(
                f"partition.budget={text} cannot be met: the lowest peak that can be reached is"
                f" {format_bytes(smallest)} ({smallest}B)"
            )
        return total - self.fixed_bytes

    def curve(self) -> tuple[tuple[int, float], ...]:
        """(peak in bytes, seconds of recompute) of every plan that no other one beats, from the highest peak down."""
        return tuple((self.fixed_bytes + point.peak_bytes, point.seconds) for point in self.frontier.points)


def find_family(
    joint: JointGraph,
    others: Iterable[PartitionPlan],
    marks: dict[fx.Node, Mark],
    reserved: int,
    cost: str,
    fused: Fused | None = None,
) -> Family:
    """others: plans of other strategies, min_cut first; they join the family. fused: as `plan_partition`."""
    graph = contract(joint, price_of(cost, joint.graph), workspaces_of(joint.graph))
    if fused is not None:
        graph.again = fused_prices(graph, fused.fits)
    by_name = {root.name: i for i, root in enumerate(graph.roots)}
    must = {by_name[storage_root(node).name] for node, mark in marks.items() if mark is Mark.MUST_SAVE}
    graph.must = graph.must | (must & graph.demanded)
    graph.dropped = frozenset(
        by_name[node.name] for node, mark in marks.items() if mark <= Mark.PREFER_RECOMPUTE and node.name in by_name
    )
    plans = list(others)
    sets = {plan.strategy: frozenset(by_name[name] for name in plan.saved) for plan in plans}
    frontier = find_frontier(graph, sets)
    reference = simulate(graph, Emitter(graph).emit(sets[plans[0].strategy], False)).peak_bytes
    kinds = (*PRIMALS, InputKind.RNG) if joint.num_draws else PRIMALS
    fixed = sum(spec.spec.storage_bytes for spec in joint.signature.inputs if spec.kind in kinds) + reserved
    device = joint.signature.inputs[joint.signature.input_indices(InputKind.RNG)[0]].spec.device
    return Family(frontier, fixed, reference, device)


def free_bytes(device: torch.device) -> int:
    """What a device could still give, a twentieth left alone."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(0.95 * (free + idle))
    return int(0.95 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def plan_of(family: Family, budget: Budget, fused: Fused | None = None) -> PartitionPlan:
    """The family's plan for a budget: a fraction between the lowest peak and min_cut's, bytes (int), or "auto".

    fused: where plans run as generated kernels. A kernel holds all that it reads and writes at once, and so may peak
    above the plan, op by op. It is the first of the plans, the cheapest first, whose kernels peak within the budget:
    as the order is none of the budget's, a smaller one has no higher peak. Where there is none it is the plan of a run
    op by op.
    """
    limit = family.limit(budget)
    if fused is not None:
        tried = [point for point in family.frontier.apart(_APART) if point.peak_bytes <= limit]
        for point in tried[:_MOST_TRIES]:
            plan = _plan_at(family, point, budget, limit)
            if fused.peak_bytes(plan) <= family.fixed_bytes + limit:
                return plan
    cheapest = family.frontier.within(limit)
    assert cheapest is not None
    return _plan_at(family, cheapest, budget, limit)


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


def _reasons(graph: StorageGraph, point: Point, saved: list[int], again: list[int]) -> dict[str, str]:
    reasons = {}
    for storage in saved:
        producer = graph.producers[storage]
        label = "read of state that the step updates" if producer < 0 else info(graph.ops[producer].node).label
        if storage in graph.must:
            text = "must: read of state that the step updates" if producer < 0 else "must: not repeatable, or marked"
        elif storage in graph.outputs:
            text = "output: alive anyway"
        else:
            text = f"{label}: worth more than its {format_bytes(graph.sizes[storage])} at the peak"
        reasons[graph.roots[storage].name] = text
    for i in again:
        op = graph.ops[i]
        random = info(op.node).kind is OpKind.RANDOM
        size = format_bytes(sum(graph.sizes[s] for s in op.writes))
        text = f"computed again: {size} less held through the forward, for {graph.again[i] * 1e6:.0f} us"
        reasons[op.node.name] = "drawn again from the saved seed" if random else text
    return reasons
