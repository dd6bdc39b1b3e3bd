"""Ops that read and write the same memory, writes behind the version counters, and what a view is a view of."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.harness import VALUES, case, cases_of, check, fill, grads, leaf, normal, raises


def written(comp, program, x):
    failed = raises(lambda: comp(program)(x))
    return failed, x


@case
def rows_copied_down(comp):
    def f(x):
        x[1:, :2] = x[:-1, :2]
        return x.sum()

    return written(comp, f, normal(5, 3))


@case
def slice_copied_onto_its_neighbour(comp):
    return written(comp, lambda x: x[1:].copy_(x[:-1]), normal(5))


@case
def transpose_added_in_place(comp):
    return written(comp, lambda x: x.add_(x.t()), normal(3, 3))


@case
def out_argument_shifted(comp):
    return written(comp, lambda x: torch.add(x[1:], 1, out=x[:-1]), normal(4))


@case
def overlapping_windows_written(comp):
    return written(comp, lambda x: x.as_strided((3, 2), (1, 1)).mul_(2).sum(), normal(4))


@case
def product_into_its_own_factor(comp):
    return written(comp, lambda x: torch.mm(x, x, out=x), normal(3, 3))


@case
def product_added_to_its_own_factor(comp):
    return written(comp, lambda x: x.addmm_(x, x), normal(3, 3))


@case
def rows_added_from_itself(comp):
    return written(comp, lambda x: x.index_add_(0, torch.tensor([1, 2]), x[:2]), normal(4))


@case
def disjoint_slices_of_one_tensor(comp):
    def f(x):
        x[:, 0] += x[:, 1]
        x[::2].add_(x[1::2])
        x[:2].mul_(x[2:])
        return x.mul_(x)

    x = normal(4, 3)
    return comp(f)(x), x


@case
def rows_added_to_each_other_in_lists(comp):
    def f(x):
        a, b, c = x.unbind(0)
        torch._foreach_add_([a, b], [c, a])
        return x.sum(0)

    x = normal(3, 4)
    return comp(f)(x), x


@case
def rows_of_a_computed_tensor_exchanged_in_lists(comp):
    def f(x):
        y = x * 2
        torch._foreach_copy_([y[0], y[1]], [y[1], y[0]])
        return y

    return comp(f)(normal(3, 4))


@case
def one_tensor_twice_in_a_list(comp):
    def f(x):
        y = x + 1
        torch._foreach_mul_([y, y], 2.0)
        return y

    return comp(f)(normal(4))


@case
def rows_changed_side_by_side_in_lists(comp):
    def f(x):
        rows = list(x.unbind(0))
        torch._foreach_mul_(rows, rows)
        torch._foreach_add_(rows[:2], [rows[2], rows[2]])
        return x.sum(0)

    x = normal(3, 4)
    return comp(f)(x), x


@case
def data_written_leaves_the_version(comp):
    def f(x):
        y = x * x
        x.data.mul_(2)
        return y.sum()

    x, base = leaf(3), leaf(3, seed=1)
    inner = base * 1
    g = comp(f)
    g(x).backward()
    g(inner).backward()
    return x, inner, grads(x, base), x._version, inner._version


@case
def saved_value_written_through_data_raises_nothing(comp):
    x = leaf(3)
    loss = (x * x).sum()
    comp(lambda x: x.data.zero_().sum())(x)
    loss.backward()
    return grads(x)


@case
def weight_clamped_through_data(comp):
    class Clamped(torch.nn.Linear):
        def forward(self, x):
            self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x).sum()

    m = fill(Clamped(2, 2))
    comp(m)(normal(3, 2)).backward()
    return m.weight, m.weight._version, grads(*m.parameters())


def caught(function, *args):
    """Where torch refuses an op on memory that overlaps, the program goes another way."""
    try:
        function(*args)
    except RuntimeError:
        return True
    return False


@case
def refused_write_of_a_part_onto_another_is_caught(comp):
    def f(x):
        y = x.clone()
        try:
            y[1:].add_(y[:-1])
        except RuntimeError:
            return y + 100
        return y

    return comp(f)(normal(3))


@case
def refused_write_to_one_place_is_caught(comp):
    def f(x):
        y = torch.zeros(1).expand(3)
        return x + 100 if caught(y.add_, x) else y

    return comp(f)(normal(3))


@case
def refused_write_to_an_input_is_caught(comp):
    memory = normal(4)
    g = comp(lambda x, y: y + 100 if caught(x.copy_, y) else x + 1)
    return g(memory[1:], memory[:-1]), memory


@case
def views_name_their_base(comp):
    x = normal(3, 3)
    views = comp(lambda x: (x.view(-1), x[0], x.t(), x.detach(), x.detach()[1:]))(x)
    with torch.no_grad():
        under = comp(lambda x: x[1:])(leaf(4))
    return [view._base is x for view in views], [view._is_view() for view in views], under._is_view()


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, VALUES))
def test_equals_eager(case, frontend):
    check(case, frontend)
