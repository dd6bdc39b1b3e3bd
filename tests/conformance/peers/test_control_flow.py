"""Control flow on values by torch's own operators, and what must raise at run time."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop

from tests.conformance import asserting
from tests.conformance.harness import PEERS, case, cases_of, check, fill, grads, leaf, normal, raises


@case
def cond_by_a_tensor(comp):
    g = comp(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (x,)))
    return g(normal(3).abs()), g(-normal(3).abs())


@case
def cond_with_gradients(comp):
    def f(x, w):
        return torch.cond(x.sum() > 0, lambda x, w: (x * w).sin(), lambda x, w: x - w * 2, (x, w)) * w

    found = []
    for sign in (1, -1):
        x, w = leaf(3), leaf(3, seed=1)
        comp(f)(sign * x.abs(), w).sum().backward()
        found.append(grads(x, w))
    return found


@case
def cond_over_a_closed_over_parameter(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)

        def forward(self, x):
            return torch.cond(x.mean() > 0, lambda x: self.a(x).relu(), lambda x: self.b(x), (x,)).sum()

    m = fill(M())
    comp(m)(normal(2, 3).abs()).backward()
    return [p.grad is None or float(p.grad.abs().sum()) for p in m.parameters()]


@case
def cond_in_a_cond_without_gradients(comp):
    def inner(x):
        return torch.cond(x[0] > 0, lambda x: x * 2, lambda x: x * 3, (x,))

    g = comp(lambda x: torch.cond(x.sum() > 0, inner, lambda x: -x, (x,)))
    return g(torch.tensor([1.0, 2.0])), g(torch.tensor([-1.0, 2.0])), g(torch.tensor([-1.0, -2.0]))


@case
def cond_of_a_python_boolean(comp):
    return comp(lambda x: torch.cond(x.shape[0] > 2, lambda x: x.sin(), lambda x: x.cos(), (x,)))(normal(3))


@case
def cond_leaves_eager_as_it_was(comp):
    raises(lambda: comp(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))(normal(3)))
    return torch.cond(torch.tensor(True), torch.sin, torch.cos, (normal(3),))


@case
def while_loop_counts(comp):
    def f(x):
        return while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))

    return comp(f)(normal(3))


@case
def assertion_holds_then_fails(comp):
    def f(x):
        torch._assert_async((x > 0).all())
        return x * 2

    g = comp(f)
    return g(normal(3).abs()), raises(lambda: g(-normal(3).abs()))


@case
def assertion_with_a_message(comp):
    def f(x):
        torch._assert_async((x > 0).all(), "not positive")
        return x * 2

    g = comp(f)
    return g(normal(3).abs()), raises(lambda: g(-normal(3).abs()))


@case
def python_assertion_on_a_tensor(comp):
    g = comp(asserting.program)
    return g(normal(3).abs()), raises(lambda: g(-normal(3).abs()))


@case
def assertion_by_torch(comp):
    def f(x):
        torch._assert((x > 0).all(), "not positive")
        return x * 2

    g = comp(f)
    return g(normal(3).abs()), raises(lambda: g(-normal(3).abs()))


@case
def assertion_inside_a_checkpoint(comp):
    def block(x):
        torch._assert_async((x > 0).all())
        return x.sin()

    def f(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum()

    x = normal(3).abs().requires_grad_()
    comp(f)(x).backward()
    return grads(x), raises(lambda: comp(f)(-x.detach()))


def _spoiled(op, good, bad):
    def program(comp):
        g = comp(op)
        return raises(lambda: g(good)), raises(lambda: g(bad)), raises(lambda: g(good.clone().requires_grad_()))

    return program


@case
def cholesky_of_an_indefinite_matrix(comp):
    return _spoiled(lambda x: torch.linalg.cholesky(x) * 2, torch.eye(3), -torch.eye(3))(comp)


@case
def inverse_of_a_singular_matrix(comp):
    return _spoiled(lambda x: torch.linalg.inv(x) * 2, torch.eye(3), torch.zeros(3, 3))(comp)


@case
def solution_by_a_singular_matrix(comp):
    return _spoiled(lambda x: torch.linalg.solve(x, torch.ones(3)), torch.eye(3), torch.zeros(3, 3))(comp)


@case
def factors_of_a_singular_matrix(comp):
    return _spoiled(lambda x: torch.linalg.lu_factor(x)[0] + 1, torch.eye(3), torch.zeros(3, 3))(comp)


@case
def decompositions_with_a_status(comp):
    def f(x):
        return torch.linalg.inv_ex(x), torch.linalg.cholesky_ex(x), torch.linalg.lu_factor_ex(x)[2]

    return comp(f)(torch.zeros(3, 3)), comp(f)(2 * torch.eye(3))


@case
def probabilities_out_of_range(comp):
    return _spoiled(lambda p: torch.bernoulli(p) * 0 + p, torch.full((3,), 0.5), torch.full((3,), 2.0))(comp)


@case
def cross_entropy_of_a_probability_out_of_range(comp):
    def f(p):
        return torch.nn.functional.binary_cross_entropy(p, torch.ones(3))

    return _spoiled(f, torch.full((3,), 0.5), torch.full((3,), 2.0))(comp)


@case
def multinomial_of_negative_weights(comp):
    return _spoiled(lambda p: torch.multinomial(p, 2) * 0 + 1, torch.ones(3), -torch.ones(3))(comp)


@case
def an_effect_whose_value_nobody_reads(comp):
    def f(x, y):
        torch.linalg.cholesky(y)
        return x * 2

    g = comp(f)
    x = normal(3)
    return raises(lambda: g(x, torch.eye(3))), raises(lambda: g(x, -torch.eye(3)))


@case
def target_out_of_range(comp):
    def f(x, t):
        return torch.nn.functional.cross_entropy(x, t)

    g = comp(f)
    return g(normal(2, 3), torch.tensor([0, 2])), raises(lambda: g(normal(2, 3), torch.tensor([0, 3])))


@case
def index_out_of_range_of_an_embedding(comp):
    m = fill(nn.Embedding(4, 3))
    g = comp(m)
    return g(torch.tensor([0, 3])), raises(lambda: g(torch.tensor([0, 4]))), g(torch.tensor([1]))


@case
def one_hot_with_and_without_classes(comp):
    def f(i):
        return torch.nn.functional.one_hot(i, 4), torch.nn.functional.one_hot(i)

    g = comp(f)
    return g(torch.tensor([0, 2])), raises(lambda: g(torch.tensor([0, 5])))


@case
def checked_sizes(comp):
    def f(x):
        torch._check(x.shape[0] > 2, lambda: "too short")
        return x * 2

    g = comp(f)
    return g(normal(3)), raises(lambda: g(normal(2)))


@case
def raised_by_hand_for_some_shapes(comp):
    def f(x):
        if x.shape[0] == 2:
            raise KeyError("two")
        return x * 2

    g = comp(f)
    return g(normal(3)), raises(lambda: g(normal(2))), g(normal(3, seed=1))


@case
def raised_in_the_backward_of_a_function(comp):
    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            raise KeyError("no")

    x = leaf(3)
    return raises(lambda: comp(lambda x: F.apply(x).sum())(x).backward()), grads(x)


@case
def loop_over_rows_with_a_break_by_shape(comp):
    def f(x):
        total = torch.zeros(())
        for i, row in enumerate(x):
            if i == 2:
                break
            total = total + row.exp().sum()
        else:
            total = total * 100
        return total

    x = leaf(4, 2)
    comp(f)(x).backward()
    return grads(x), comp(f)(normal(1, 2))


@case
def recursion_by_size(comp):
    def halve(x):
        return x.sum() if len(x) == 1 else halve(x[: len(x) // 2]) * halve(x[len(x) // 2 :])

    x = leaf(4)
    out = comp(halve)(x)
    out.backward()
    return out, grads(x)


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PEERS))
def test_equals_eager(case, frontend):
    check(case, frontend)
