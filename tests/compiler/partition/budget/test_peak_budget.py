"""Budgets on the peak: the family of plans, what is predicted of each, and what a budget picks."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aottrain
from aottrain.compiler.graphs.measured_calls import workspaces_of
from aottrain.compiler.link.timeline import trace_memory
from aottrain.compiler.partition.budget.simulation import Emitter, simulate
from aottrain.compiler.partition.budget.strategy import Family, plan_of
from aottrain.compiler.partition.costs.op_cost import node_flops, node_seconds
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import find_demand, plan_family, plan_partition
from aottrain.errors import BudgetError
from aottrain.ir.graph import calls, module_of
from aottrain.ir.settings.budget import budget_text, parse_budget
from aottrain.ir.verify import verify_partition
from tests.compiler.partition.knapsack import knapsack_cut
from tests.compiler.programs import joint_inputs, joint_of, leaf, run_joint, run_parts
from tests.numerics.comparison import assert_same
from tests.zoo import CountingTrunk

FRACTIONS = tuple(i / 20 for i in range(21))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + norm(conv(x)).relu()
        return x.square().mean()


def several(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = (x @ y).sin()
    top, bottom = h.split(8)
    values, index = (top * bottom).sort(-1)
    return values.exp().sum(), (h.t() * F.dropout(h, 0.5)).cos().tanh().mean(0)


PROGRAMS = {
    "blocks": lambda: (CountingTrunk(), torch.randn(2, 8, 16)),
    "residual": lambda: (Residual(), torch.randn(2, 4, 6, 6)),
    "several outputs": lambda: (several, leaf(16, 16), leaf(16, 16, seed=1)),
    "chain": lambda: (lambda x: x.sin().exp().tanh().cos().sigmoid().log1p() * 2, leaf(64, 64)),
}


@pytest.fixture(params=PROGRAMS)
def traced(request: pytest.FixtureRequest):
    torch.manual_seed(0)
    target, *args = PROGRAMS[request.param]()
    state = [*target.parameters(), *target.buffers()] if isinstance(target, nn.Module) else []
    return joint_of(target, *args), [*state, *args]


def test_every_plan_of_the_family_is_lawful_and_has_the_peak_that_was_simulated(traced) -> None:
    joint, _ = traced
    family = plan_family(joint)
    graph = family.frontier.graph
    workspace = workspaces_of(joint.graph)
    for point in family.frontier.points:
        plan = plan_of(family, family.fixed_bytes + point.peak_bytes)
        parts = apply_partition(joint, plan)
        verify_partition(joint, parts)
        assert trace_memory(parts, 0, workspace).peak_bytes == family.fixed_bytes + point.peak_bytes
        assert simulate(graph, point.schedule).peak_bytes == point.peak_bytes
        assert all(plan.reasons[name] for name in (*plan.saved, *plan.recomputed))


def test_a_smaller_budget_never_has_a_higher_peak_nor_a_cheaper_plan(traced) -> None:
    joint, _ = traced
    family = plan_family(joint)
    points = [family.frontier.within(family.limit(fraction)) for fraction in FRACTIONS]
    peaks, seconds = [point.peak_bytes for point in points], [point.seconds for point in points]
    assert peaks == sorted(peaks) and seconds == sorted(seconds, reverse=True)
    assert peaks[0] == family.frontier.lowest.peak_bytes and peaks[-1] <= family.reference


def test_no_strategy_has_a_plan_that_the_family_lacks(traced) -> None:
    joint, _ = traced
    family = plan_family(joint)
    blocks = ["checkpoint"] if any("blocks" in module_of(node) for node in calls(joint.graph)) else []
    for strategy in ("save_all", "min_cut", "recompute_all", *blocks):
        parts = apply_partition(joint, plan_partition(joint, strategy))
        peak = trace_memory(parts, 0, workspaces_of(joint.graph)).peak_bytes
        assert family.frontier.within(peak - family.fixed_bytes) is not None, strategy


@pytest.mark.parametrize("percent", (0, 30, 60, 100))
def test_no_knapsack_has_a_faster_plan_of_as_low_a_peak(traced, percent) -> None:
    joint, _ = traced
    capacity = percent * plan_partition(joint, "min_cut").saved_bytes // 100
    plan = knapsack_cut(find_demand(joint), capacity)
    peak = trace_memory(apply_partition(joint, plan), 0, workspaces_of(joint.graph)).peak_bytes
    family = plan_family(joint)
    point = family.frontier.within(peak - family.fixed_bytes)
    again = [node for node in joint.graph.nodes if node.name in plan.recomputed]
    assert point is not None and point.seconds <= sum(map(node_seconds, again)) + 1e-12


def test_gradients_are_those_of_the_joint_graph_at_every_budget(traced) -> None:
    joint, args = traced
    inputs = joint_inputs(joint, args)
    wanted = run_joint(joint, inputs)
    for fraction in (0.0, 0.1, 0.3, 0.6, 1.0):
        parts = apply_partition(joint, plan_partition(joint, "budget", fraction))
        assert_same(run_parts(parts, inputs), wanted)


def test_bytes_bound_the_peak_and_what_cannot_be_met_names_the_least() -> None:
    joint = joint_of(CountingTrunk(), torch.randn(2, 8, 16))
    family = plan_family(joint, reserved_bytes=1000)
    least = family.fixed_bytes + family.frontier.lowest.peak_bytes
    assert least == 1000 + plan_family(joint).fixed_bytes + plan_family(joint).frontier.lowest.peak_bytes
    for budget in (least, least + 5000, 10 * least):
        parts = apply_partition(joint, plan_partition(joint, "budget", budget, 1000))
        assert trace_memory(parts, 1000, workspaces_of(joint.graph)).peak_bytes <= budget
    with pytest.raises(BudgetError, match=f"{least}B"):
        plan_partition(joint, "budget", least - 1, 1000)


def test_auto_takes_the_fastest_plan_that_fits() -> None:
    joint = joint_of(CountingTrunk(), torch.randn(2, 8, 16))
    family = plan_family(joint)
    assert plan_of(family, "auto").saved == plan_of(family, 10**12).saved


def test_a_compiled_module_takes_a_budget_in_bytes() -> None:
    net, x = CountingTrunk(), torch.randn(2, 8, 16)
    generous = aottrain.compile(net, budget="1GiB", capture="trace", on_unsupported="error")
    generous(x).backward()
    (graph,) = generous.report.graphs
    least, most = graph.curve[-1][0], graph.curve[0][0]
    assert least < most and graph.predicted_peak_bytes <= most
    tight = aottrain.compile(net, budget=f"{least}B", capture="trace", on_unsupported="error")
    tight(x).backward()
    assert tight.report.graphs[0].predicted_peak_bytes == least
    with pytest.raises(BudgetError):
        aottrain.compile(net, budget=f"{least - 1}B", capture="trace")(x)


def test_forgetting_at_the_cuts_keeps_one_stretch_of_the_forward_alive() -> None:
    graph = plan_family(joint_of(CountingTrunk(depth=12), torch.randn(4, 128, 16))).frontier.graph
    emitter = Emitter(graph)
    assert len(emitter.cuts) >= 12
    nothing = frozenset(graph.must | graph.outputs) & graph.demanded | graph.copied
    dropped, kept = (simulate(graph, emitter.emit(nothing, forget)).peak_bytes for forget in (True, False))
    assert dropped < 0.5 * kept


def test_the_whole_forward_need_not_be_alive_at_once_at_the_least_budget() -> None:
    joint = joint_of(CountingTrunk(depth=12), torch.randn(2, 32, 16))
    least = trace_memory(apply_partition(joint, plan_partition(joint, "budget", 0.0))).peak_bytes
    whole = trace_memory(apply_partition(joint, plan_partition(joint, "recompute_all"))).peak_bytes
    assert least < 0.6 * whole


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("6GiB", 6 * 2**30), ("1.5 MB", 1_500_000), ("17b", 17), (0.4, 0.4), (1, 1.0), (0, 0.0), ("AUTO", "auto")],
)
def test_budgets_as_people_write_them(given, wanted) -> None:
    budget = parse_budget(given)
    assert budget == wanted and isinstance(budget, type(wanted))
    shown = str(given).lower() if wanted == "auto" else str(given)
    assert budget_text(budget) == budget_text(copy.deepcopy(budget)) == shown


@pytest.mark.parametrize("given", [1.4, -0.1, True, None, "6", "GiB", "6GiBs", "-1GB", float("nan"), "9" * 400 + "B"])
def test_what_is_no_budget(given) -> None:
    with pytest.raises(ValueError, match="allowed"):
        parse_budget(given)


@pytest.mark.parametrize("widths", [(32, 32, 32, 32), (32, 128, 16, 64), (32, 32, 32, 32, 32), (64, 16, 128, 32, 96)])
def test_on_a_chain_of_products_saved_bytes_and_flops_are_the_optimum_by_brute_force(widths: tuple[int, ...]) -> None:
    """At 11 budgets. All saved sets are tried, each with and without forgetting."""

    def chain(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = x @ weight
        return x.sum()

    shapes = list(itertools.pairwise(widths))
    joint = joint_of(chain, leaf(64, widths[0]), *(leaf(*shape, seed=i) for i, shape in enumerate(shapes)))
    family = plan_family(joint)
    graph = family.frontier.graph
    emitter = Emitter(graph)
    flops = [node_flops(op.node) for op in graph.ops]
    early = [s for op in graph.ops if not op.late for s in op.writes if s not in graph.outputs]
    found = []
    for count in range(len(early) + 1):
        for saved in itertools.combinations(early, count):
            for forget in (False, True):
                schedule = emitter.emit(frozenset(saved) | (graph.outputs & graph.demanded), forget)
                num_bytes = sum(graph.sizes[s] for s in saved)
                seconds = sum(graph.costs[i] for i in (*schedule.forward, *schedule.backward))
                spent = sum(flops[i] for i in schedule.backward)
                found.append((simulate(graph, schedule).peak_bytes, seconds, spent, num_bytes))
    assert family.frontier.lowest.peak_bytes == min(peak for peak, *_ in found)
    for tenth in range(11):
        limit = family.limit(tenth / 10)
        plan = plan_of(family, tenth / 10)
        best = min(each[1:] for each in found if each[0] <= limit)
        schedule = family.frontier.within(limit).schedule
        assert sum(graph.costs[i] for i in (*schedule.forward, *schedule.backward)) == pytest.approx(best[0], rel=1e-12)
        assert sum(flops[i] for i in schedule.backward) == best[1], tenth
        assert plan.saved_bytes == best[2], tenth


class Tabled(nn.Module):
    """A trunk, alone or on a table of its own with as many rows as asked for."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = CountingTrunk(depth=4)
        self.table = nn.Embedding(num_rows, 16) if num_rows else None

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        return self.trunk(x if self.table is None else x + self.table(indices))


@pytest.fixture(scope="module")
def tabled() -> list[Family]:
    """Families of the trunk on tables of as many rows as there are tokens, and of 100,000."""
    x, indices = torch.randn(64, 128, 16), torch.arange(64 * 128).view(64, 128)
    return [plan_family(joint_of(Tabled(rows), x, indices)) for rows in (64 * 128, 100_000)]


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
def test_an_untied_embedding_does_not_change_what_a_fraction_means(tabled: list[Family], fraction: float) -> None:
    few, many = tabled
    assert many.fixed_bytes - few.fixed_bytes == (100_000 - 64 * 128) * 16 * 4  # alive throughout, in no fraction
    one, other = (plan_of(family, fraction) for family in tabled)
    assert (one.saved, one.recomputed, one.schedule) == (other.saved, other.recomputed, other.schedule)
    assert few.limit(fraction) == many.limit(fraction)


def test_where_an_embeddings_gradient_is_the_peak_no_plan_is_slower_than_need_be() -> None:
    """It is alive when all that was saved is dead: to save less lowers nothing."""
    family = plan_family(joint_of(Tabled(100_000), torch.randn(2, 8, 16), torch.arange(16).view(2, 8)))
    assert family.frontier.lowest.peak_bytes >= 100_000 * 16 * 4
    fastest = min(point.seconds for point in family.frontier.points)
    assert family.frontier.within(family.limit(0.0)).seconds == fastest
