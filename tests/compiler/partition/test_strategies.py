"""What each strategy saves, on programs whose best plan is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.compiler.link.room import fusion_model
from aottrain.compiler.options import CompileOptions
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import find_demand, plan_partition
from aottrain.ir.graph import calls, info
from aottrain.ir.ops import OpKind
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.verify import verify_partition
from tests.compiler.partition.knapsack import knapsack_cut
from tests.compiler.programs import joint_inputs, joint_of, leaf, names, run_joint, run_parts, targets
from tests.numerics.comparison import assert_same


def three_sines(x):
    return x.sin().sin().sin()


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.c(F.gelu(self.b(F.dropout(F.gelu(self.a(x)), 0.1))))


def mlp():
    return joint_of(Mlp(), torch.randn(32, 16))


def test_three_sines_save_the_input_alone_and_recompute():
    x = leaf(64)
    plan = plan_partition(joint_of(three_sines, x), "min_cut")
    assert plan.saved == () and plan.saved_bytes == 0
    assert {name for name in plan.recomputed if name.startswith("sin")} == {"sin", "sin_1"}
    assert all(plan.reasons[name] for name in plan.recomputed)


def test_three_sines_under_save_all_save_the_cosines():
    plan = plan_partition(joint_of(three_sines, leaf(64)), "save_all")
    assert len(plan.saved) == 3 and all(name.startswith("cos") for name in plan.saved)
    assert plan.recomputed == () and plan.saved_bytes == 3 * 64 * 4


def test_min_cut_never_runs_a_matrix_product_twice():
    joint = mlp()
    parts = apply_partition(joint, plan_partition(joint, "min_cut"))
    whole = [t for t in targets(joint.graph) if "mm" in t]
    halves = [t for t in (*targets(parts.forward), *targets(parts.backward)) if "mm" in t]
    assert sorted(halves) == sorted(whole)


def norms(x, w, n):
    for _ in range(n):
        x = x + F.softmax(x, dim=-1) * w
        x = x + F.layer_norm(x, (64,)).tanh()
    return x


def test_min_cut_ends_chains_of_reductions_where_one_value_is_all_that_goes_on():
    """Computed again from the input, all of them would be alive before the backward begins."""
    plan = plan_partition(joint_of(lambda x, w: norms(x, w, 4), leaf(32, 64), leaf(64)), "min_cut")
    assert plan.saved_bytes == 3 * 32 * 64 * 4  # what goes from one pair of norms into the next
    assert {plan.reasons[name] for name in plan.saved} == {
        "ends a chain of reductions, which would be computed again at once and held"
    }


def test_a_short_chain_of_reductions_and_a_long_one_of_pointwise_work_are_computed_again():
    def pointwise(x):
        for _ in range(20):
            x = x.sin() * 1.5
        return x

    assert plan_partition(joint_of(pointwise, leaf(32, 64)), "min_cut").saved_bytes == 0
    assert plan_partition(joint_of(lambda x, w: norms(x, w, 1), leaf(32, 64), leaf(64)), "min_cut").saved_bytes == 0


def test_min_cut_runs_no_library_call_twice_where_all_else_is_kernels():
    joint = joint_of(lambda x: x.cumsum(0).exp().sin(), leaf(32, 64))
    assert plan_partition(joint, "min_cut").saved_bytes == 0
    plan = plan_partition(joint, "min_cut", fusion=fusion_model(joint, CompileOptions(kernel="cpp")))
    assert len(plan.saved) == 1 and "cumsum" not in plan.recomputed


def test_recompute_all_saves_nothing_and_runs_everything_again():
    joint = mlp()
    plan = plan_partition(joint, "recompute_all")
    assert plan.saved == () and plan.saved_bytes == 0
    assert any(info(node).kind is OpKind.COMPUTE for node in joint.graph.nodes if node.name in plan.recomputed)


def test_recompute_all_saves_state_that_the_step_updates():
    def function(b, x):
        h = (x + b).sin()
        b.mul_(2)
        return h

    joint = joint_of(function, torch.ones(8), leaf(8))
    plan = plan_partition(joint, "recompute_all")
    (saved,) = plan.saved
    assert saved == joint.placeholders[0].name and plan.saved_bytes == 32
    assert "write to" in plan.reasons[saved]


def test_save_all_recomputes_nothing_but_views():
    joint = mlp()
    plan = plan_partition(joint, "save_all")
    by_name = {node.name: node for node in joint.graph.nodes}
    kinds = {info(by_name[name]).kind for name in plan.recomputed}
    assert kinds <= {OpKind.VIEW, OpKind.STRUCTURE}
    parts = apply_partition(joint, plan)
    assert len(calls(parts.forward)) + len(calls(parts.backward)) <= len(calls(joint.graph)) + len(plan.recomputed)


def test_min_cut_saves_no_more_than_save_all():
    for joint in (mlp(), joint_of(three_sines, leaf(64))):
        assert plan_partition(joint, "min_cut").saved_bytes <= plan_partition(joint, "save_all").saved_bytes


@pytest.mark.parametrize("percent", range(0, 101, 10))
def test_a_knapsack_keeps_its_capacity(percent):
    joint = mlp()
    demand = find_demand(joint)
    capacity = percent * plan_partition(joint, "min_cut").saved_bytes // 100
    plan = knapsack_cut(demand, capacity)
    assert plan.saved_bytes <= capacity
    verify_partition(joint, apply_partition(joint, plan))


@pytest.mark.parametrize(
    "strategy, budget", [("save_all", None), ("min_cut", None), ("budget", 0.5), ("recompute_all", None)]
)
def test_plans_are_the_same_text_twice(strategy, budget):
    assert str(plan_partition(mlp(), strategy, budget)) == str(plan_partition(mlp(), strategy, budget))


def test_every_decision_has_a_reason():
    joint = mlp()
    for strategy, budget in (("save_all", None), ("min_cut", None), ("budget", 0.3), ("recompute_all", None)):
        plan = plan_partition(joint, strategy, budget)
        assert all(plan.reasons.get(name) for name in (*plan.saved, *plan.recomputed))
        assert set(plan.saved).isdisjoint(plan.recomputed)


def test_random_draws_are_never_saved_by_recompute_all_but_drawn_again():
    joint = joint_of(lambda x: F.dropout(x.sin(), 0.5), leaf(64))
    plan = plan_partition(joint, "recompute_all")
    assert plan.saved == ()
    assert "drawn again from the saved seed" in plan.reasons.values()


def test_an_output_that_the_backward_reads_is_saved_as_itself():
    joint = joint_of(torch.exp, leaf(8))
    for strategy in ("save_all", "min_cut", "recompute_all"):
        assert plan_partition(joint, strategy).saved == ("exp",)


def test_demand_is_what_the_backward_reads():
    joint = joint_of(lambda x, w: (x @ w).relu(), leaf(4, 4), leaf(4, 4, seed=1))
    demand = find_demand(joint)
    assert {"input0", "input1"} <= set(names(demand.region))
    assert "relu" in names(demand.demanded) and demand.copied == frozenset()


def test_a_plan_written_by_hand_can_be_applied():
    x = leaf(16)
    joint = joint_of(three_sines, x)
    inputs = joint_inputs(joint, [x])
    for saved in (("sin",), ("sin", "sin_1"), ("sin_1",), ()):
        parts = apply_partition(joint, PartitionPlan("by hand", saved))
        verify_partition(joint, parts)
        assert {name for name, primal in parts.residuals if primal is None} == set(saved)
        assert_same(run_parts(parts, inputs), run_joint(joint, inputs))


def test_several_views_of_one_storage_count_once():
    def function(x, w):
        q, k = (x @ w).chunk(2, 1)
        return (q * k).sum()

    joint = joint_of(function, leaf(8, 8), leaf(8, 8, seed=1))
    plan = plan_partition(joint, "min_cut")
    assert plan.saved == ("mm",) and plan.saved_bytes == 8 * 8 * 4


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_a_frozen_weight_is_cast_again_and_not_copied(capture):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].requires_grad_(False)
    step = aottrain.compile(model, capture=capture, kernel="aten")
    with torch.autocast("cpu", torch.bfloat16):
        step(torch.randn(8, 64)).sum().backward()
    assert [value.num_bytes for value in step.report.graphs[0].saved] == [8 * 64 * 2]  # of x, cast
