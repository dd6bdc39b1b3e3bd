"""Writes: to inputs, buffers, views, results; through out=, set_, resize_ and friends; beside gradients."""

import pytest
import torch
from torch import nn

from tests.conformance.harness import PEERS, case, cases_of, check, fill, grads, leaf, normal, raises, shares


@case
def input_written_then_its_old_value_is_needed(comp):
    def f(x, y):
        a = x * y
        y.add_(1)
        return a.sum() + (y * x).sum()

    x, y = leaf(3), normal(3, seed=1)
    outcome = raises(lambda: comp(f)(x, y).backward())
    return outcome, y, grads(x)


@case
def clone_written_and_input_kept(comp):
    def f(x):
        y = x.clone()
        y[0] = 7
        y[1:] *= 2
        return y, x + 1

    x = leaf(4)
    out = comp(f)(x)
    (out[0].sum() + out[1].sum()).backward()
    return out, x, grads(x)


@case
def write_through_a_chain_of_views(comp):
    def f(x):
        y = x * 1
        v = y.view(2, 6).t()[1:3].unsqueeze(0)
        v.mul_(3)
        v.squeeze(0).select(1, 0).zero_()
        return y

    x = leaf(3, 4)
    out = comp(f)(x)
    out.sum().backward()
    return out, grads(x)


@case
def two_views_of_one_base_written_in_turn(comp):
    def f(x):
        y = x * 2
        a, b = y[:3], y[2:]
        a.add_(1)
        b.mul_(a[-1].clone())
        a.neg_()
        return y, a, b

    x = leaf(5)
    y, a, b = comp(f)(x)
    (y.sum() + a.sum() * 2 + b.sum() * 3).backward()
    return y, a, b, grads(x), shares(y, a)


@case
def transposed_buffer_written_and_read_by_rows(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.zeros(3, 4))

        def forward(self, x):
            self.b.t()[1].copy_(x.detach().sum(0))
            return x @ self.b

    m, x = M(), leaf(2, 3)
    g = comp(m)
    out = g(x)
    out.sum().backward()
    return out, m.b, grads(x), g(x + 1), m.b


@case
def buffers_swapped_inside(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.ones(3))
            self.register_buffer("b", torch.zeros(3))

        def forward(self, x):
            with torch.no_grad():
                old = self.a.clone()
                self.a.copy_(self.b + 2)
                self.b.copy_(old)
            return x * self.a + self.b

    m = M()
    g = comp(m)
    return [g(normal(3, seed=i)) for i in range(3)], m.a, m.b


@case
def two_buffers_that_share_memory(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.zeros(4))
            self.register_buffer("b", self.a[1:3])

        def forward(self, x):
            self.a.add_(x.detach())
            return x[:2] * self.b

    m, x = M(), leaf(4)
    out = comp(m)(x)
    out.sum().backward()
    return out, m.a, m.b, grads(x), shares(m.a, m.b)


@case
def counter_of_integers(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.n += 1
            return x / self.n

    m = M()
    g = comp(m)
    return [g(normal(3)) for _ in range(4)], m.n, m.n._version


@case
def moving_average_with_lerp_and_foreach(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.zeros(3))
            self.register_buffer("b", torch.ones(3))

        @torch.no_grad()
        def forward(self, x):
            torch._foreach_lerp_([self.a, self.b], [x, x * 2], 0.1)
            torch._foreach_mul_([self.a, self.b], 0.9)
            return self.a + self.b

    m = M()
    g = comp(m)
    return [g(normal(3, seed=i)) for i in range(3)], m.a, m.b


@case
def out_argument_slice_of_an_input(comp):
    def f(x, y):
        torch.mul(x, 2, out=y[1:])
        return y.sum()

    y = torch.zeros(4)
    return comp(f)(normal(3), y), y


@case
def out_argument_with_another_type(comp):
    def f(x, y):
        torch.add(x, x, out=y)
        return y + 1

    y = torch.zeros(3, dtype=torch.float64)
    return comp(f)(normal(3), y), y


@case
def out_argument_requires_grad_raises(comp):
    def f(x, y):
        return torch.add(x, x, out=y)

    return raises(lambda: comp(f)(leaf(3), torch.zeros(3)))


@case
def out_argument_for_several_results(comp):
    def f(x, v, i):
        torch.max(x, 1, out=(v, i))
        return v * 2, i + 1

    v, i = torch.empty(3), torch.empty(3, dtype=torch.long)
    return comp(f)(normal(3, 4), v, i), v, i


@case
def products_with_out(comp):
    def f(a, b, c):
        torch.mm(a, b, out=c)
        torch.addmm(c, a, b, beta=2, alpha=0.5, out=c)
        return c.relu()

    c = torch.empty(2, 2)
    return comp(f)(normal(2, 3), normal(3, 2, seed=1), c), c


@case
def cat_and_stack_with_out(comp):
    def f(a, b, c, d):
        torch.cat([a, b], out=c)
        torch.stack([a, b], 1, out=d)
        return c.sum() + d.prod()

    c, d = torch.empty(4), torch.empty(2, 2)
    return comp(f)(normal(2), normal(2, seed=1), c, d), c, d


@case
def set_to_another_tensor_inside(comp):
    def f(x):
        y = torch.empty(0)
        y.set_(x.detach().clone())
        y.add_(1)
        return x * y

    x = leaf(3)
    out = comp(f)(x)
    out.sum().backward()
    return out, grads(x)


@case
def resized_inside(comp):
    def f(x):
        y = torch.zeros(2)
        y.resize_(4).fill_(1.5)
        return x * y

    x = leaf(4)
    out = comp(f)(x)
    out.sum().backward()
    return out, grads(x)


@case
def data_of_an_intermediate_replaced(comp):
    def f(x):
        y = x * 2
        y.data = torch.ones(3)
        return y * x

    x = leaf(3)
    out = comp(f)(x)
    out.sum().backward()
    return out, grads(x)


@case
def unsqueezed_in_place(comp):
    def f(x):
        y = x * 2
        y.unsqueeze_(0).t_()
        y.squeeze_(1)
        y.mul_(3)
        return y

    x = leaf(3)
    out = comp(f)(x)
    out.sum().backward()
    return out, grads(x)


@case
def as_strided_in_place(comp):
    def f(x):
        y = x * 2
        y.as_strided_((2, 2), (1, 2))
        y.mul_(3)
        return y

    x = leaf(6)
    out = comp(f)(x)
    out.sum().backward()
    return out, grads(x)


@case
def swapped_dims_in_place_then_returned_with_the_base(comp):
    def f(x):
        y = x * 2
        z = y.view(3, 2)
        y.transpose_(0, 1)
        z.add_(1)
        return y, z

    x = leaf(2, 3)
    y, z = comp(f)(x)
    (y * y).sum().backward()
    return y, z, grads(x), shares(y, z)


@case
def written_view_of_a_leaf_under_no_grad(comp):
    def f(x):
        with torch.no_grad():
            x[0].zero_()
            x.view(-1)[-1:].fill_(5)
        return (x * x).sum()

    x = leaf(2, 2)
    out = comp(f)(x)
    out.backward()
    return out, x, grads(x)


@case
def parameter_clamped_before_use(comp):
    m = fill(nn.Linear(3, 2))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = m

        def forward(self, x):
            with torch.no_grad():
                self.l.weight.clamp_(-0.1, 0.1)
            return self.l(x)

    x = leaf(2, 3)
    g = comp(M())
    g(x).sum().backward()
    return grads(x, *m.parameters()), list(m.parameters())


@case
def masked_scatter_with_gradients(comp):
    def f(x, s):
        y = x * 1
        y.masked_scatter_(torch.tensor([True, False, True, True]), s)
        return y

    x, s = leaf(4), leaf(4, seed=1)
    out = comp(f)(x, s)
    (out * normal(4, seed=2)).sum().backward()
    return out, grads(x, s)


@case
def index_copy_put_and_fill_with_gradients(comp):
    def f(x, s):
        i = torch.tensor([2, 0])
        y = x * 1
        y.index_copy_(0, i, s)
        y.put_(torch.tensor([1, 5]), s.flatten()[:2])
        y.index_fill_(1, torch.tensor([1]), 0.5)
        return y

    x, s = leaf(3, 3), leaf(2, 3, seed=1)
    out = comp(f)(x, s)
    (out * normal(3, 3, seed=2)).sum().backward()
    return out, grads(x, s)


@case
def scatter_reduce_in_place(comp):
    def f(x, s):
        y = x * 1
        y.scatter_reduce_(0, torch.tensor([0, 0, 2]), s, "prod")
        y = y * 1
        y.scatter_reduce_(0, torch.tensor([1, 1, 2]), s, "mean", include_self=False)
        return y

    x, s = leaf(4), leaf(3, seed=1)
    out = comp(f)(x, s)
    (out * normal(4, seed=2)).sum().backward()
    return out, grads(x, s)


@case
def diagonal_filled_and_triangle_copied(comp):
    def f(x):
        y = x @ x.t()
        y.diagonal().fill_(2)
        y.fill_diagonal_(3, wrap=True)
        y.triu_(1)
        return y

    x = leaf(3, 4)
    out = comp(f)(x)
    out.sum().backward()
    return out, grads(x)


@case
def expanded_input_written_raises(comp):
    return raises(lambda: comp(lambda x: x.add_(1))(torch.zeros(1).expand(4)))


@case
def copy_from_a_broadcast_and_cast(comp):
    def f(x, y):
        x.copy_(y)
        x[..., 1] = y.sum()
        return x * 2

    x, y = torch.zeros(2, 3, dtype=torch.float16), leaf(3)
    out = comp(f)(x, y)
    out.sum().backward()
    return out, x, grads(y)


@case
def written_and_detached_result(comp):
    def f(x):
        y = x * 2
        z = y.detach()
        z.add_(1)
        return y, z

    x = leaf(3)
    y, z = comp(f)(x)
    y.sum().backward()
    return y, z, grads(x), shares(y, z)


@case
def caller_writes_a_result_and_goes_backward(comp):
    x = leaf(3)
    out = comp(lambda x: x * 2)(x)
    out[1] = 5
    out.sum().backward()
    return out, grads(x)


@case
def caller_writes_one_of_two_views(comp):
    def f(x):
        y = x * 2
        return y[:2], y[1:]

    x = leaf(3)
    a, b = comp(f)(x)
    a.mul_(10)
    b.sum().backward()
    return a, b, grads(x)


@case
def written_input_is_a_view_of_another_leaf_computation(comp):
    def f(v):
        v.mul_(2)
        return v.sin()

    x = leaf(4)
    base = x * 1
    out = comp(f)(base[1:3])
    (out.sum() + base.sum()).backward()
    return out, base, grads(x)


@case
def input_written_twice_by_nested_calls(comp):
    inner = comp(lambda x: x.add_(1))

    def f(x):
        inner(x)
        x.mul_(2)
        return inner(x) * 1

    x = torch.zeros(3)
    return comp(f)(x), x, x._version > 0


@case
def swapped_inputs(comp):
    def f(x, y):
        t = x.clone()
        x.copy_(y)
        y.copy_(t)
        return x, y

    x, y = normal(3), normal(3, seed=1)
    a, b = comp(f)(x, y)
    return a, b, x, y, a is x, b is y


@case
def written_through_a_closed_over_view(comp):
    base = torch.zeros(4)
    view = base[1:3]

    def f(x):
        view.add_(x)
        return x * 2

    g = comp(f)
    return g(normal(2)), g(normal(2, seed=1)), base, view


@case
def real_part_of_a_complex_input_written(comp):
    def f(z):
        z.real.mul_(2)
        torch.view_as_real(z)[..., 1] = 3
        return z.abs()

    z = torch.complex(normal(3), normal(3, seed=1))
    return comp(f)(z), z


@case
def boolean_and_integer_views_written(comp):
    def f(x, b):
        x.view(torch.int32).bitwise_and_(0x7FFFFFFF)
        b.logical_not_()
        b |= x > 1
        return x.sum(), b.sum()

    x, b = normal(5), torch.tensor([True, False, True, False, False])
    return comp(f)(x, b), x, b


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PEERS))
def test_equals_eager(case, frontend):
    check(case, frontend)
