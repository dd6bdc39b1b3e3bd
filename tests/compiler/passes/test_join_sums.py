"""Sums that autograd makes term by term: what is joined, what is left, and that the values stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.compiler.pipeline import join_sums
from aottrain.ir.analysis.reach import descendants
from aottrain.ir.graph import calls, info
from tests.compiler.programs import joint_of, leaf
from tests.numerics.tolerance import assert_close

aten = torch.ops.aten


def steps(x):
    """A recurrence, a step of the second dimension at a time."""
    state = x.new_zeros(x.shape[0], x.shape[2])
    for t in range(x.shape[1]):
        state = torch.tanh(state * 0.5 + x[:, t])
    return state


def some(x):
    """Some steps, and the first ones whole as well."""
    return x[:, 1] * x[:, 4] + x[:, 6].exp() + x[:, :2].sum(1)


def slices(x):
    a, b, c = x[:2], x[2:5], x[5:]
    return a.sin().sum() + (b * b.cos()).sum() + c.exp().sum() + (x * x).sum()


def overlapping(x):
    return (x[:4].sin() * x[1:5] * x[2:6]).sum() + x[3:7].cos().sum()


def twice(x):
    y = x[0].sin() + x[1].cos() + x[2]
    return y + (x + x).sum(0)


def turns(x):
    """Even and odd elements, and of another result every third but one."""
    return (x[:, ::2].sin() * x[:, 1::2].exp()).sum() + (x[:, ::3] * x[:, 1::3]).sum()


def halves(x):
    return x[:, :6].sin() * x[:, 6:].exp()


def turned(x):
    """Each of two elements is read twice, as by a rotation."""
    real, imaginary = x[..., 0], x[..., 1]
    return (real * 3 - imaginary * 5).sin() + (real * 7 + imaginary * 2).exp()


def turned_and_whole(x):
    """What is added to all elements comes in between."""
    return turned(x) + x.sum(-1) + (x[..., 0] * x[..., 1]).cos()


def weights(x, w):
    state = x.new_zeros(4, 24)
    for t in range(5):
        state = torch.tanh(x[t] + state @ w)
    return state


def linear_weights(x, w):
    state = x.new_zeros(4, 24)
    for t in range(5):
        state = torch.tanh(x[t] + torch.nn.functional.linear(state, w))
    return state


def many_rows(x, w):
    return sum((x[t].repeat(20, 1).sin() @ w).square().mean() for t in range(4))


def same_slice_twice(x):
    """Two equal terms are one value, which one addition reads twice; the other half comes before."""
    rest, first, again = x[4:], x[:4], x[:4]
    return (rest * 5).sum() + (first * 3).sum() + (again * 3).sum()


def same_step_twice(x):
    return (x[0] * 5 + x[1] * 3 + x[1] * 3).sum()


def same_rows_twice(x, w):
    """A weight that the same rows meet twice, with the same gradient."""
    steps = [x[0], x[1], x[2], x[3], x[3]]
    return sum((step @ w).square().sum() for step in steps)


PROGRAMS = {
    steps: (3, 8, 16), some: (3, 8, 16), slices: (7, 9), overlapping: (8, 6), twice: (3, 5),
    turns: (5, 12), halves: (5, 12), turned: (5, 7, 2), turned_and_whole: (5, 7, 2),
    weights: (5, 4, 24), linear_weights: (5, 4, 24), many_rows: (5, 4, 24),
    same_slice_twice: (8, 3), same_step_twice: (2, 3), same_rows_twice: (4, 2, 24),
}  # fmt: skip


def inputs(program):
    torch.manual_seed(0)
    second = [(torch.randn(24, 24) / 8).requires_grad_()] if "w" in program.__code__.co_varnames[:2] else []
    return [torch.randn(PROGRAMS[program], requires_grad=True), *second]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_eagers(program):
    given = inputs(program)
    result = aottrain.compile(program, kernel="cpp", capture="trace")(*given)
    got = torch.autograd.grad(result.sum(), given)
    for mine, eager in zip(got, torch.autograd.grad(program(*given).sum(), given), strict=True):
        assert_close(mine, eager)


def names(joint) -> list[str]:
    return [info(node).name for node in calls(joint.graph)]


def test_a_sum_that_is_doubled_is_not_taken_apart():
    """Forty doublings have as many additions, and a million million terms."""

    def doubled(x):
        for _ in range(40):
            x = x + x
        return x.sum()

    x = leaf(8)
    joint = joint_of(doubled, x)
    assert join_sums(joint) is joint
    aottrain.compile(doubled, kernel="cpp", capture="trace")(x).backward()
    assert torch.equal(x.grad, torch.full((8,), 2.0**40))


def test_steps_are_put_side_by_side():
    joint = join_sums(joint_of(steps, leaf(3, 8, 16)))
    assert names(joint).count("aten.cat.default") == 1
    assert "aten.select_backward.default" not in names(joint)


def test_gaps_are_zeros_and_what_overlaps_is_added():
    joint = join_sums(joint_of(some, leaf(3, 8, 16)))
    (node,) = [node for node in calls(joint.graph) if node.target is aten.cat.default]
    assert len(node.args[0]) == 6  # three parts, the second step overlaps the first slice; three gaps
    assert names(joint).count("aten.new_zeros.default") == 3


def test_few_terms_and_overlapping_ones_are_left_alone():
    for program in (overlapping, lambda x: x[0].sin() + x[1].cos()):
        joint = joint_of(program, leaf(8, 6))
        assert "aten.cat.default" not in names(join_sums(joint))


@pytest.mark.parametrize("program", [weights, linear_weights], ids=lambda program: program.__name__)
def test_products_of_few_rows_are_one(program):
    before = names(joint_of(program, *inputs(program))).count("aten.mm.default")
    after = names(join_sums(joint_of(program, *inputs(program)))).count("aten.mm.default")
    assert before - after == 4  # of five steps


def two_results(x, rows):
    sums = [F.linear(x[i : i + 1], x).sin().sum() for i in range(3)]
    return rows[:1] @ x + rows[1:] @ x + rows[:1] @ x.cos(), torch.stack(sums).sum()


@pytest.mark.parametrize("chosen", [(True, False), (False, True), (True, True)], ids=["first", "second", "both"])
@pytest.mark.parametrize("kernel", ["cpp", "aten"])
def test_products_of_several_results_have_eagers_gradient_of_each(chosen, kernel):
    """Of `rows @ x` the gradient of x has the tangent on the right, of `x[i] @ x.T` on the left: in one product all of
    it would be dropped with a tangent that does not come."""

    x, rows = leaf(4, 6), torch.randn(2, 4)
    found = []
    for call in (two_results, aottrain.compile(two_results, kernel=kernel, capture="trace", on_unsupported="error")):
        outputs = [value for value, flag in zip(call(x, rows), chosen, strict=True) if flag]
        found += torch.autograd.grad(outputs, [x], [torch.full_like(value, 1.5) for value in outputs])
    assert_close(found[1], found[0])


def test_what_lies_side_by_side_hangs_on_tangents_or_nothing_of_it_does():
    joint = join_sums(joint_of(two_results, leaf(4, 6), torch.randn(2, 4)))
    late = descendants(joint.tangents)
    joined = [node for node in calls(joint.graph) if node.target is aten.cat.default]
    assert joined
    for node in joined:
        assert len({source in late for source in node.all_input_nodes}) == 1, node.format_node()


def test_products_of_many_rows_are_added():
    """Copying their operands would take longer than what it saves."""
    joint = joint_of(many_rows, *inputs(many_rows))
    assert names(join_sums(joint)).count("aten.mm.default") == names(joint).count("aten.mm.default")


def test_a_program_without_such_sums_is_as_it_was():
    joint = joint_of(lambda x: x.sin() + x.cos() + x, leaf(8))
    assert join_sums(joint) is joint


def test_what_takes_turns_is_stacked_and_halves_are_put_side_by_side():
    """Two parts that are all of a dimension; not two of three."""
    joined = names(join_sums(joint_of(turns, leaf(5, 12))))
    assert joined.count("aten.stack.default") == 1 and joined.count("aten.slice_backward.default") == 2
    joined = names(join_sums(joint_of(halves, leaf(5, 12))))
    assert joined.count("aten.cat.default") == 1 and "aten.slice_backward.default" not in joined
    joint = joint_of(lambda x: x[:, :5].sin() * x[:, 5:10].exp(), leaf(5, 12))
    assert join_sums(joint) is joint


def test_what_is_added_to_one_part_is_added_before_parts_are_joined():
    joined = names(join_sums(joint_of(turned, leaf(5, 7, 2))))
    assert joined.count("aten.stack.default") == 1 and "aten.select_backward.default" not in joined


def test_elements_of_the_last_dimension_are_stacked():
    """Of real and imaginary parts, say: a kernel computes each once."""

    def turned(x):
        pairs = x.view(3, 8, 2)
        real, imaginary = pairs[..., 0], pairs[..., 1]
        return real.cos() * imaginary.sin()

    x = leaf(3, 16)
    joined = names(join_sums(joint_of(turned, x)))
    assert joined.count("aten.stack.default") == 1 and "aten.select_backward.default" not in joined
    got = torch.autograd.grad(aottrain.compile(turned, kernel="cpp", capture="trace")(x).sum(), x)
    assert_close(got[0], torch.autograd.grad(turned(x).sum(), x)[0])
