"""Gradients of values that are written through masks and indices: their size is known, autograd asks for values."""

import pytest
import torch

from tests.conformance.harness import VALUES, case, cases_of, check, grads, leaf, normal

MASK = torch.tensor([[True, False, False, True], [False, False, True, False], [True, True, False, False]])


def weigh(out):
    return (out * normal(*out.shape, seed=9)).sum()


@case
def value_put_through_a_mask(comp):
    x, one, all_of = leaf(3, 4), leaf(1, seed=1), leaf(5, seed=2)

    def f(x, m, one, all_of):
        return x.index_put((m,), one), x.sin().index_put((m,), all_of, accumulate=True)

    a, b = comp(f)(x, MASK, one, all_of)
    (weigh(a) + weigh(b)).backward()
    return a, b, grads(x, one, all_of)


@case
def rows_put_through_a_mask_of_the_first_dimension(comp):
    x, rows = leaf(3, 4), leaf(4, seed=1)
    out = comp(lambda x, m, v: x.transpose(0, 1).contiguous().t().index_put((m,), v))(x, MASK[:, 0], rows)
    weigh(out).backward()
    return out, grads(x, rows)


@case
def assignment_through_a_mask(comp):
    x, v = leaf(3, 4), leaf(seed=1)

    def f(x, m, v):
        y = x * 2
        y[m] = v * 3
        return y.sin()

    g = comp(f)
    out, other = g(x, MASK, v), g(x, ~MASK, v)
    (weigh(out) + weigh(other)).backward()
    return out, other, grads(x, v)


@case
def value_filled_in_by_index(comp):
    x, v, index = leaf(5, 4), leaf(seed=1), torch.tensor([3, 0, 3])

    def f(x, i, v):
        y = x * 2
        y.index_fill_(1, i, v)
        return x.index_fill(0, i, v.exp()), y

    g = comp(f)
    a, b = g(x, index, v)
    (weigh(a) + weigh(b)).backward()
    return a, b, grads(x, v)


@case
def mask_without_an_element(comp):
    x, v = leaf(3, 4), leaf(1, seed=1)
    out = comp(lambda x, m, v: x.index_put((m,), v))(x, torch.zeros(3, 4, dtype=torch.bool), v)
    weigh(out).backward()
    return out, grads(x, v)


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, VALUES))
def test_equals_eager(case, frontend):
    check(case, frontend)
