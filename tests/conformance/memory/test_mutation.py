"""Programs that write the tensors that they are given, and views, aliases and results of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.harness import PROGRAMS, case, cases_of, check, fill, grads, leaf, normal, raises, shares


@case
def two_inputs_written(comp):
    def f(x, y):
        x.add_(y)
        y.mul_(x)
        return x - y

    x, y = normal(4), normal(4, seed=1)
    out = comp(f)(x, y)
    return out, x, y


@case
def non_leaf_with_gradient(comp):
    def f(x):
        y = x * 3
        x.mul_(2)
        return y + x.cos()

    b = leaf(4)
    x = b + 1
    out = comp(f)(x)
    (out.sum() + x.pow(2).sum()).backward()
    return out, x, grads(b)


@case
def non_leaf_written_twice_over_two_calls(comp):
    def f(x):
        x.mul_(2)
        return x.exp()

    b = leaf(3)
    x = b * 1
    g = comp(f)
    one = g(x)
    two = g(x)
    (one.sum() + two.sum() + x.sum()).backward()
    return one, two, x, grads(b)


@case
def leaf_written_with_gradient_raises(comp):
    def f(x):
        x.mul_(2)
        return x.sum()

    return raises(lambda: comp(f)(leaf(3)))


@case
def non_leaf_written_under_no_grad(comp):
    def f(x):
        with torch.no_grad():
            x.mul_(3)
        return (x * x).sum()

    b = leaf(3)
    x = b * 1
    comp(f)(x).backward()
    return x, grads(b)


@case
def data_written(comp):
    def f(x):
        x.data.mul_(2)
        return (x * x).sum()

    x = leaf(3)
    comp(f)(x).backward()
    return x, grads(x)


@case
def data_replaced(comp):
    def f(x, y):
        x.data = y
        return x * 2

    x, y = normal(3), normal(3, seed=1)
    out = comp(f)(x, y)
    return out, x, shares(x, y)


@case
def version_counter_moves(comp):
    def f(x):
        x.add_(0)
        return x * 1

    x = normal(3)
    before = x._version
    out = comp(f)(x)
    return out, x._version > before


@case
def same_tensor_twice(comp):
    def f(x, y):
        x.mul_(2)
        return x + y

    x = normal(3)
    out = comp(f)(x, x)
    return out, x


@case
def same_tensor_twice_then_two(comp):
    def f(x, y):
        x.mul_(2)
        return x + y

    g = comp(f)
    x, y, z = normal(3), normal(3, seed=1), normal(3, seed=2)
    return g(x, x), g(y, z), g(z, z), x, y, z


@case
def overlapping_views(comp):
    def f(a, b):
        a.add_(1)
        return a * b

    base = normal(6)
    out = comp(f)(base[:4], base[2:])
    return out, base


@case
def overlapping_views_read_before_and_after(comp):
    def f(a, b):
        c = b * 2
        a.add_(10)
        return c, b * 2

    base = normal(6)
    out = comp(f)(base[1:4], base[:3])
    return out, base


@case
def disjoint_views_of_one_base(comp):
    def f(a, b):
        a.add_(b)
        return a * b

    base = normal(6)
    out = comp(f)(base[:3], base[3:])
    return out, base


@case
def disjoint_then_whole_base(comp):
    def f(a, b):
        a.add_(1)
        return b.sum() * a

    g = comp(f)
    base = normal(6)
    return g(base[:3], normal(6, seed=1)), g(base[:3], base), base


@case
def alias_through_detach(comp):
    def f(a, b):
        a.mul_(2)
        return a + b

    x = normal(4)
    out = comp(f)(x, x.detach())
    return out, x


@case
def parameter_passed_as_argument(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("b", torch.ones(3))

        def forward(self, x):
            with torch.no_grad():
                x.mul_(2)
            return (self.w * self.b * x).sum()

    m = M()
    g = comp(m)
    out = g(m.b)
    out.backward()
    other = normal(3)
    two = g(other)
    return out, two, m.b, other, grads(m.w)


@case
def views_of_input_written(comp):
    def f(x):
        x.view(-1)[2:5].fill_(7)
        x.t()[0].add_(1)
        x[..., None].mul_(2)
        x.diagonal().neg_()
        return x.sum(0)

    x = normal(3, 4)
    out = comp(f)(x)
    return out, x


@case
def stepped_slices(comp):
    def f(x):
        x[::2] += x[1::2]
        x[-1] = x[0]
        x[:, 1] = 5
        x[1, 2] = x.sum()
        return x * 1

    x = normal(4, 3)
    return comp(f)(x), x


@case
def stepped_slices_with_gradient(comp):
    def f(x):
        x[::2] += x[1::2] * 3
        x[-1] = x[0] * 2
        return x.exp()

    b = leaf(4, 3)
    x = b.clone()
    out = comp(f)(x)
    (out.sum() + x.sum()).backward()
    return out, x, grads(b)


@case
def index_and_mask_writes(comp):
    def f(x, i):
        x[i] = 1
        x[x > 0.5] = -1
        x.masked_fill_(x < -2, 0)
        x.index_add_(0, i, x[i])
        x.index_fill_(0, i[:1], 3)
        x.scatter_(0, i, 4.0)
        x.index_copy_(0, i, x[i] + 1)
        return x + 0

    x = normal(6)
    return comp(f)(x, torch.tensor([0, 3, 1])), x


@case
def put_and_accumulate(comp):
    def f(x, v):
        x.index_put_((torch.tensor([0, 0, 2]),), v, accumulate=True)
        x.put_(torch.tensor([1]), v[:1])
        return x * 2

    b, v = leaf(4), leaf(3, seed=1)
    x = b * 1
    comp(f)(x, v).sum().backward()
    return x, grads(b, v)


@case
def eval_dropout_is_the_input(comp):
    def f(x):
        y = F.dropout(x, 0.5, False)
        y.add_(1)
        return x * 2

    x = normal(3)
    return comp(f)(x), x


@case
def no_op_casts_are_the_input(comp):
    def f(x):
        x.to(torch.float32).add_(1)
        x.contiguous().mul_(2)
        x.reshape(4).sub_(3)
        x.flatten().neg_()
        x.float().abs_()
        x.view_as(x).add_(1)
        return x * 2

    x = normal(4)
    return comp(f)(x), x


@case
def copies_are_not_the_input(comp):
    def f(x):
        x.clone().add_(1)
        x.double().mul_(2)
        x.t().contiguous().zero_()
        (x + 0).zero_()
        x.t().reshape(-1).zero_()
        return x * 2

    x = normal(3, 3)
    return comp(f)(x), x


@case
def inplace_activations(comp):
    def f(x):
        y = F.relu(x, inplace=True)
        z = F.hardtanh(y * 1, inplace=True)
        w = F.leaky_relu(z, 0.1, inplace=True)
        return F.silu(w * 2, inplace=True) + w

    b = leaf(5)
    x = b * 1
    out = comp(f)(x)
    out.sum().backward()
    return out, x, grads(b)


@case
def inplace_modules(comp):
    m = fill(nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Dropout(0.0, inplace=True), nn.Linear(4, 2)))
    x = leaf(2, 3)
    comp(m)(x).sum().backward()
    return grads(x, *m.parameters())


@case
def inplace_dropout(comp):
    def f(x):
        return F.dropout(x, 1.0, True, inplace=True) + 1

    x = normal(4)
    out = comp(f)(x)
    return out, x


@case
def out_argument_of_input(comp):
    def f(x, y):
        torch.mul(x, y, out=y)
        torch.add(x, 1, out=x)
        return x + y

    x, y = normal(3), normal(3, seed=1)
    return comp(f)(x, y), x, y


@case
def out_argument_is_resized(comp):
    def f(x, z):
        torch.add(x, 1, out=z)
        return z * 2

    x, z = normal(3), torch.empty(0)
    out = comp(f)(x, z)
    return out, z


@case
def out_tuple(comp):
    def f(x, v, i):
        torch.sort(x, out=(v, i))
        return v * 2

    x, v, i = normal(4), torch.empty(4), torch.empty(4, dtype=torch.long)
    return comp(f)(x, v, i), v, i


@case
def list_of_inputs_foreach(comp):
    def f(xs):
        torch._foreach_add_(xs, 1.0)
        torch._foreach_mul_(xs, [2.0, 3.0])
        return xs[0] + xs[1]

    xs = [normal(3), normal(3, seed=1)]
    return comp(f)(xs), xs


@case
def shape_changed_in_place(comp):
    def f(x):
        x.t_()
        x.unsqueeze_(0)
        return x * 2

    x = normal(2, 3)
    out = comp(f)(x)
    return out, x, x.shape, x.stride()


@case
def shape_changed_and_written(comp):
    def f(x):
        x.t_()
        x[0].add_(1)
        x.squeeze_()
        return x * 2

    x = normal(2, 1, 3)[:, 0]
    out = comp(f)(x)
    return out, x, x.shape, x.stride()


@case
def resized(comp):
    def f(x):
        x.resize_(2)
        x.fill_(3)
        return x + 1

    x = normal(4)
    out = comp(f)(x)
    return out, x


@case
def storage_swapped(comp):
    def f(x, y):
        x.set_(y.detach() + 1)
        return x * 2

    x, y = normal(2), normal(3)
    out = comp(f)(x, y)
    return out, x, y


@case
def detached_in_place(comp):
    def f(x):
        x.detach_()
        return x * 2

    b = leaf(3)
    x = b * 1
    out = comp(f)(x)
    return out, x.requires_grad, x.is_leaf


@case
def requires_grad_set_inside(comp):
    def f(x):
        x.requires_grad_(True)
        return (x * x).sum()

    x = normal(3)
    out = comp(f)(x)
    out.backward()
    return x, grads(x)


@case
def view_of_written_input_returned(comp):
    def f(x):
        x.add_(1)
        return x[1:], x.view(2, 2)

    x = normal(4)
    a, b = comp(f)(x)
    a.mul_(10)
    return a, b, x, shares(a, x)


@case
def written_input_returned(comp):
    def f(x):
        return x.mul_(2), x + 1

    x = normal(4)
    a, b = comp(f)(x)
    return a is x, a, b


@case
def written_non_leaf_returned(comp):
    def f(x):
        x.mul_(2)
        return x, x[0], x.detach()

    b = leaf(4)
    x = b * 1
    a, v, d = comp(f)(x)
    (a.sum() * v).backward()
    return a is x, a, v, d, grads(b)


@case
def saved_value_overwritten_raises(comp):
    def f(x, w):
        y = x * w
        x.add_(1)
        return y.sum()

    x, w = normal(3), leaf(3, seed=1)

    def go():
        comp(f)(x, w).backward()

    return raises(go)


@case
def caller_overwrites_saved_input(comp):
    x, w = normal(3), leaf(3, seed=1)
    out = comp(lambda x, w: (x * w).sum())(x, w)
    x.add_(1)
    return raises(lambda: out.backward())


@case
def caller_overwrites_output_not_saved(comp):
    x = leaf(3)
    out = comp(lambda x: x.sin() + 1)(x)
    out.mul_(2)
    out.sum().backward()
    return out, grads(x)


@case
def internal_overlap(comp):
    def f(x):
        return x.add_(1) * 2

    x = normal(1, 3).expand(4, 3)
    return raises(lambda: comp(f)(x))


@case
def expanded_input_read_and_sibling_written(comp):
    def f(x, y):
        y.add_(x.sum(0))
        return x * y

    base = normal(3)
    return comp(f)(base.expand(4, 3), normal(3, seed=1)), comp(f)(base.expand(4, 3), base), base


@case
def swapped_through_clones(comp):
    def f(a, b):
        t = a.clone()
        a.copy_(b)
        b.copy_(t)
        return a - b

    a, b = normal(3), normal(3, seed=1)
    return comp(f)(a, b), a, b


@case
def other_dtypes_written(comp):
    def f(i, b, h):
        i //= 2
        i <<= 1
        b &= i > 0
        b.logical_not_()
        h.mul_(1.1).add_(i)
        return i + b, h

    i, b = torch.tensor([-3, 4, 7]), torch.tensor([True, True, False])
    h = normal(3, dtype=torch.bfloat16)
    return comp(f)(i, b, h), i, b, h


@case
def wrong_dtype_in_place_raises(comp):
    def f(i):
        i.add_(0.5)
        return i

    return raises(lambda: comp(f)(torch.tensor([1, 2])))


@case
def zero_dim_and_empty_written(comp):
    def f(s, e):
        s.add_(1)
        e.add_(1)
        return s * 2, e * 2

    s, e = torch.tensor(1.0), torch.empty(0, 3)
    return comp(f)(s, e), s, e


@case
def channels_last_written(comp):
    def f(x):
        x.relu_()
        x[:, 0] = 1
        return x.sum((2, 3)), x * 2

    x = normal(2, 3, 4, 4).to(memory_format=torch.channels_last)
    out = comp(f)(x)
    return out, x


@case
def transposed_copy_target(comp):
    def f(x, y):
        x.copy_(y)
        x.t().copy_(y * 2)
        return x + 1

    x, y = normal(3, 3).t(), normal(3, 3, seed=1)
    return comp(f)(x, y), x


@case
def inference_mode_written(comp):
    def f(x):
        x.add_(1)
        return x * 2

    x = normal(3)
    g = comp(f)
    with torch.inference_mode():
        one = g(x)
    two = g(x)
    return one.is_inference(), two.is_inference(), one.tolist(), two, x


@case
def inference_tensor_written_outside_raises(comp):
    with torch.inference_mode():
        x = normal(3)

    def f(x):
        x.add_(1)
        return x * 2

    return raises(lambda: comp(f)(x))


@case
def written_under_autocast(comp):
    def f(x, w):
        y = x @ w
        x.add_(y.float())
        return x @ w

    x, w = normal(3, 3), leaf(3, 3, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        out = comp(f)(x, w)
    out.float().sum().backward()
    return out, x, grads(w)


@case
def running_maximum(comp):
    def f(x, m):
        torch.maximum(m, x, out=m)
        return (x - m).exp().sum()

    g = comp(f)
    m = torch.full((3,), -1e9)
    xs = [normal(3, seed=i) for i in range(3)]
    return [g(x, m) for x in xs], m


@case
def cache_of_keys_written_by_position(comp):
    def f(cache, k, pos):
        cache[:, pos] = k
        return (cache[:, : pos + 1] * k[:, None]).sum()

    g = comp(f)
    cache = torch.zeros(2, 5, 3)
    outs = [g(cache, normal(2, 3, seed=i), i) for i in range(4)]
    return outs, cache


@case
def cache_written_by_tensor_position(comp):
    def f(cache, k, pos):
        cache.index_copy_(1, pos, k)
        return cache.sum(1)

    g = comp(f)
    cache = torch.zeros(2, 5, 3)
    outs = [g(cache, normal(2, 1, 3, seed=i), torch.tensor([i])) for i in range(4)]
    return outs, cache


@case
def written_intermediate_with_saved_views(comp):
    def f(x):
        y = x * 2
        v = y[1:]
        v.mul_(3)
        w = y.t() if y.dim() == 2 else y
        w.add_(1)
        return (y * v.sum()).sum(), v

    x = leaf(3, 3)
    a, v = comp(f)(x)
    (a + v.sum()).backward()
    return a, v, grads(x)


@case
def unused_tangent_of_written_input(comp):
    def f(x, y):
        x.mul_(y)
        return y * 3

    b, y = leaf(3), leaf(3, seed=1)
    x = b * 1
    out = comp(f)(x, y)
    out.sum().backward()
    return x, grads(b, y)


@case
def view_input_written_with_gradient_of_base(comp):
    def f(v):
        v.mul_(2)
        return v.exp()

    b = leaf(2, 3)
    base = b * 1
    out = comp(f)(base[0])
    (out.sum() + base.pow(2).sum()).backward()
    return out, base, grads(b)


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PROGRAMS))
def test_equals_eager(case, frontend):
    check(case, frontend)
