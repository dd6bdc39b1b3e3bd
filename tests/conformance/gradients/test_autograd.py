"""Gradient modes, hooks, partial and repeated backwards, derivatives of derivatives."""

import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.conformance.harness import PROGRAMS, case, cases_of, check, fill, grads, leaf, normal, raises


def mlp():
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


@case
def decorated_no_grad(comp):
    @torch.no_grad()
    def f(x):
        return x * 2

    return comp(f)(leaf(3))


@case
def enable_grad_inside_no_grad(comp):
    def f(x):
        with torch.enable_grad():
            y = (x * x).sum()
        return y, x * 2

    x = leaf(3)
    with torch.no_grad():
        y, z = comp(f)(x)
    y.backward()
    return y, z, grads(x)


@case
def inference_mode_inside(comp):
    def f(x):
        with torch.inference_mode():
            y = x * 3
        return y.clone() + 1, x * 2

    x = leaf(3)
    a, b = comp(f)(x)
    b.sum().backward()
    return a, b, grads(x)


@case
def inference_mode_around(comp):
    g = comp(lambda x: x * 2)
    x = leaf(3)
    with torch.inference_mode():
        a = g(x)
        flag = a.is_inference()
    b = g(x)
    b.sum().backward()
    return flag, b, grads(x), a.tolist()


@case
def enable_grad_inside_inference_mode(comp):
    """No gradient is possible there. TorchDynamo traces outside of that mode."""

    @torch.enable_grad()
    def decorated(x, y):
        return (x * y).exp()

    def f(x, y):
        with torch.enable_grad():
            a = x.sin() * y
        return a, x + 1, x

    found = []
    for g in (comp(decorated), comp(f)):
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                found.append(g(leaf(3), leaf(3, seed=1)))
    return found, [value.is_inference() for value in (found[0], *found[3], found[1])]


@case
def inference_mode_left_inside(comp):
    w = leaf(3, 3)

    def f(x):
        with torch.inference_mode(False), torch.enable_grad():
            return nn.functional.linear(x.clone(), w)

    x = normal(3)
    with torch.inference_mode():
        out = comp(f)(x)
    out.sum().backward()
    return out, grads(w)


@case
def set_grad_enabled_variable(comp):
    def f(x, on):
        with torch.set_grad_enabled(on):
            return x * 2

    g = comp(f)
    return g(leaf(3), True), g(leaf(3), False), g(leaf(3), True)


@case
def branch_on_grad_mode(comp):
    def f(x):
        return x * 2 if torch.is_grad_enabled() else x * 3

    g = comp(f)
    a = g(normal(2))
    with torch.no_grad():
        b = g(normal(2))
    return a, b, g(normal(2))


@case
def branch_on_requires_grad(comp):
    g = comp(lambda x: x * 2 if x.requires_grad else x * 3)
    return g(normal(2)), g(leaf(2)), g(normal(2))


@case(dynamo_blind="whether an input is a leaf")
def branch_on_leafness(comp):
    g = comp(lambda x: x * 2 if x.is_leaf else x * 3)
    x = leaf(2)
    return g(x), g(x * 1), g(normal(2))


@case
def only_some_parameters_frozen(comp):
    m = mlp()
    m[0].weight.requires_grad_(False)
    g = comp(m)
    g(normal(2, 3)).sum().backward()
    first = [p.grad for p in m.parameters()]
    m[0].weight.requires_grad_(True)
    m[2].bias.requires_grad_(False)
    m.zero_grad()
    g(normal(2, 3)).sum().backward()
    return first, grads(*m.parameters())


@case
def no_parameter_needs_gradient(comp):
    m = mlp().requires_grad_(False)
    x = leaf(2, 3)
    out = comp(m)(x)
    out.sum().backward()
    return out, grads(x)


@case
def nothing_needs_gradient(comp):
    m = mlp().requires_grad_(False)
    return comp(m)(normal(2, 3))


@case
def gradient_accumulates(comp):
    m = mlp()
    g = comp(m)
    [g(normal(2, 3, seed=i)).sum().backward() for i in range(3)]
    return grads(*m.parameters())


@case
def vector_jacobian(comp):
    x = leaf(3)
    y = comp(lambda x: (x.sin(), x * x))(x)
    torch.autograd.backward(y, [normal(3, seed=1), normal(3, seed=2)])
    return grads(x)


@case
def non_scalar_without_gradient_raises(comp):
    y = comp(lambda x: x * 2)(leaf(3))
    return raises(lambda: y.backward())


@case
def second_backward_raises(comp):
    y = comp(lambda x: (x.sin() * x).sum())(leaf(3))
    y.backward()
    return raises(lambda: y.backward())


@case
def autograd_grad_and_unused(comp):
    x, y = leaf(3), leaf(3, seed=1)
    out = comp(lambda x, y: (x * 2).sum())(x, y)
    return torch.autograd.grad(out, [x, y], allow_unused=True), grads(x, y)


@case
def autograd_grad_unused_raises(comp):
    x, y = leaf(3), leaf(3, seed=1)
    out = comp(lambda x, y: (x * 2).sum())(x, y)
    return raises(lambda: torch.autograd.grad(out, [x, y]))


@case
def backward_for_some_inputs(comp):
    m = mlp()
    x = leaf(2, 3)
    out = comp(m)(x).sum()
    out.backward(inputs=[m[2].weight, x])
    return grads(x, *m.parameters())


@case
def two_outputs_one_after_the_other(comp):
    def f(x, y):
        z = x * y
        return z.sum(), z.sin().sum()

    x, y = leaf(3), leaf(3, seed=1)
    a, b = comp(f)(x, y)
    a.backward(retain_graph=True)
    first = x.grad.clone()
    b.backward()
    return first, grads(x, y)


@case
def three_outputs_every_pattern(comp):
    def f(x, y, z):
        return x * y, y.sin(), z * 2 + x

    found = []
    g = comp(f)
    for pattern in range(1, 8):
        xs = [leaf(3, seed=i) for i in range(3)]
        outs = g(*xs)
        sum(o.sum() for i, o in enumerate(outs) if pattern >> i & 1).backward()
        found.append(grads(*xs))
    return found


@case
def output_not_used(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = fill(nn.Linear(2, 2)), fill(nn.Linear(2, 2))

        def forward(self, x):
            return self.a(x), self.b(x)

    m = M()
    y, _ = comp(m)(normal(1, 2))
    y.sum().backward()
    return grads(*m.parameters())


@case
def branch_leaves_parameter_unused(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = fill(nn.Linear(2, 2)), fill(nn.Linear(2, 2))

        def forward(self, x, first):
            return self.a(x) if first else self.b(x)

    m = M()
    g = comp(m)
    g(normal(1, 2), True).sum().backward()
    one = [p.grad is None for p in m.parameters()]
    g(normal(1, 2), False).sum().backward()
    return one, grads(*m.parameters())


@case
def multiplied_by_zero_is_not_none(comp):
    x, y = leaf(3), leaf(3, seed=1)
    comp(lambda x, y: (x + y * 0).sum())(x, y).backward()
    return grads(x, y)


@case
def detached_branch(comp):
    def f(x, y):
        return (x.detach() * y + x * y.detach()).sum() + (x * 0).detach().sum()

    x, y = leaf(3), leaf(3, seed=1)
    comp(f)(x, y).backward()
    return grads(x, y)


@case
def detached_input_stays_out_of_the_graph(comp):
    """Its own graph may be gone, or is let go; its hooks are for its own gradient."""
    w, x = leaf(2, 2), leaf(3, 2, seed=1)
    g = comp(lambda h, x: (x @ w).sum() * h.detach().sum())
    h = x * 2
    seen = []
    h.register_hook(lambda gradient: seen.append(gradient is None))
    h.sum().backward()
    out = g(h, normal(2, 2, seed=2))
    out.backward()
    return out, seen, grads(w, x)


@case
def detached_state_of_a_recurrence(comp):
    """Steps of which each detaches the last one's state are graphs of their own."""
    w = leaf(2, 2)
    g = comp(lambda h, x: torch.tanh(x @ w + h.detach()))
    h, outs = torch.zeros(3, 2), []
    for i in range(3):
        h = g(h, normal(3, 2, seed=i))
        outs.append(h)
        h.sum().backward()
    return outs, grads(w)


class Mark:
    pass


class Marks(torch.autograd.Function):
    """Its node of autograd's graph holds a mark, and a weak reference to that: torch's own nodes take none."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark = Mark()
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@case
def detached_input_is_let_go(comp):
    w, x = leaf(2, 2), leaf(3, 2, seed=1)
    g = comp(lambda h, x: (x @ w).sum() * h.detach().sum())
    h = Marks.apply(x)
    mark = weakref.ref(h.grad_fn.mark)
    out = g(h, normal(2, 2, seed=2))
    del h
    gc.collect()
    return out, mark() is None


@case
def hooks_under_create_graph_run_once(comp):
    x = leaf(3)
    h = x * 2
    seen = []
    h.register_hook(lambda gradient: (seen.append("h"), gradient * 10)[1])
    x.register_hook(lambda gradient: seen.append("x"))
    out = comp(lambda a: (a**3).sum())(h)
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first, second, seen


@case(close="kernel=auto generates kernels, which sum in another order")
def sparse_gradient_beside_a_dense_one(comp):
    x, e = leaf(2048, 160), leaf(2048, 160, seed=1)
    rows = torch.arange(30) % 7

    def f(x, e):
        picked = torch.gather(x, 1, rows.expand(4, 30), sparse_grad=True)
        looked = torch.nn.functional.embedding(rows, e, sparse=True)
        return (picked * picked).sum() + (x * x).sum() + (looked * looked).sum() + (e * e).sum()

    comp(f)(x, e).backward()
    return x.grad.is_sparse, e.grad.is_sparse, grads(x, e)


@case
def detach_in_place_inside(comp):
    def f(x):
        y = x * 2
        y.detach_()
        return (y * x).sum()

    x = leaf(3)
    comp(f)(x).backward()
    return grads(x)


@case
def hook_on_result(comp):
    x = leaf(3)
    y = comp(lambda x: x * 2)(x)
    y.register_hook(lambda g: g * 3)
    y.retain_grad()
    y.sum().backward()
    return grads(x), y.grad


@case
def hook_inside_changes_gradient(comp):
    def f(x):
        y = x * 2
        y.register_hook(lambda g: g.clamp(max=0.5))
        return (y * y).sum()

    x = leaf(3)
    comp(f)(x).backward()
    return grads(x)


@case
def hook_inside_on_input(comp):
    def f(x):
        x.register_hook(lambda g: g * 10)
        return (x * x).sum()

    g = comp(f)
    x = leaf(3)
    g(x).backward()
    one = x.grad.clone()
    g(x).backward()
    return one, grads(x)


@case
def hook_inside_logs(comp):
    log = []

    def f(x):
        y = x * 2
        y.register_hook(lambda g: log.append(1))
        return y.sum()

    g = comp(f)
    [g(leaf(3)).backward() for _ in range(3)]
    return log


@case
def hooks_on_parameters(comp):
    m = mlp()
    m[0].weight.register_hook(lambda g: g * 2)
    g = comp(m)
    g(normal(2, 3)).sum().backward()
    one = m[0].weight.grad.clone()
    m[2].bias.register_hook(lambda g: g * 0 + 1)
    m.zero_grad()
    g(normal(2, 3)).sum().backward()
    return one, grads(*m.parameters())


@case
def post_accumulate_hook(comp):
    m = mlp()
    seen = []
    for p in m.parameters():
        p.register_post_accumulate_grad_hook(lambda p: (seen.append(tuple(p.shape)), p.data.sub_(0.1 * p.grad))[0])
    g = comp(m)
    g(normal(2, 3)).sum().backward()
    return sorted(seen), list(m.parameters())


@case
def forward_hook_replaces_result(comp):
    m = mlp()
    m[1].register_forward_hook(lambda m, a, out: out * 2)
    m[0].register_forward_pre_hook(lambda m, a: (a[0] + 1,))
    x = leaf(2, 3)
    out = comp(m)(x)
    out.sum().backward()
    return out, grads(x)


@case
def forward_hook_with_kwargs_collects(comp):
    m = mlp()
    seen = []
    m[0].register_forward_hook(lambda m, a, k, out: seen.append(out.detach()), with_kwargs=True)
    g = comp(m)
    g(normal(2, 3))
    g(normal(2, 3, seed=1))
    return seen


@case
def hooks_on_the_target_itself(comp):
    m = mlp()
    m.register_forward_hook(lambda m, a, out: out + 1)
    m.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    m.register_full_backward_hook(lambda m, gi, go: (gi[0] * 5,))
    x = leaf(2, 3)
    out = comp(m)(x)
    out.sum().backward()
    return out, grads(x, *m.parameters())


@case
def full_backward_pre_hook(comp):
    m = mlp()
    m[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
    x = leaf(2, 3)
    comp(m)(x).sum().backward()
    return grads(x, *m.parameters())


@case
def global_module_hook(comp):
    m = mlp()
    g = comp(m)
    a = g(normal(2, 3))
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, a, out: out * 2 if isinstance(m, nn.Linear) else None
    )
    try:
        b = g(normal(2, 3))
    finally:
        handle.remove()
    return a, b, g(normal(2, 3))


@case
def second_derivative(comp):
    x = leaf(3)
    y = comp(lambda x: (x.sin() * x).sum())(x)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (g.pow(2).sum() + y * 0).backward()
    return g, grads(x)


@case(close="second derivatives are summed in another order")
def gradient_penalty(comp):
    m = mlp()
    g = comp(m)
    x = leaf(2, 3)
    out = g(x).sum()
    (gx,) = torch.autograd.grad(out, x, create_graph=True)
    (out + gx.pow(2).sum()).backward()
    return gx, grads(x, *m.parameters())


@case(close="second derivatives are summed in another order")
def gradient_penalty_with_statistics(comp):
    """A batch norm's running statistics have been updated by then."""
    m = fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)))
    x = leaf(5, 3)
    out = comp(m)(x).pow(3).sum()
    (gx,) = torch.autograd.grad(out, x, create_graph=True)
    (out + gx.pow(2).sum()).backward()
    return gx, grads(x, *m.parameters()), list(m.buffers())


@case(close="second derivatives are summed in another order")
def second_derivative_of_a_similarity(comp):
    """Norms are clamped in place under no_grad, and keep their history."""
    x, y = leaf(2, 3), leaf(2, 3, seed=1)
    out = comp(lambda x, y: torch.nn.functional.cosine_similarity(x, y).pow(3).sum())(x, y)
    (gx,) = torch.autograd.grad(out, x, create_graph=True)
    gx.pow(2).sum().backward()
    return gx, grads(x, y)


@case(close="second derivatives are summed in another order")
def second_derivative_by_an_input_that_is_gone(comp):
    x = leaf(3)
    hidden = [x.exp() + 1]
    out = comp(lambda a: (a**3).sum())(hidden[0])
    hidden[0].register_hook(lambda g: g * 2)
    hidden.clear()
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first, second


@case(close="second derivatives are summed in another order")
def second_derivative_beside_an_average(comp):
    """What a buffer was before the call is what gradients go by."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.full((3,), 2.0))

        def forward(self, x):
            out = (x - self.average).pow(3)
            with torch.no_grad():
                self.average.mul_(0.5).add_(x.mean(0))
            return out

    m, x = M(), leaf(4, 3)
    g = comp(m)
    outs = g(x), g(x * 2)
    found = []
    for out in outs:
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        found += [first, *torch.autograd.grad(first.sum(), x)]
    return found, m.average


@case(close="third derivatives are summed in another order")
def third_derivative(comp):
    x = leaf(3)
    y = comp(lambda x: (x**4).sum())(x)
    for _ in range(2):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (z,) = torch.autograd.grad(y.sum(), x)
    return y, z


@case
def hessian_and_jacobian(comp):
    g = comp(lambda x: (x.sin() * x).sum())
    h = comp(lambda x: x.exp() * x.sum())
    x = normal(3)
    return torch.autograd.functional.hessian(g, x), torch.autograd.functional.jacobian(h, x)


@case
def gradient_taken_inside(comp):
    def f(x):
        y = (x**3).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return (g * g).sum()

    x = leaf(3)
    out = comp(f)(x)
    out.backward()
    return out, grads(x)


@case
def gradient_taken_inside_without_graph(comp):
    def f(x):
        z = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((z**3).sum(), z)
        return x * g

    x = leaf(3)
    out = comp(f)(x)
    out.sum().backward()
    return out, grads(x)


@case
def func_grad_inside(comp):
    x = leaf(3)
    out = comp(lambda x: torch.func.grad(lambda y: (y**3).sum())(x) * x)(x)
    out.sum().backward()
    return out, grads(x)


@case
def func_grad_outside(comp):
    g = comp(lambda x: (x.sin() * x).sum())
    return torch.func.grad(g)(normal(3)), torch.func.hessian(g)(normal(3))


@case
def vmap_inside(comp):
    x, w = leaf(4, 3), leaf(3, seed=1)
    out = comp(lambda x, w: torch.vmap(lambda r: (r * w).sum().sin())(x))(x, w)
    out.sum().backward()
    return out, grads(x, w)


@case
def vmap_outside(comp):
    g = comp(lambda r: r.sin().sum() * r)
    return torch.vmap(g)(normal(4, 3))


@case
def jacrev_and_jvp_inside(comp):
    def f(x):
        return torch.func.jacrev(torch.sin)(x).sum(0) + torch.func.jvp(torch.exp, (x,), (torch.ones_like(x),))[1]

    return comp(f)(normal(3))


@case
def forward_mode_dual_input(comp):
    g = comp(lambda x: x.sin() * 2)

    def go():
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(normal(3), normal(3, seed=1))
            out = torch.autograd.forward_ad.unpack_dual(g(dual))
            return out.primal, out.tangent

    return go()


@case
def saved_tensor_hooks_inside(comp):
    log = []

    def f(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (log.append(1), t * 2)[1], lambda t: t):
            return (x * x).sum()

    g = comp(f)
    x = leaf(3)
    g(x).backward()
    return grads(x), len(log) > 0


@case
def saved_tensor_hooks_around_change_values(comp):
    g = comp(lambda x: (x * x).sum())
    x = leaf(3)
    g(x).backward()
    x.grad = None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        out = g(x)
    out.backward()
    return grads(x)


@case
def anomaly_mode(comp):
    x = leaf(3)
    with torch.autograd.detect_anomaly(check_nan=True):
        y = comp(lambda x: (x * 0 / 0).sum())(x)
        return raises(lambda: y.backward())


@case
def backward_in_another_thread(comp):
    x = leaf(3)
    y = comp(lambda x: (x.sin() * x).sum())(x)
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    return grads(x)


@case
def backward_under_no_grad(comp):
    x = leaf(3)
    y = comp(lambda x: (x.sin() * x).sum())(x)
    with torch.no_grad():
        y.backward()
    return grads(x)


@case
def expanded_and_transposed_tangents(comp):
    x = leaf(3, 4)
    y = comp(lambda x: x.t() * 2)(x)
    y.backward(torch.ones(1).expand(4, 3), retain_graph=True)
    y.backward(normal(3, 4).t())
    return grads(x)


@case
def tangent_of_other_dtype_raises(comp):
    y = comp(lambda x: x * 2)(leaf(3))
    return raises(lambda: y.backward(torch.ones(3, dtype=torch.float64)))


@case
def tangent_of_other_shape_raises(comp):
    y = comp(lambda x: x * 2)(leaf(3))
    return raises(lambda: y.backward(torch.ones(4)))


@case
def gradient_of_gradient_output_requires_grad(comp):
    x, v = leaf(3), leaf(3, seed=1)
    y = comp(lambda x: x**3)(x)
    (g,) = torch.autograd.grad(y, x, v, create_graph=True)
    g.sum().backward()
    return g, grads(x, v)


@case
def repeated_input_gradient(comp):
    x = leaf(3)
    comp(lambda a, b: (a * b.sin()).sum())(x, x).backward()
    return grads(x)


@case
def input_is_view_of_leaf(comp):
    x = leaf(4, 3)
    comp(lambda a, b: (a * b).sum())(x[0], x[1:].sum(0)).backward()
    return grads(x)


@case
def result_requires_grad_only_through_parameter(comp):
    m = mlp()
    out = comp(m)(normal(2, 3))
    return out, comp(mlp().requires_grad_(False))(normal(2, 3))


@case
def grad_mode_restored_after_error(comp):
    def f(x):
        with torch.no_grad():
            raise ValueError("no")

    return raises(lambda: comp(f)(leaf(2))), torch.is_grad_enabled()


@case
def grad_fn_is_none_or_not(comp):
    outs = comp(lambda x, y: (x * 2, y * 2, (x * 2).detach()))(leaf(2), normal(2))
    return [o.grad_fn is None for o in outs], outs


@case(dynamo_blind="whether an input is a leaf")
def branch_on_grad_fn(comp):
    g = comp(lambda x: x * 2 if x.grad_fn is None else x * 3)
    x = leaf(2)
    return g(x), g(x * 1)


@case
def masked_where_nan_gradient(comp):
    x = torch.tensor([0.0, 1.0, -1.0], requires_grad=True)
    comp(lambda x: torch.where(x > 0, x.log(), torch.zeros_like(x)).sum())(x).backward()
    return grads(x)


@case
def ties_share_gradient(comp):
    x = torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 2.0]], requires_grad=True)

    def f(x):
        return x.amax(1).sum() + x.max() + x.max(1)[0].sum() + torch.maximum(x, x.flip(1)).sum() + x.abs().sum()

    comp(f)(x).backward()
    return grads(x)


@case
def linear_algebra_gradients(comp):
    def f(a):
        s = a @ a.t() + 3 * torch.eye(3)
        return (
            torch.linalg.cholesky(s).sum()
            + torch.linalg.inv(s).sum()
            + torch.logdet(s)
            + torch.linalg.eigvalsh(s).sum()
        )

    x = leaf(3, 3)
    out = comp(f)(x)
    out.backward()
    return out, grads(x)


@case
def loss_divided_and_accumulated(comp):
    m = mlp()
    g = comp(m)
    optimizer = torch.optim.AdamW(m.parameters(), 0.1)
    for i in range(4):
        (g(normal(2, 3, seed=i)).pow(2).mean() / 2).backward()
        if i % 2:
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return list(m.parameters())


@case
def gradient_scaler(comp):
    m = mlp()
    g = comp(m)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    o = torch.optim.SGD(m.parameters(), 0.1)
    for i in range(3):
        o.zero_grad()
        scaler.scale(g(normal(2, 3, seed=i)).pow(2).mean()).backward()
        scaler.step(o)
        scaler.update()
    return list(m.parameters()), scaler.get_scale()


@case
def recurrent_truncated(comp):
    m = fill(nn.GRUCell(2, 3))
    g = comp(m)
    h = torch.zeros(1, 3)
    for i in range(4):
        h = g(normal(1, 2, seed=i), h if i != 2 else h.detach())
    h.sum().backward()
    return h, grads(*m.parameters())


@case
def parameters_differentiated_through_update(comp):
    w = leaf(3)

    def f(w, x):
        return (w * x).pow(2).sum()

    g = comp(f)
    x, z = normal(3, seed=1), normal(3, seed=2)
    (step,) = torch.autograd.grad(g(w, x), w, create_graph=True)
    g(w - 0.1 * step, z).backward()
    return grads(w)


@case
def gradient_of_a_full_extremum(comp):
    """Zeros beside a negative, an infinite or an undefined share, in memory of the gradient's own."""
    out = []
    for share in (-1.5, float("inf"), float("nan"), -0.0):
        for function in (torch.max, torch.min, torch.median, torch.nanmedian):
            x = normal(4, 3).round().t().requires_grad_()
            result = comp(lambda x, function=function: function(x * 1))(x)
            result.backward(torch.full((), share))
            out += [result, x.grad]
    x = torch.tensor([[1.0, float("nan")], [float("nan"), 3.0]], requires_grad=True)
    comp(lambda x: x.max())(x).backward(torch.tensor(-2.0))
    return out, x.grad


def twice_the_sine(node):
    """Of what torch shows of each node: another gradient, where it is of a sine."""
    if "Sin" in node.name():
        node.register_hook(lambda got, given: tuple(value * 2 for value in got))


if hasattr(torch.autograd.graph, "node_creation_hook"):  # not in torch 2.13
    node_creation_hook = torch.autograd.graph.node_creation_hook

    @case
    def shown_nodes(comp):
        x, names = leaf(3), []
        g = comp(lambda x: (x.sin() * 3).sum())
        for _ in range(3):
            with node_creation_hook(lambda node: names.append(node.name())):
                out = g(x)
            out.backward()
        return names, grads(x)

    @case
    def changed_nodes(comp):
        """Only of the calls that are inside: the others have their own gradients."""
        x = leaf(3)
        g, gradients = comp(lambda x: (x.sin() * 3).sum()), []
        for is_inside in (True, False, True, False):
            with node_creation_hook(twice_the_sine) if is_inside else nullcontext():
                out = g(x)
            gradients += torch.autograd.grad(out, x)
        return gradients

    @case
    def changed_nodes_of_a_part(comp):
        def f(x):
            with node_creation_hook(twice_the_sine):
                y = x.sin() * 2
            return y.sin().sum()

        x = leaf(3)
        g = comp(f)
        for _ in range(2):
            g(x).backward()
        return grads(x)


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PROGRAMS))
def test_equals_eager(case, frontend):
    check(case, frontend)
