"""Plans of fake tensors, of task=plan and of runs: `python scripts/same_plans.py` has all recipes, here is a sample."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from aottrain.toolchain.native import find_compiler
from scripts import same_plans
from tests.sampling import WHOLE
from tests.skips import NO_COMPILER


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")
@pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER)
@pytest.mark.parametrize("case", [
    "gcn/shard/aten/0.4", pytest.param("gcn/none/cpp/0.4", marks=WHOLE), pytest.param("vae/shard/cpp/0.4", marks=WHOLE),
    pytest.param("lstm/shard/aten/1.0", marks=WHOLE),  # refused alike
])  # fmt: skip
def test_a_step_is_planned_alike_without_memory_by_task_plan_and_by_a_run(case):
    assert dict(same_plans.differing([case], 2, 300.0)) == {case: ""}


@pytest.mark.skipif(not dist.is_available(), reason="torch is without gloo")
@pytest.mark.parametrize("mode", ["ddp", "shard"])
def test_what_is_said_to_others_is_planned_for_without_memory_too(mode):
    case = f"gcn/{mode}/aten/0.4"
    fake, real = (same_plans.plan(kind, case, 2) for kind in (same_plans.FAKE, same_plans.PLANNED))
    assert "error" not in fake and same_plans.difference([("fake", fake), ("real", real)]) == ""


def test_what_differs_is_named_with_both_sides():
    of_first = {"saved": "a", "peak": "7", "kernel": "cpp"}
    assert same_plans.difference([("by a", of_first), ("by b", dict(of_first))]) == ""
    other = {**of_first, "peak": "8"}
    assert same_plans.difference([("by a", of_first), ("by b", other)]) == "by a | by b: peak: 7 | 8"
    assert "saved: a | None" in same_plans.difference([("by a", of_first), ("by b", {"error": "no"})])
