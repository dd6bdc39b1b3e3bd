"""After each stage that could break a law, the law is asked: what a broken stage gives goes no further."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import aottrain
import aottrain.compiler.pipeline as pipeline
from aottrain.compiler.optimizers import formulas
from aottrain.compiler.schedule import kernels, memory
from aottrain.compiler.schedule.order import schedule
from aottrain.errors import VerificationError
from aottrain.ir.graph import JointGraph, PartitionedGraph, placeholders, results
from tests.compiler.programs import joint_of, leaf, replace_pass

aten = torch.ops.aten


def program(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).sin().exp() * x).sum()


def compile_it(**options: Any) -> None:
    call = aottrain.compile(program, capture="trace", on_unsupported="error", **options)
    call(leaf(8, 8), leaf(8, 8, seed=2))


def leaf_inputs() -> tuple[Tensor, Tensor]:
    return leaf(8, 8), leaf(8, 8, seed=2)


def with_a_write(joint: JointGraph, *_: Any) -> JointGraph:
    """Law 2: a node writes to what it is given."""
    next(node for node in joint.graph.nodes if node.target is aten.sin.default).target = aten.sin_.default
    return joint


def with_a_late_output(joint: JointGraph, *_: Any) -> JointGraph:
    """Law 1: the output waits for a tangent."""
    values = results(joint.graph)
    late = placeholders(joint.graph)[-1]
    with joint.graph.inserting_after(late):
        first = values[0]
        assert first is not None
        node = joint.graph.call_function(aten.add.Tensor, (late, late))
        node.meta.update(late.meta)
    joint.graph.output_node().args = ([node, *values[1:]],)
    return joint


@pytest.mark.parametrize("broken", [with_a_write, with_a_late_output])
@pytest.mark.parametrize("stage", ["functionalize", "simplify"])
def test_a_broken_program_stops_before_the_partition(monkeypatch, stage, broken):
    original = getattr(pipeline, stage)
    if stage == "simplify":
        replace_pass(monkeypatch, stage, lambda joint: broken(original(joint)))
    else:
        monkeypatch.setattr(pipeline, stage, lambda *given: broken(original(*given)))
    monkeypatch.setattr(pipeline, "plan_partition", lambda *given, **named: pytest.fail("nobody asked"))
    with pytest.raises(VerificationError):
        compile_it(kernel="aten")


@pytest.mark.parametrize("stage", [each.name for each in pipeline.PASSES if each.kernels != ("triton",)])
def test_a_broken_rewrite_stops_before_the_partition(monkeypatch, stage):
    replace_pass(monkeypatch, stage, with_a_write)
    monkeypatch.setattr(pipeline, "plan_partition", lambda *given, **named: pytest.fail("nobody asked"))
    with pytest.raises(VerificationError):
        compile_it(kernel="cpp", loss_head="whole")


def test_a_broken_partition_stops_before_its_kernels(monkeypatch):
    original = pipeline.apply_partition

    def apply(*given: Any) -> PartitionedGraph:
        parts = original(*given)
        next(node for node in parts.forward.nodes if node.target is aten.exp.default).target = aten.cos.default
        return parts

    monkeypatch.setattr(pipeline, "apply_partition", apply)
    monkeypatch.setattr(pipeline, "plan_in_flight", lambda *given: pytest.fail("nobody asked"))
    with pytest.raises(VerificationError, match="computes something else"):
        compile_it(kernel="aten")


def test_a_view_that_lies_elsewhere_stops_before_its_kernels(monkeypatch):
    def move(joint: JointGraph) -> JointGraph:
        for node in joint.graph.nodes:
            if node.target is aten.t.default:
                node.target, node.args = aten.slice.Tensor, (node.args[0], 0, 1, 8)
        return joint

    replace_pass(monkeypatch, "join_sums", move)
    monkeypatch.setattr(pipeline, "plan_partition", lambda *given, **named: pytest.fail("nobody asked"))
    with pytest.raises(VerificationError, match="is not where"):
        compile_it(kernel="cpp")


def test_offsets_that_overlap_are_stopped(monkeypatch):
    joint = joint_of(program, *leaf_inputs())
    monkeypatch.setattr(memory, "first_fit", lambda sizes, born, last: dict.fromkeys(sizes, 0))
    with pytest.raises(VerificationError, match="overlap in the arena"):
        memory.plan_memory(joint.graph, schedule(joint.graph), len(results(joint.graph)))


def test_a_kernel_that_reaches_outside_is_stopped(monkeypatch):
    original = kernels._parameter
    monkeypatch.setattr(kernels, "_parameter", lambda node, span, written: original(node, span - 1, written))
    with pytest.raises(VerificationError, match="elements of parameter"):
        schedule(joint_of(lambda x: x.sin(), leaf(8, 8)).graph)


def test_an_optimizer_whose_blocks_could_meet_is_stopped(monkeypatch):
    original = formulas._update

    def update(*given: Any) -> Any:
        stage = original(*given)
        stores = []
        for store in stage.kernel.stores:
            twice = store.address.offset + store.address.offset
            stores.append(replace(store, address=replace(store.address, offset=twice)))
        return replace(stage, kernel=replace(stage.kernel, stores=tuple(stores)))

    monkeypatch.setattr(formulas, "_update", update)
    segments = (formulas.Segment(torch.float32, ("exp_avg",)),)
    with pytest.raises(VerificationError):
        formulas.optimizer_step.__wrapped__(formulas.LION, segments)


def test_the_programs_here_are_sound():
    compile_it(kernel="aten")
    assert any(node.target is aten.t.default for node in joint_of(program, *leaf_inputs()).graph.nodes)
    assert isinstance(joint_of(program, *leaf_inputs()).graph, fx.Graph)
