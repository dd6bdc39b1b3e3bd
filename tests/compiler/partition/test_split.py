"""apply_partition, law 4: the forward and then the backward are bitwise the joint graph run whole, for every plan."""

from __future__ import annotations

import pytest
import torch

from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.errors import VerificationError
from aottrain.ir.graph import InputKind, calls, placeholders
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.verify import verify_partition
from tests.compiler.programs import captured, joint_inputs, joint_of, leaf, run_joint, run_parts, targets
from tests.numerics.comparison import PLANS, assert_same
from tests.numerics.programs import PROGRAMS


def planned(joint, plan):
    return plan_partition(joint, "budget", plan) if isinstance(plan, int | float) else plan_partition(joint, plan)


@pytest.mark.parametrize("program", PROGRAMS)
def test_split_equals_whole(program):
    make, data = PROGRAMS[program]
    torch.manual_seed(3)
    model, batch = make(), data()[0]
    joint = joint_of(model, *batch)
    inputs = joint_inputs(joint, [v.clone() for v in captured(model, *batch).primals])
    whole = run_joint(joint, inputs)
    for plan in PLANS:
        parts = apply_partition(joint, planned(joint, plan))
        verify_partition(joint, parts)
        assert_same(run_parts(parts, inputs), whole, f"plan {plan}")


@pytest.mark.parametrize("plan", PLANS)
def test_no_half_writes_its_inputs(plan):
    make, data = PROGRAMS["mutated input"]
    torch.manual_seed(3)
    model, batch = make(), data()[0]
    joint = joint_of(model, *batch)
    inputs = joint_inputs(joint, captured(model, *batch).primals)
    before = [v.clone() for v in inputs]
    run_parts(apply_partition(joint, planned(joint, plan)), inputs)
    assert_same(inputs, before)


def function(b, x, w):
    h = (x @ w + b).sin()
    b.add_(1)
    return h * 2


def example():
    return joint_of(function, torch.ones(4), leaf(4, 4), leaf(4, 4, seed=1))


def test_a_residual_of_updated_state_is_a_copy():
    joint = example()
    parts = apply_partition(joint, plan_partition(joint, "recompute_all"))
    inputs = joint_inputs(joint, [torch.ones(4), leaf(4, 4), leaf(4, 4, seed=1)])
    from aottrain.runtime.executor import aten_runner

    values = aten_runner(parts.forward)(list(inputs[:4]))
    residuals = dict(zip([name for name, _ in parts.residuals], values[-len(parts.residuals) :], strict=True))
    assert residuals["input0"].data_ptr() != inputs[0].data_ptr()
    assert residuals["input1"] is inputs[1]


def test_a_plan_that_reads_updated_state_unsaved_is_refused():
    with pytest.raises(VerificationError, match="input0, which may be written before it"):
        apply_partition(example(), PartitionPlan("by hand", ()))


def test_a_plan_with_a_name_that_does_not_exist_is_refused():
    with pytest.raises(VerificationError, match="nonsense"):
        apply_partition(example(), PartitionPlan("by hand", ("nonsense",)))


def test_saved_values_that_nothing_needs_are_not_handed_over():
    joint = joint_of(lambda x: x.sin().exp(), leaf(4))
    parts = apply_partition(joint, PartitionPlan("by hand", ("sin", "exp")))
    assert [name for name, _ in parts.residuals if name == "sin"] == []


def test_a_recomputed_value_is_computed_just_before_its_first_use():
    joint = joint_of(lambda x: x.sin().sin().sin().sin(), leaf(4))
    parts = apply_partition(joint, PartitionPlan("by hand", ("sin", "sin_1", "sin_2")))
    order = targets(parts.backward)
    # The chain of gradients runs backwards: cosine, product, cosine, product ... and not all cosines first.
    assert order == ["aten.cos.default", "aten.mul.Tensor"] * 4


def test_without_gradients_there_is_no_backward():
    joint = joint_of(lambda x: x.sin(), torch.ones(4))
    parts = apply_partition(joint, plan_partition(joint, "min_cut"))
    assert parts.backward is None and parts.residuals == ()
    assert placeholders(parts.forward) and len(calls(parts.forward)) == 1


def test_the_forward_takes_primals_and_rng_and_the_backward_residuals_and_tangents():
    joint = example()
    parts = apply_partition(joint, plan_partition(joint, "min_cut"))
    num_tangents = len(joint.signature.input_indices(InputKind.TANGENT))
    assert len(placeholders(parts.forward)) == len(joint.signature.inputs) - num_tangents
    assert len(placeholders(parts.backward)) == len(parts.residuals) + num_tangents
