"""A policy of the user's own: what it is told, what its answers do, and what wrong ones are met with."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.compiler.partition.budget.strategy import WRITTEN_INPUT
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.errors import ConfigError
from tests.compiler.programs import joint_of, leaf
from tests.numerics.comparison import compiled
from tests.zoo import Mlp


def mlp():
    return joint_of(Mlp(outputs=4), torch.randn(32, 16))


def test_it_is_told_of_each_value_in_plain_data():
    seen = []
    plan_partition(mlp(), lambda value: seen.append(value) or "free")
    product = next(value for value in seen if value.op == "aten.addmm.default")
    assert isinstance(product, aottrain.ForwardValue) and dataclasses.is_dataclass(product)
    assert (product.module, product.shape, product.dtype) == ("up", (32, 64), "float32")
    assert product.num_bytes == 32 * 64 * 4 and product.flops == 2 * 32 * 16 * 64
    assert product.source.startswith("zoo.py:")
    with pytest.raises(dataclasses.FrozenInstanceError):
        product.flops = 0


def test_free_is_min_cut():
    free, cut = plan_partition(mlp(), lambda value: "free"), plan_partition(mlp(), "min_cut")
    assert (free.saved, free.recomputed, free.strategy) == (cut.saved, cut.recomputed, "policy")


def test_recompute_is_recompute_all_and_save_computes_nothing_again():
    def forget(value):
        return "recompute"

    nothing = plan_partition(mlp(), forget)
    assert nothing.saved == plan_partition(mlp(), "recompute_all").saved == ()
    assert "recomputed by forget" in nothing.reasons.values()
    everything = plan_partition(mlp(), lambda value: "save")
    assert not any("addmm" in name or "gelu" in name for name in everything.recomputed)
    assert "saved by <lambda>" in everything.reasons.values()


def test_an_answer_holds_for_the_value_that_it_is_about():
    def policy(value):
        if value.op == "aten.addmm.default":
            return "recompute" if value.module == "up" else "free"
        return "save" if value.op == "aten.gelu.default" else "free"

    plan = plan_partition(mlp(), policy)
    assert "addmm" in plan.recomputed and plan.reasons["addmm"] == "recomputed by policy"
    chain = joint_of(lambda x: x.sin().exp().cos(), leaf(8))
    plan = plan_partition(chain, lambda value: "save" if value.name == "exp" else "free")
    assert plan.saved == ("exp",) and plan.reasons["exp"] == "saved by <lambda>"


def test_what_must_be_saved_is_saved_against_it_with_the_reason():
    def forget(value):
        return "recompute"

    def function(b, x):
        h = (x + b).sin()
        b.mul_(2)
        return h

    plan = plan_partition(joint_of(function, torch.ones(8), leaf(8)), forget)
    assert list(plan.reasons.values())[0] == WRITTEN_INPUT
    step = compiled(lambda x: F.dropout(x.sin(), 0.5).exp() * 2, forget, rng="eager")
    step(leaf(64)).sum().backward()
    reasons = [value.reason for value in step.report.graphs[0].saved]
    assert "must: not repeatable, though recomputed by forget" in reasons
    plan = plan_partition(joint_of(torch.exp, leaf(8)), forget)
    assert plan.reasons["exp"] == "output: alive anyway, though recomputed by forget"


@pytest.mark.parametrize("frontend", ("trace", "dynamo"))
def test_compile_takes_a_callable(frontend):
    torch._dynamo.reset()

    class Forget:
        def __call__(self, value):
            return "recompute"

    step = compiled(Mlp(outputs=4), capture=frontend, plan=Forget())
    step(torch.randn(32, 16)).sum().backward()
    (graph,) = step.report.graphs
    assert graph.saved_bytes == 0 and graph.partition == "policy Forget"


@pytest.mark.parametrize("answer", ["keep", None, True, 3])
def test_another_answer_is_named(answer):
    with pytest.raises(ConfigError, match=r"asked about .*aten\..*answered .*allowed: save, recompute, free"):
        plan_partition(mlp(), lambda value: answer)


def test_an_error_inside_it_says_where():
    def broken(value):
        return value.nothing

    with pytest.raises(ConfigError, match=r"policy broken, asked about \w+ \(aten.*raised AttributeError"):
        plan_partition(mlp(), broken)


@pytest.mark.parametrize(
    "options",
    [
        {"partition": lambda value: "free", "budget": 0.4},
        {"partition": "min_cut", "modules": ["blocks.*"]},
        {"partition": "checkpoint", "modules": "blocks.*"},
        {"partition": "checkpoint", "modules": [3]},
        {"partition": "checkpoint", "budget": 0.4},
        {"workspaces": 1},
    ],
)
def test_options_that_contradict_each_other(options):
    with pytest.raises(ConfigError, match="allowed"):
        aottrain.compile(Mlp(outputs=4), **options)
