"""The memory of a step op by op, and what each saved value is worth at its peak."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aottrain.compiler.codegen.triton.render import partial_bytes, render_code
from aottrain.compiler.graphs import measured_calls as workspaces
from aottrain.compiler.graphs.measured_calls import no_workspace, workspaces_of
from aottrain.compiler.link.programs import plan_program
from aottrain.compiler.link.timeline import trace_memory
from aottrain.compiler.partition.budget.marginal import marginals, scheduled_ops
from aottrain.compiler.partition.budget.simulation import Emitter, OpSchedule, simulate
from aottrain.compiler.partition.costs.op_cost import node_seconds
from aottrain.compiler.partition.costs.storages import contract
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.compiler.schedule.memory import plan_memory
from aottrain.ir.graph import calls, storage_bytes
from aottrain.ir.plan import PartitionPlan
from tests.compiler.programs import joint_of, leaf
from tests.numerics.comparison import compiled, mixed_policy
from tests.zoo import FeedForward


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(16) for _ in range(4))
        self.conv, self.bn = nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.bn(self.conv(x)).square().mean()


PLANS = ("save_all", "min_cut", "checkpoint", "recompute_all", 0.0, 0.3, 0.8, mixed_policy)


@pytest.fixture(scope="module")
def joint():
    torch.manual_seed(0)
    return joint_of(Net(), torch.randn(4, 8, 16))


def planned(joint, plan):
    return plan_partition(joint, "budget", plan) if isinstance(plan, float) else plan_partition(joint, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_the_top_of_the_timeline_is_the_predicted_peak(joint, plan) -> None:
    parts = apply_partition(joint, planned(joint, plan))
    for workspace in (no_workspace, workspaces_of(joint.graph)):
        timeline = trace_memory(parts, 1000, workspace)
        peak = timeline.peak_bytes
        assert max(timeline.totals) == timeline.totals[timeline.peak] == peak == sum(timeline.memory.values())
        assert min(min(instant) for instant in timeline.live) >= 0
        assert sum(record.num_bytes for record in timeline.alive) <= peak - timeline.fixed_bytes
    assert timeline.memory["reserved"] == 1000 and timeline.at


def test_categories_are_what_they_say() -> None:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).exp().sum()

    joint = joint_of(Big(), torch.randn(64, 32))
    parts = apply_partition(joint, plan_partition(joint, "save_all"))
    timeline = trace_memory(parts, 0, lambda node: 77 if "mm" in node.name else 0)
    assert timeline.fixed == {"parameters": 32 * 32 * 4, "buffers": 0, "batch": 64 * 32 * 4, "reserved": 0}
    columns = dict(zip(timeline.categories, zip(*timeline.live, strict=True), strict=True))
    assert max(columns["saved"]) == 64 * 32 * 4  # the exponential
    assert columns["gradients"][-1] == 32 * 32 * 4 and not any(columns["gradients"][: timeline.num_forward])
    assert set(columns["workspaces"]) == {0, 77}
    assert columns["outputs"][-1] == 8  # the loss and its tangent


def test_what_is_alive_at_the_top_is_named(joint) -> None:
    timeline = trace_memory(apply_partition(joint, plan_partition(joint, "save_all")))
    largest = timeline.alive[0]
    assert largest.num_bytes == max(record.num_bytes for record in timeline.alive) and largest.op.startswith("aten.")
    assert timeline.num_alive >= len(timeline.alive) and {r.category for r in timeline.alive} >= {"saved"}
    assert any(record.module.startswith("blocks.") for record in timeline.alive)


def test_an_arena_and_blocks_of_residuals_are_alive_throughout(joint) -> None:
    parts = apply_partition(joint, plan_partition(joint, "save_all"))
    programs = plan_program(parts)
    schedules = [schedule for _, _, schedule in programs]
    memories = [plan_memory(graph, schedule, count) for graph, count, schedule in programs]
    fresh = trace_memory(parts, 0, no_workspace, schedules)
    timeline = trace_memory(parts, 0, no_workspace, schedules, memories)
    assert "arena" not in fresh.memory
    assert timeline.memory["arena"] == max(memory.arena_bytes for memory in memories) > 0
    blocks = sum(map(storage_bytes, memories[0].residuals))
    saved = [instant[timeline.categories.index("saved")] for instant in timeline.live]
    assert min(saved) == saved[-1] == blocks > 0  # what libraries made of what is saved is freed in the backward
    assert sum(record.num_bytes for record in timeline.alive) <= timeline.peak_bytes
    assert {record.name for record in fresh.alive} & {record.name for record in timeline.alive}


@pytest.mark.parametrize("plan", PLANS)
def test_the_schedule_that_is_simulated_is_the_one_that_runs(joint, plan) -> None:
    plan = planned(joint, plan)
    parts = apply_partition(joint, plan)
    graph = contract(joint, node_seconds, no_workspace)
    backward = scheduled_ops(graph, plan, parts)
    by_name = {root.name: storage for storage, root in enumerate(graph.roots)}
    saved = frozenset(by_name[name] for name in plan.saved)
    schedule = OpSchedule(saved, Emitter(graph).emit(saved, False).forward, backward)
    timeline = trace_memory(parts)
    assert simulate(graph, schedule).peak_bytes == timeline.peak_bytes - timeline.fixed_bytes


@pytest.mark.parametrize("plan", PLANS)
def test_a_value_is_worth_what_the_plan_without_it_shows(joint, plan) -> None:
    """Oracle: the plan written by hand without the value, applied, and both programs swept op by op."""
    plan = planned(joint, plan)
    parts = apply_partition(joint, plan)
    graph = contract(joint, node_seconds, no_workspace)
    found = marginals(graph, plan, parts)
    assert found or not plan.saved_bytes or plan.strategy in ("recompute_all", "checkpoint")
    before, seconds = trace_memory(parts), _seconds(parts)
    for name, worth in found.items():
        left = tuple(other for other in plan.saved if other != name)
        schedule = None if plan.schedule is None else _inserted(graph, plan.schedule, left, name)
        without = PartitionPlan("without", left, schedule=schedule)
        halves = apply_partition(joint, without)
        after = trace_memory(halves)
        change = after.peak_bytes - before.peak_bytes
        # Without a schedule views are held from where the program makes them, which the simulation does not see.
        tolerance = 0 if plan.schedule is not None else 0.03 * before.peak_bytes
        assert abs(worth.peak_change - change) <= tolerance, name
        added = _seconds(halves) - seconds
        assert worth.seconds == pytest.approx(added, abs=1e-9), name


def _inserted(graph, schedule, left, name) -> tuple[str, ...]:
    """The schedule with the ops that make `name` from what is there put before its first reader."""
    number = {op.node.name: i for i, op in enumerate(graph.ops)}
    storage = next(i for i, root in enumerate(graph.roots) if root.name == name)
    saved = {i for i, root in enumerate(graph.roots) if root.name in left}
    order, present, done = [], saved | graph.at_hand, False
    for i in map(number.__getitem__, schedule):
        if not done and storage in graph.ops[i].reads:
            done = True
            _make(graph, storage, present, order)
        order.append(i)
        present |= set(graph.ops[i].writes)
    return tuple(graph.ops[i].node.name for i in order)


def _make(graph, storage, present, order) -> None:
    op = graph.ops[graph.producers[storage]]
    for read in op.reads:
        if read not in present:
            _make(graph, read, present, order)
    order.append(graph.producers[storage])
    present |= set(op.writes)


def _seconds(parts) -> float:
    return sum(node_seconds(node) for part in (parts.forward, parts.backward) for node in calls(part))


def test_what_must_be_saved_has_no_price() -> None:
    report = compiled(lambda x: F.dropout(x.sin(), 0.5).exp() * 2, "recompute_all", rng="eager").prepare(leaf(64))
    must = [record for record in report.saved if record.reason.startswith("must")]
    assert must and all(record.recompute_s is None and record.peak_change is None for record in must)


def test_a_report_has_the_price_and_the_worth_of_what_is_saved() -> None:
    torch.manual_seed(0)
    report = compiled(Net(), "save_all", workspaces=True).prepare(torch.randn(4, 8, 16))
    priced = [record for record in report.saved if record.recompute_s is not None]
    assert len(priced) > 20 and all(record.recompute_s > 0 for record in priced)
    assert any(record.peak_change < 0 for record in priced if record.peak_change is not None)
    assert all(record.recompute_s is not None for record in report.recomputed)
    assert report.counts_workspaces and report.timeline.totals[report.timeline.peak] == report.predicted_peak_bytes
    assert not compiled(Net(), "save_all").prepare(torch.randn(4, 8, 16)).counts_workspaces


def test_what_cublas_keeps_is_counted_for_each_half_with_products(monkeypatch):
    """On a device, for the thread that runs the forward and for autograd's; a library never gives it back."""
    monkeypatch.setattr(workspaces, "product_workspace_bytes", lambda device: 1000)
    x, w = leaf(4, 3), leaf(3, 5)

    def kept(function, *inputs):
        joint = joint_of(function, *inputs)
        assert workspaces.kept_by_libraries(joint) == 0
        there = [
            replace(value, spec=replace(value.spec, device=torch.device("cuda"))) for value in joint.signature.inputs
        ]
        return workspaces.kept_by_libraries(replace(joint, signature=replace(joint.signature, inputs=tuple(there))))

    assert kept(lambda x, w: (x @ w).sum(), x, w) == 2000
    assert kept(lambda x, w: (x @ w).detach().sum() + x.sum(), x, w) == 1000
    assert kept(lambda x: x.sin().sum(), x) == 0


def test_partial_results_of_triton_kernels_are_what_their_modules_say():
    joint = joint_of(lambda x, scale: F.layer_norm(x, (8,), scale).sin().sum(), leaf(4096, 8), leaf(8))
    parts = apply_partition(joint, plan_partition(joint, "min_cut"))
    kernels = [call.kernel for _, _, schedule in plan_program(parts) for call in schedule.kernels]
    sizes = []
    for kernel in kernels:
        (line,) = [line for line in render_code(kernel).splitlines() if line.startswith("SCRATCH = ")]
        sizes.append(sum(count * getattr(torch, name).itemsize for name, count in ast.literal_eval(line[10:])))
    assert [partial_bytes(kernel) for kernel in kernels] == sizes and max(sizes) > 0
