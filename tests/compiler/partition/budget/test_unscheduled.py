"""Plans of a budget that need no schedule: what they save is more than the peak that is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import aottrain
from aottrain.compiler.graphs.measured_calls import no_workspace
from aottrain.compiler.link.programs import plan_program
from aottrain.compiler.link.timeline import least_peak_bytes, trace_memory
from aottrain.compiler.partition.budget.strategy import _KernelPeaks
from aottrain.compiler.partition.costs.kernel_cost import FusionModel, Way
from aottrain.compiler.pipeline import apply_partition, functional_joint, plan_partition
from aottrain.ir.graph import PartitionedGraph, placeholders


class _Points:
    """A family whose plans are numbers."""

    fixed_bytes, reference, key, unbounded = 0, 1000, "", None

    def __init__(self, count: int) -> None:
        self.frontier = self
        self._count = count

    def apart(self, ratio: float) -> list[int]:
        return list(range(self._count))


def saved_between(parts: PartitionedGraph) -> list[fx.Node]:
    assert parts.backward is not None
    pairs = zip(placeholders(parts.backward), parts.residuals, strict=False)
    return [node for node, (_, primal) in pairs if primal is None]


def chosen(budget: float, bounds: bool) -> tuple[object, list[int]]:
    """The plan of a budget, and the plans that were scheduled for it."""
    scheduled: list[int] = []

    def peak(plan: int) -> int:
        scheduled.append(plan)
        return 1000 - 25 * plan + 7 * (plan % 3)

    least = (lambda plan: 940 - 25 * plan) if bounds else (lambda plan: 0)
    model = FusionModel(lambda *_: True, lambda _: False, peak, least)  # type: ignore[arg-type]
    peaks = _KernelPeaks(_Points(30), model)  # type: ignore[arg-type]
    peaks._plan = lambda number: number  # type: ignore[method-assign,assignment,return-value]
    return peaks.choose(budget), scheduled


@pytest.mark.parametrize("budget", [0.0, 0.1, 0.4, 0.7, 0.95, 1.0, 500, 300])
def test_bounds_change_no_choice(budget):
    with_bounds, few = chosen(budget, bounds=True)
    without, many = chosen(budget, bounds=False)
    assert with_bounds == without
    assert len(few) <= len(many) and len(set(few)) == len(few)


def test_they_spare_most_schedules():
    assert len(chosen(0.0, bounds=True)[1]) <= len(chosen(0.0, bounds=False)[1]) // 2


def test_with_collectives_under_way_a_plan_that_peaks_lower_and_is_faster_takes_a_samples_place():
    """Whatever the limit is: a smaller one has no plan that peaks higher."""
    samples = [29 * i // 7 for i in range(8)]

    def peak(plan: int) -> int:
        return 1000 - 25 * plan + 60 * (plan in samples)

    model = FusionModel(lambda *_: True, lambda _: False, lambda plan: 1000 - 25 * plan, lambda plan: 500 - 25 * plan)  # type: ignore[arg-type,operator,return-value]
    peaks = _KernelPeaks(_Points(30), model)  # type: ignore[arg-type]
    peaks._plan = lambda number: number  # type: ignore[method-assign,assignment,return-value]
    found = []
    for limit in range(1100, 300, -5):
        way = peaks.of(Way("", peak, lambda plan: 0.0))  # type: ignore[arg-type]
        way._plan = lambda number: number  # type: ignore[method-assign,assignment,return-value]
        plan = way.within(limit)
        assert plan is not None and peak(plan) <= limit  # type: ignore[arg-type]
        found.append(plan)
    assert [*map(peak, found)] == sorted(map(peak, found), reverse=True)
    assert not set(found) & set(samples[1:])


@pytest.mark.parametrize("strategy", ["save_all", "min_cut", "recompute_all"])
def test_the_bound_is_below_the_peak_of_kernels_and_of_operators(strategy):
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16), nn.Tanh())
    step = aottrain.capture(model, model, (torch.randn(32, 16),), {})
    joint = functional_joint(step, aottrain.analyse(step))
    parts = apply_partition(joint, plan_partition(joint, strategy))
    least = least_peak_bytes(parts, 1000)
    assert least <= trace_memory(parts, 1000).peak_bytes
    schedules = [schedule for _, _, schedule in plan_program(parts, local=True)]
    assert least <= trace_memory(parts, 1000, no_workspace, schedules).peak_bytes
    saved = sum(node.meta["val"].untyped_storage().nbytes() for node in saved_between(parts))
    assert least == trace_memory(parts, 1000).fixed_bytes + saved + (32 * 16 * 4) * 2  # the output, and its tangent
