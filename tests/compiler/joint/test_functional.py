"""functionalize: no node mutates any more, and what was written to inputs becomes outputs; views stay views."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aottrain.compiler.joint.functional import functionalize
from aottrain.errors import UnsupportedError
from aottrain.ir.graph import OutputKind, calls, info
from aottrain.ir.verify import verify_functional, verify_joint
from tests.compiler.programs import joint_inputs, joint_of, leaf, run_joint, targets, traced
from tests.numerics.comparison import assert_call_like_eager


def slices(b, x):
    h = x * 2
    h[:, 1:].mul_(3)
    h.t()[0].copy_(x.detach()[:, 1])
    b[1:] += 1
    return h.sin() + b


def statistics(mean, var, x):
    return F.batch_norm(x, mean, var, training=True, momentum=0.1)


def leaky(x):
    return F.leaky_relu(x + 1, 0.1, inplace=True) * 2


PROGRAMS = {
    "slices": (slices, lambda: [torch.ones(3), leaf(3, 3)]),
    "statistics": (statistics, lambda: [torch.zeros(3), torch.ones(3), leaf(4, 3)]),
    "leaky": (leaky, lambda: [leaf(4)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_mutates_any_more(name):
    function, inputs = PROGRAMS[name]
    before = traced(function, *inputs())
    assert any(info(node).writes for node in calls(before.graph)), "the program mutates nothing: a test of nothing"
    after = functionalize(before)
    assert not any(info(node).writes for node in calls(after.graph))
    verify_joint(after)
    verify_functional(after)
    assert_call_like_eager(function, inputs())


def test_updates_are_outputs_in_the_order_of_the_inputs():
    joint = functionalize(traced(statistics, torch.zeros(3), torch.ones(3), leaf(4, 3)))
    updates = [value for value in joint.signature.outputs if value.kind is OutputKind.UPDATE]
    assert [value.target for value in updates] == [0, 1]
    assert [value.mutated for value in joint.signature.inputs[:3]] == [True, True, False]


def test_views_stay_views():
    joint = functionalize(traced(slices, torch.ones(3), leaf(3, 3)))
    assert not [t for t in targets(joint.graph) if "_copy" in t and "_to_copy" not in t]
    assert "aten.t.default" in targets(joint.graph)


def test_a_program_without_mutation_is_left_as_it_is():
    joint = traced(lambda x: x.sin(), leaf(3))
    assert functionalize(joint).graph is joint.graph


def test_provenance_is_handed_on():
    from aottrain.ir.graph import source_of

    joint = functionalize(traced(slices, torch.ones(3), leaf(3, 3)))
    lines = {source_of(node).split(":")[0] for node in calls(joint.graph)}
    assert "test_functional.py" in lines


def test_metadata_mutation_is_refused():
    def transposes(b, x):
        b.t_()
        return x * 2

    with pytest.raises(UnsupportedError, match="in place"):
        joint_of(transposes, torch.ones(2, 3), leaf(3))


def test_state_that_the_backward_writes_is_refused():
    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, count):
            ctx.count = count
            return x * 2

        @staticmethod
        def backward(ctx, g):
            ctx.count.add_(g.abs().max())
            return g * 2, None

    with pytest.raises(UnsupportedError):
        joint_of(lambda x, count: Counts.apply(x, count), leaf(3), torch.zeros(()))


def test_the_functional_program_gives_the_same_values():
    b, x = torch.ones(3), leaf(3, 3)
    joint = joint_of(slices, b, x)
    (out, update), (gradient,) = run_joint(joint, joint_inputs(joint, [b.clone(), x]))
    eager_b = b.clone()
    wanted = slices(eager_b, x)
    assert torch.equal(out, wanted) and torch.equal(update, eager_b) and gradient.shape == x.shape
