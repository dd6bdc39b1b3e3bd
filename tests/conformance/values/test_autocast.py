"""Automatic mixed precision: around, inside, nested, switched, cached."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.harness import VALUES, case, cases_of, check, fill, grads, leaf, normal


def half():
    return torch.autocast("cpu", torch.bfloat16)


@case
def inside_the_program(comp):
    m = fill(nn.Linear(4, 4))

    def f(x):
        with half():
            y = m(x)
        return y, y.float() @ x.t()

    x = leaf(3, 4)
    a, b = comp(f)(x)
    (a.float().sum() + b.sum()).backward()
    return a, b, grads(x, *m.parameters())


@case
def around_then_not_then_around(comp):
    m = fill(nn.Linear(4, 4))
    g = comp(m)
    x = normal(2, 4)
    outs = []
    for on in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            outs.append(g(x))
    return outs


@case
def other_low_precision_type(comp):
    m = fill(nn.Linear(4, 4))
    g = comp(m)
    x = normal(2, 4)
    outs = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            outs.append(g(x))
    return outs


@case
def nested_and_disabled(comp):
    def f(x, w):
        with half():
            a = x @ w
            with torch.autocast("cpu", enabled=False):
                b = x @ w
            c = a @ w
        return a, b, c, x @ w

    x, w = leaf(3, 3), leaf(3, 3, seed=1)
    outs = comp(f)(x, w)
    sum(o.float().sum() for o in outs).backward()
    return outs, grads(x, w)


@case
def off_inside_a_program_that_writes_in_place(comp):
    """What is written through a view is traced once more, with the casts that are in the program already."""

    def f(x, w):
        y = torch.zeros(3, 3)
        y.t().add_(x.t())
        a = y @ w
        with torch.autocast("cpu", enabled=False):
            b = y @ w
        return a, b

    x, w = leaf(3, 3), leaf(3, 3, seed=1)
    with half():
        outs = comp(f)(x, w)
    sum(o.float().square().sum() for o in outs).backward()
    return outs, grads(x, w)


@case
def backward_that_writes_in_place(comp):
    """The formula of silu's gradient does, and what follows is a product: autocast is off in a backward."""

    def f(x, w):
        with torch.autocast("cpu", enabled=False):
            hidden = F.silu(x @ w)
        return hidden.float() @ w

    x, w = leaf(3, 3), leaf(3, 3, seed=1)
    with half():
        out = comp(f)(x, w)
    out.float().square().sum().backward()
    return out, grads(x, w)


@case
def ops_kept_in_single_precision(comp):
    def f(x, t):
        return (
            F.softmax(x, -1),
            F.layer_norm(x, (4,)),
            F.cross_entropy(x, t),
            x.sum(),
            F.mse_loss(x, x * 2),
            x.exp(),
            x.pow(2),
        )

    x = leaf(3, 4, dtype=torch.bfloat16)
    with half():
        outs = comp(f)(x, torch.tensor([0, 1, 3]))
    sum(o.float().sum() for o in outs).backward()
    return outs, grads(x)


@case
def weight_used_twice(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = fill(nn.Linear(4, 4))

        def forward(self, x):
            return self.a(self.a(x).relu())

    m = M()
    x = leaf(3, 4)
    with half():
        out = comp(m)(x)
    out.float().pow(2).sum().backward()
    return out, grads(x, *m.parameters())


@case
def weight_used_twice_without_cache(comp):
    m = fill(nn.Linear(4, 4))
    g = comp(lambda x: m(m(x)))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        out = g(normal(3, 4))
    out.float().sum().backward()
    return out, grads(*m.parameters())


@case
def backward_inside_the_region(comp):
    m = fill(nn.Linear(4, 4))
    x = leaf(3, 4)
    with half():
        out = comp(m)(x)
        out.float().pow(2).mean().backward()
    return out, grads(x, *m.parameters())


@case
def decorated_function(comp):
    m = fill(nn.Linear(4, 4))

    @torch.autocast("cpu", torch.bfloat16)
    def f(x):
        return m(x)

    out = comp(f)(normal(2, 4))
    out.float().sum().backward()
    return out, grads(*m.parameters())


@case
def mixed_inputs_are_promoted(comp):
    def f(x, h):
        return torch.cat([x, h]), torch.stack([x, h]), x + h, torch.addcmul(x, x, x)

    with half():
        return comp(f)(normal(3), normal(3, dtype=torch.bfloat16))


@case
def integers_and_doubles_stay(comp):
    def f(i, d):
        return i @ i, d @ d, i.float() @ i.float()

    with half():
        return comp(f)(torch.ones(2, 2, dtype=torch.long), normal(2, 2, dtype=torch.float64))


@case(kernels_differ="gradients of type float32 are sums of products that were rounded to bfloat16")
def convolution_and_norm(comp):
    m = fill(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)))
    x = leaf(2, 2, 5, 5)
    with half():
        out = comp(m)(x)
    out.float().sum().backward()
    return out, grads(x, *m.parameters()), dict(m.state_dict())


@case
def attention(comp):
    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = (leaf(1, 2, 4, 8, seed=i) for i in range(3))
    with half():
        out = comp(f)(q, k, v)
    out.float().sum().backward()
    return out, grads(q, k, v)


@case
def branch_on_autocast(comp):
    g = comp(lambda x: x * 2 if torch.is_autocast_enabled("cpu") else x * 3)
    a = g(normal(2))
    with half():
        b = g(normal(2))
    return a, b, g(normal(2))


@case
def the_type_is_read(comp):
    """Also where autocast is off, as a program may do that brings its operands to the type by itself."""
    g = comp(lambda x: x.to(torch.get_autocast_dtype("cpu")).sin() @ x.t().to(torch.get_autocast_dtype("cpu")))
    outs = []
    for dtype, on in ((torch.bfloat16, True), (torch.float16, True), (torch.float16, False), (torch.bfloat16, True)):
        with torch.autocast("cpu", dtype, enabled=on):
            outs.append(g(normal(3, 3)))
    return outs


@case
def no_grad_then_grad_in_one_region(comp):
    m = fill(nn.Linear(4, 4))
    g = comp(m)
    x = normal(2, 4)
    with half():
        with torch.no_grad():
            a = g(x)
        b = g(x)
    b.float().sum().backward()
    return a, b, grads(*m.parameters())


@case
def custom_function_with_amp_decorators(comp):
    class S(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w.t(), x.t() @ g

    x, w = leaf(3, 3), leaf(3, 3, seed=1)
    with half():
        out = comp(lambda x, w: S.apply(x, w) @ w)(x, w)
    out.float().sum().backward()
    return out, grads(x, w)


@case
def training_loop_with_switching(comp):
    m = fill(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)))
    g = comp(m)
    o = torch.optim.SGD(m.parameters(), 0.1)
    for i in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 0):
            loss = g(normal(5, 4, seed=i)).float().pow(2).mean()
        o.zero_grad()
        loss.backward()
        o.step()
    return list(m.parameters())


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, VALUES))
def test_equals_eager(case, frontend):
    check(case, frontend)
