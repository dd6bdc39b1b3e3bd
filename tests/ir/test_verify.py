"""Every law has a check that fires: a violation is planted in a sound program, and must be caught."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.compiler.schedule.order import schedule
from aottrain.errors import VerificationError
from aottrain.ir.graph import OutputKind, calls, placeholders, results, set_value
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.schedule import KernelCall, Schedule
from aottrain.ir.verify import verify_functional, verify_joint, verify_partition, verify_schedule
from tests.compiler.programs import joint_of, leaf, traced

aten = torch.ops.aten


def function(b, x, w):
    h = F.dropout((x @ w).sin(), 0.5) + F.dropout(x, 0.3) + b
    b.add_(1)
    return h.tanh()


def joint():
    return joint_of(function, torch.ones(4), leaf(4, 4), leaf(4, 4, seed=1))


def plain():
    """No state, no draws: two gradients that are different expressions."""
    return joint_of(lambda x, w: (x @ w).sin().tanh(), leaf(4, 4), leaf(4, 4, seed=1))


def parts_of(joint, strategy="min_cut"):
    return apply_partition(joint, plan_partition(joint, strategy))


def node_of(graph, text):
    return next(node for node in graph.nodes if node.op == "call_function" and text in str(node.target))


def set_results(graph, values):
    graph.output_node().args = (list(values),)


def test_sound_programs_pass():
    for program in (joint(), plain()):
        verify_joint(program)
        verify_functional(program)
        for strategy in ("save_all", "min_cut", "recompute_all"):
            verify_partition(program, parts_of(program, strategy))


# -- law 1 --------------------------------------------------------------------------------------------------------


def test_an_output_that_depends_on_a_tangent():
    program = joint()
    values = results(program.graph)
    gradient = values[program.signature.output_indices(OutputKind.GRADIENT)[0]]
    set_results(program.graph, [gradient, *values[1:]])
    with pytest.raises(VerificationError, match="depends on a tangent"):
        verify_joint(program)


def test_a_state_update_that_depends_on_a_tangent():
    program = joint()
    values = results(program.graph)
    gradient = values[program.signature.output_indices(OutputKind.GRADIENT)[0]]
    values[program.signature.output_indices(OutputKind.UPDATE)[0]] = gradient
    set_results(program.graph, values)
    with pytest.raises(VerificationError, match="depends on a tangent"):
        verify_joint(program)


def test_a_missing_output():
    program = joint()
    set_results(program.graph, results(program.graph)[:-1])
    with pytest.raises(VerificationError, match="other outputs"):
        verify_joint(program)


def test_a_missing_input():
    program = joint()
    short = replace(program.signature, inputs=program.signature.inputs[:-1])
    with pytest.raises(VerificationError, match="other inputs"):
        verify_joint(replace(program, signature=short))


# -- law 2 --------------------------------------------------------------------------------------------------------


def test_a_mutating_node_left_in():
    with pytest.raises(VerificationError, match="mutates its argument"):
        verify_functional(traced(function, torch.ones(4), leaf(4, 4), leaf(4, 4, seed=1)))


def test_a_hidden_mutation_left_in():
    program = joint_of(lambda x, m, v: F.batch_norm(x, m, v, training=False), leaf(4, 3), torch.zeros(3), torch.ones(3))
    verify_functional(program)
    node = node_of(program.graph, "native_batch_norm.default")
    node.args = (*node.args[:5], True, *node.args[6:])
    with pytest.raises(VerificationError, match="though its schema denies it"):
        verify_functional(program)


def test_a_repeated_draw_number():
    program = joint()
    first, second = [node for node in calls(program.graph) if "philox" in str(node.target)]
    second.args = (second.args[0], first.args[1], *second.args[2:])
    with pytest.raises(VerificationError, match="repeats draw"):
        verify_functional(program)


@pytest.mark.parametrize("number", [-1, 2, 99])
def test_a_draw_number_out_of_range(number):
    program = joint()
    node = node_of(program.graph, "philox")
    node.args = (node.args[0], number, *node.args[2:])
    with pytest.raises(VerificationError, match="no draw number"):
        verify_functional(program)


def test_an_impure_op():
    program = plain()
    node = node_of(program.graph, "sin")
    with program.graph.inserting_before(node):
        program.graph.call_function(aten.rand_like.default, (node.args[0],))
    with pytest.raises(VerificationError, match="another value when it is run again"):
        verify_functional(program)


def test_a_mutated_input_without_its_update():
    program = joint()
    update = program.signature.output_indices(OutputKind.UPDATE)[0]
    outputs = tuple(v for i, v in enumerate(program.signature.outputs) if i != update)
    with pytest.raises(VerificationError, match="state updates"):
        verify_functional(replace(program, signature=replace(program.signature, outputs=outputs)))


def test_an_update_of_an_input_that_is_not_mutated():
    program = joint()
    inputs = tuple(replace(value, mutated=False) for value in program.signature.inputs)
    with pytest.raises(VerificationError, match="state updates"):
        verify_functional(replace(program, signature=replace(program.signature, inputs=inputs)))


# -- laws 3 and 4 -------------------------------------------------------------------------------------------------


def test_a_plan_that_recomputes_from_updated_state():
    def reads(b, x):
        h = (x + b).sin()
        b.mul_(2)
        return h

    program = joint_of(reads, torch.ones(4), leaf(4))
    parts = parts_of(program, "recompute_all")
    index = next(i for i, (name, _) in enumerate(parts.residuals) if name == "input0")
    # The backward is handed the buffer itself, as if the step did not update it.
    residuals = list(parts.residuals)
    residuals[index] = ("input0", 0)
    with pytest.raises(VerificationError, match="unsaved"):
        verify_partition(program, replace(parts, residuals=tuple(residuals)))
    # Or the forward returns the buffer in the place of the copy.
    forward = parts.forward
    values = results(forward)
    values[len(values) - len(residuals) + index] = placeholders(forward)[0]
    set_results(forward, values)
    with pytest.raises(VerificationError, match="lost"):
        verify_partition(program, parts)


@pytest.mark.parametrize("strategy", ["save_all", "min_cut"])
def test_a_residual_swapped_for_another(strategy):
    program = plain()
    parts = parts_of(program, strategy)
    values = results(parts.forward)
    values[-1], values[-2] = values[-2], values[-1]
    set_results(parts.forward, values)
    with pytest.raises(VerificationError, match="is something else"):
        verify_partition(program, parts)


def test_a_residual_that_is_missing():
    program = plain()
    parts = parts_of(program)
    set_results(parts.forward, results(parts.forward)[:-1])
    with pytest.raises(VerificationError, match="residuals"):
        verify_partition(program, parts)


def test_two_gradients_swapped():
    program = plain()
    parts = parts_of(program)
    set_results(parts.backward, reversed(results(parts.backward)))
    with pytest.raises(VerificationError, match="the backward computes something else"):
        verify_partition(program, parts)


def test_a_gradient_left_out():
    program = plain()
    parts = parts_of(program)
    set_results(parts.backward, [None, *results(parts.backward)[1:]])
    with pytest.raises(VerificationError, match="the backward computes something else"):
        verify_partition(program, parts)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_another_op_in_a_half(half):
    program = plain()
    parts = parts_of(program)
    node = node_of(getattr(parts, half), "sin.default" if half == "forward" else "mul.Tensor")
    node.target = aten.tan.default if half == "forward" else aten.div.Tensor
    with pytest.raises(VerificationError, match=f"the {half} computes something else"):
        verify_partition(program, parts)


@pytest.mark.parametrize("change", [1, 2.0, True, -0.0])
def test_another_constant_in_a_half(change):
    program = joint_of(lambda x: (x * 0.0 + x * 1.0).tanh() * 2, leaf(4))
    parts = parts_of(program, "recompute_all")
    node = next(n for n in calls(parts.backward) if n.args[1:] == (1.0,) or n.args[1:] == (2,))
    assert not (type(change) is type(node.args[1]) and change == node.args[1])
    node.args = (node.args[0], change)
    if repr(change) != "2" and (type(change), repr(change)) != (float, "1.0"):
        with pytest.raises(VerificationError, match="computes something else"):
            verify_partition(program, parts)


def test_another_draw_in_the_backward():
    program = joint()
    parts = parts_of(program, "recompute_all")
    node = node_of(parts.backward, "philox")
    node.args = (node.args[0], 1 - node.args[1], *node.args[2:])
    with pytest.raises(VerificationError, match="the backward computes something else"):
        verify_partition(program, parts)


def test_an_op_with_an_effect_in_the_backward():
    program = plain()
    parts = parts_of(program)
    tangent = placeholders(parts.backward)[-1]
    with parts.backward.inserting_before(parts.backward.output_node()):
        parts.backward.call_function(aten.mul_.Tensor, (tangent, tangent))
    with pytest.raises(VerificationError, match="has an effect"):
        verify_partition(program, parts)


def test_a_backward_that_reads_a_primal():
    program = plain()
    parts = parts_of(program)
    backward = parts.backward
    with backward.inserting_before(placeholders(backward)[-1]):
        backward.placeholder("smuggled")
    with pytest.raises(VerificationError, match="neither residual nor tangent"):
        verify_partition(program, parts)


def test_a_forward_with_another_input():
    program = plain()
    parts = parts_of(program)
    with parts.forward.inserting_before(placeholders(parts.forward)[0]):
        parts.forward.placeholder("extra")
    with pytest.raises(VerificationError, match="other inputs"):
        verify_partition(program, parts)


def test_the_order_of_independent_ops_is_free():
    """The check compares values, not texts: the same expressions in another order are the same program."""
    program = plain()
    parts = parts_of(program, "recompute_all")
    copied = fx.Graph()
    mapping = {}
    nodes = list(parts.backward.nodes)
    for node in nodes:
        if node.op == "placeholder":
            mapping[node] = copied.node_copy(node)

    def emit(node):
        if node not in mapping:
            for source in reversed(node.all_input_nodes):
                emit(source)
            mapping[node] = copied.node_copy(node, mapping.__getitem__)

    for node in reversed(results(parts.backward)):
        emit(node)
    copied.output([mapping[node] for node in results(parts.backward)])
    assert [n.name for n in copied.nodes] != [n.name for n in nodes]
    verify_partition(program, replace(parts, backward=copied))


def test_plans_are_values():
    plan = PartitionPlan("by hand", ("a",), ("b",), {"a": "why", "b": "because"}, 12)
    assert copy.deepcopy(plan) == plan and hash(plan.saved)
    assert "save a: why" in str(plan) and "recompute b: because" in str(plan) and "12 B" in str(plan)
    with pytest.raises(AttributeError):
        plan.saved = ()


def scheduled():
    graph = parts_of(plain()).forward
    return graph, schedule(graph)


def test_a_sound_schedule_passes():
    verify_schedule(*scheduled())


def test_a_kernel_that_writes_nothing():
    graph, planned = scheduled()
    idle = KernelCall(replace(planned.kernels[0].kernel, parameters=(), stores=()), ())
    with pytest.raises(VerificationError, match="writes nothing"):
        verify_schedule(graph, replace(planned, calls=(*planned.calls, idle)))


def test_a_kernel_that_comes_before_what_it_reads():
    graph, planned = scheduled()
    with pytest.raises(VerificationError, match="reads mm, which nothing has made yet"):
        verify_schedule(graph, replace(planned, calls=planned.calls[::-1]))


def test_a_view_that_begins_elsewhere():
    """As where a part of a larger value takes the place of what the view was traced of."""
    graph = fx.Graph()
    whole = graph.placeholder("whole")
    part = graph.call_function(aten.slice.Tensor, (whole, 0, 1, 3))
    turned = graph.call_function(aten.t.default, (part,))
    graph.output((turned,))
    memory = torch.zeros(4, 3)
    for node, value in ((whole, memory), (part, memory[1:3]), (turned, memory[1:3].t())):
        set_value(node, value)
    verify_schedule(graph, Schedule((part, turned)))
    set_value(turned, torch.zeros(2, 3).t())
    with pytest.raises(VerificationError, match="t does not begin where"):
        verify_schedule(graph, Schedule((part, turned)))


def test_a_value_that_two_kernels_make():
    graph, planned = scheduled()
    with pytest.raises(VerificationError, match="which is there"):
        verify_schedule(graph, replace(planned, calls=(*planned.calls, planned.kernels[0])))


def test_a_result_that_no_kernel_makes():
    graph, planned = scheduled()
    with pytest.raises(VerificationError, match="nothing makes the result"):
        verify_schedule(graph, replace(planned, calls=planned.calls[:1]))
