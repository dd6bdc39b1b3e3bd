"""simplify: fewer nodes, the same bits. Nothing that only looks equal is merged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aottrain.compiler.graphs.simplification import simplify
from aottrain.compiler.joint.functional import functionalize
from aottrain.ir.graph import calls
from tests.compiler.programs import captured, joint_inputs, joint_of, leaf, run_joint, targets, traced
from tests.numerics.comparison import assert_same
from tests.numerics.programs import PROGRAMS


def forward_targets(function, *args):
    return targets(joint_of(function, *args).graph)


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_are_bitwise_the_same(program):
    make, data = PROGRAMS[program]
    torch.manual_seed(3)
    model, batch = make(), data()[0]
    before = functionalize(traced(model, *batch))
    after = simplify(before)
    assert len(calls(after.graph)) < len(calls(before.graph))
    inputs = joint_inputs(before, captured(model, *batch).primals)
    assert_same(run_joint(after, inputs), run_joint(before, inputs))


def test_equal_expressions_are_merged():
    assert forward_targets(lambda x: x.sin() * x.sin(), torch.ones(3)).count("aten.sin.default") == 1


@pytest.mark.parametrize("a, b", [(1, 1.0), (1, True), (0.0, -0.0), (2, 3)])
def test_expressions_with_other_constants_are_not(a, b):
    found = forward_targets(lambda x: torch.stack([x * a, x * b]), torch.ones(3))
    assert found.count("aten.mul.Tensor") == 2


def test_draws_are_never_merged():
    found = forward_targets(lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5), torch.ones(3))
    assert found.count("aottrain.philox_uniform.default") == 2


def test_no_float_algebra():
    x = torch.tensor([float("inf"), float("nan"), -0.0, 1.0])
    found = forward_targets(lambda x: (x * 0, x - x, x / x, x + 0.0, x * 1), x)
    assert len(found) == 5


def test_outputs_are_not_merged():
    assert forward_targets(lambda x: (x * 2, x * 2), torch.ones(3)).count("aten.mul.Tensor") == 2
    assert (
        forward_targets(lambda x: (x.clone().view(-1), x.clone().view(-1)), torch.ones(3)).count("aten.clone.default")
        == 2
    )
    split = forward_targets(lambda x: (x.clone().split(1)[0], x.clone()), torch.ones(3))
    assert split.count("aten.clone.default") == 2


def test_dead_code_goes():
    def function(x):
        x.sin().exp()
        return x * 2

    assert forward_targets(function, torch.ones(3)) == ["aten.mul.Tensor"]


def test_detached_values_need_no_node():
    found = forward_targets(lambda x: (x * 2).detach() * x.detach(), torch.ones(3))
    assert "aten.detach.default" not in found


def test_a_copy_into_fresh_memory_is_its_value():
    def function(x):
        out = torch.empty(3)
        out.copy_(x.sin())
        return out * 2

    assert forward_targets(function, torch.ones(3)) == ["aten.sin.default", "aten.mul.Tensor"]


def test_a_copy_into_another_layout_or_type_is_kept():
    def function(x):
        out = torch.empty(4, 3).t()
        out.copy_(x)
        wide = torch.empty(3, 4, dtype=torch.float64)
        wide.copy_(x)
        return out * 2, wide * 2

    found = forward_targets(function, torch.ones(3, 4))
    assert "aten.copy.default" in found and "aten._to_copy.default" in found
    joint = joint_of(function, torch.ones(3, 4))
    (out, wide), _ = run_joint(joint, joint_inputs(joint, [torch.ones(3, 4)]))
    assert out.stride() == (1, 3) and wide.dtype == torch.float64


def test_running_statistics_are_not_read_by_the_backward_of_training():
    joint = joint_of(lambda m, v, x: F.batch_norm(x, m, v, training=True), torch.zeros(3), torch.ones(3), leaf(4, 3))
    (node,) = [n for n in calls(joint.graph) if "native_batch_norm_backward" in str(n.target)]
    assert node.args[3] is None and node.args[4] is None


def test_the_graph_given_is_left_alone():
    joint = functionalize(traced(lambda x: x.sin() * x.sin(), leaf(3)))
    text = str(joint.graph)
    simplify(joint)
    assert str(joint.graph) == text


def test_a_concatenation_of_a_concatenation_is_one():
    """Along the same dimension, of one type, and if nothing else reads the inner one."""

    def parts(x, y):
        inner, read = torch.cat((x, y), -1), torch.cat((y, x), 1)
        other, wide = torch.cat((x, x), 0), torch.cat((y, y), 1)
        return (
            torch.cat((inner, x), 1),
            torch.cat((read, x), 1) + read.sum(),
            torch.cat((other, other), 1),
            torch.cat((x.double(), wide), 1),
        )

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    joint = joint_of(parts, x, y)
    counts = [len(node.args[0]) for node in calls(joint.graph) if node.target is torch.ops.aten.cat.default]
    assert sorted(counts) == [2, 2, 2, 2, 2, 2, 3]
    given = joint_inputs(joint, (x, y))
    for got, wanted in zip(joint(*given), parts(x, y), strict=True):
        assert torch.equal(got, wanted)


def test_what_takes_turns_along_the_last_dimension_is_a_stack():
    """If each has one element there, all are of one type, and the result's strides are a stack's."""

    def parts(x, y):
        last = torch.cat((x[..., None], y.sin()[..., None]), -1)
        first = torch.cat((x[None], y[None]))
        typed = torch.cat((x[..., None].double(), y[..., None]), -1)
        wider = torch.cat((x[..., None], y[..., None].expand(3, 4, 2)), -1)
        return last, first, typed, wider

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    joint = joint_of(parts, x, y)
    assert [node.target for node in calls(joint.graph)].count(torch.ops.aten.stack.default) == 1
    for got, wanted in zip(joint(*joint_inputs(joint, (x, y))), parts(x, y), strict=True):
        assert torch.equal(got, wanted) and got.stride() == wanted.stride()


def test_what_is_written_into_a_part_is_not_copied_first():
    """However the part lies in its memory."""

    def program(x, y):
        out = torch.zeros(4, 8)
        out[:, :3] = x
        out[1] = y
        out.diagonal()[:] = x[:, 0]
        return out.sin()

    x, y = leaf(4, 3), leaf(8, seed=1)
    joint = joint_of(program, x, y)
    assert "aten.copy.default" not in targets(joint.graph)
    out, *_ = sum(run_joint(joint, joint_inputs(joint, (x, y))), [])
    assert torch.equal(out, program(x, y))
