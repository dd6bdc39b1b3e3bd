"""Several results of one program: gradients from one to another, hooks on them, partial and repeated backwards."""

import pytest
import torch
from torch import nn

from tests.conformance.harness import PEERS, case, cases_of, check, fill, grads, leaf, normal, raises


def copies(values):
    return [value if value is None else value.clone() for value in values]


SUMMED = "a gradient that arrives by two ways is summed in another order"


def chain(x):
    n = x.sin()
    return n, n * n


@case
def gradient_of_one_result_by_another(comp):
    x = leaf(4)
    n, m = comp(chain)(x)
    return torch.autograd.grad(m.sum(), n, allow_unused=True)


@case
def backward_to_an_input_and_a_result(comp):
    x = leaf(4)
    n, m = comp(chain)(x)
    n.retain_grad()
    m.sum().backward(inputs=[x, n])
    return grads(x, n)


@case
def hook_on_a_result_that_feeds_another(comp):
    x, seen = leaf(4), []
    n, m = comp(chain)(x)
    n.register_hook(lambda g: seen.append(g.clone()) or g * 10)
    (m.sum() + n.sum()).backward()
    return seen, grads(x)


@case
def retained_gradient_of_a_result_that_feeds_another(comp):
    x = leaf(4)
    n, m = comp(chain)(x)
    n.retain_grad()
    m.sum().backward()
    return grads(n, x)


@case
def results_in_a_row_of_three(comp):
    def f(x, w):
        a = x @ w
        b = a.relu()
        return a, b, (b * a).sum()

    x, w = leaf(3, 4), leaf(4, 2, seed=1)
    a, b, c = comp(f)(x, w)
    return torch.autograd.grad(c, [a, b, x, w], retain_graph=True, allow_unused=True), torch.autograd.grad(b.sum(), a)


@case
def first_result_alone_then_second(comp):
    x = leaf(4)
    n, m = comp(chain)(x)
    n.sum().backward(retain_graph=True)
    first = x.grad.clone()
    m.sum().backward()
    return first, grads(x)


@case
def second_result_then_first_without_retaining_raises(comp):
    x = leaf(4)
    n, m = comp(lambda x: (x.exp(), x.exp().sin()))(x)
    m.sum().backward()
    again = raises(lambda: m.sum().backward())
    return again, grads(x)


@case
def a_view_of_a_result_is_a_result_too(comp):
    def f(x):
        n = x * 2
        return n, n.view(-1), n.t()

    x = leaf(2, 3)
    n, flat, t = comp(f)(x)
    n.retain_grad()
    (flat.sum() * 2 + (t * t).sum()).backward()
    return grads(n, x)


@case
def hook_on_a_base_sees_what_comes_by_its_view(comp):
    seen = []

    def f(x):
        n = x.exp()
        return n, n[1:]

    x = leaf(4)
    n, part = comp(f)(x)
    n.register_hook(lambda g: seen.append(g.clone()))
    part.sum().backward()
    return seen, grads(x)


@case
def multi_grad_hook_on_two_results(comp):
    seen = []
    x = leaf(4)
    a, b = comp(lambda x: (x.sin(), x.cos()))(x)
    torch.autograd.graph.register_multi_grad_hook([a, b], lambda g: seen.append(copies(g)))
    (a * b).sum().backward()
    return seen, grads(x)


@case
def multi_grad_hook_mode_any(comp):
    seen = []
    x = leaf(4)
    a, b = comp(lambda x: x.sin())(x), x.cos()
    torch.autograd.graph.register_multi_grad_hook([a, b], lambda g: seen.append(g.clone()), mode="any")
    a.sum().backward()
    return seen, grads(x)


@case
def multi_grad_hook_on_inputs(comp):
    seen = []
    x, y = leaf(4), leaf(4, seed=1)
    torch.autograd.graph.register_multi_grad_hook([x, y], lambda g: seen.append(copies(g)))
    comp(lambda x, y: (x * y).sum())(x, y).backward()
    comp(lambda x, y: x.sum() + y.detach().sum())(x, y).backward()
    return seen, grads(x, y)


@case
def hook_order_on_one_result(comp):
    seen = []
    x = leaf(3)
    out = comp(lambda x: x * 3)(x)
    out.register_hook(lambda g: seen.append(("first", g.clone())) or g + 1)
    out.retain_grad()
    out.register_hook(lambda g: seen.append(("second", g.clone())) or g * 2)
    out.sum().backward()
    return seen, grads(out, x)


@case
def hook_removed_between_backwards(comp):
    seen = []
    x = leaf(3)
    out = comp(lambda x: (x**3).sum())(x)
    handle = out.register_hook(lambda g: seen.append(g.clone()) or g * 5)
    out.backward(retain_graph=True)
    handle.remove()
    out.backward()
    return seen, grads(x)


@case
def hook_on_a_result_written_by_the_caller(comp):
    seen = []
    x = leaf(3)
    out = comp(lambda x: x * 3)(x)
    out.register_hook(lambda g: seen.append(("old", g.clone())))
    out.mul_(2)
    out.register_hook(lambda g: seen.append(("new", g.clone())))
    out.sum().backward()
    return seen, grads(x)


@case
def retained_gradient_then_written_in_place(comp):
    x = leaf(3)
    out = comp(lambda x: x * 3)(x)
    out.retain_grad()
    out.mul_(2)
    out.sum().backward()
    return grads(out, x)


@case
def node_hooks_on_the_gradient_function(comp):
    seen = []
    x = leaf(3)
    out = comp(lambda x: (x * 3).sin())(x)
    out.grad_fn.register_prehook(lambda grads: seen.append([g.clone() for g in grads]) or (grads[0] * 2,))
    out.sum().backward()
    return seen, grads(x)


@case
def accumulator_hooks_of_an_input(comp):
    seen = []
    x = leaf(3)
    node = torch.autograd.graph.get_gradient_edge(x).node
    node.register_prehook(lambda grads: seen.append(("before", grads[0].clone())))
    node.register_hook(lambda *_: seen.append(("after", x.grad.clone())))
    comp(lambda x: (x * x).sum())(x).backward()
    return seen


@case
def gradient_edge_as_a_place_to_stop(comp):
    x = leaf(3)
    y = x * 2
    edge = torch.autograd.graph.get_gradient_edge(y)
    out = comp(lambda y: y.exp())(y)
    return torch.autograd.grad(out.sum(), edge)


@case
def backward_with_inputs_leaves_the_rest_alone(comp):
    x, y, z = leaf(3), leaf(3, seed=1), leaf(3, seed=2)
    out = comp(lambda x, y, z: (x * y * z).sum())(x, y, z)
    out.backward(inputs=[y])
    return grads(x, y, z)


@case
def backward_with_inputs_twice(comp):
    x, y = leaf(3), leaf(3, seed=1)
    out = comp(lambda x, y: (x * y).sum())(x, y)
    out.backward(inputs=[y], retain_graph=True)
    out.backward(inputs=[x, y])
    return grads(x, y)


@case
def gradients_for_results_of_two_calls(comp):
    g = comp(chain)
    x = leaf(4)
    n, m = g(x)
    o, p = g(n)
    n.retain_grad()
    p.sum().backward()
    return grads(n, x), m


@case
def a_result_is_the_input_of_the_next_call_and_retained(comp):
    g = comp(lambda x, w: (x * w).tanh())
    w = leaf(3, seed=1)
    x = leaf(3)
    first = g(x, w)
    first.retain_grad()
    second = g(first, w)
    second.sum().backward()
    return grads(first, w, x)


@case
def a_vector_jacobian_for_each_result(comp):
    x = leaf(3)
    outs = comp(lambda x: (x.sin(), x.sum(), x.outer(x)))(x)
    tangents = [normal(3, seed=1), normal((), seed=2), normal(3, 3, seed=3)]
    return torch.autograd.grad(outs, x, tangents)


@case
def batched_gradients(comp):
    x = leaf(3)
    out = comp(lambda x: x.sin() * x.sum())(x)
    return torch.autograd.grad(out, x, torch.eye(3), is_grads_batched=True)


@case
def materialised_gradients(comp):
    x, y = leaf(3), leaf(2)
    out = comp(lambda x, y: (x.sin(), y.cos()))(x, y)
    return torch.autograd.grad(out[0].sum(), (x, y), materialize_grads=True)


@case
def unused_result_needs_no_tangent(comp):
    x, y = leaf(3), leaf(3, seed=1)
    a, b = comp(lambda x, y: (x * 2, x * y))(x, y)
    a.sum().backward()
    return grads(x, y)


@case
def result_goes_through_a_module_hook(comp):
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    seen = []
    m[1].register_full_backward_hook(lambda mod, gi, go: seen.append((gi[0].clone(), go[0].clone())))
    x = leaf(2, 3)
    comp(m)(x).sum().backward()
    return seen, grads(x, *m.parameters())


@case
def module_backward_hook_changes_gradients(comp):
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    m[1].register_full_backward_hook(lambda mod, gi, go: (gi[0] * 3,))
    m[2].register_full_backward_pre_hook(lambda mod, go: (go[0] * 2,))
    x = leaf(2, 3)
    comp(m)(x).sum().backward()
    return grads(x, *m.parameters())


@case
def module_backward_hook_on_the_whole(comp):
    m = fill(nn.Linear(3, 2))
    seen = []
    m.register_full_backward_hook(lambda mod, gi, go: seen.append((copies(gi), copies(go))))
    x = leaf(2, 3)
    comp(m)(x).sum().backward()
    return seen, grads(x, *m.parameters())


@case
def forward_hook_returns_another_and_keeps_gradients(comp):
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    m[0].register_forward_hook(lambda mod, args, out: out * 2)
    x = leaf(2, 3)
    comp(m)(x).sum().backward()
    return grads(x, *m.parameters())


@case
def post_accumulate_hook_steps_the_optimizer(comp):
    m = fill(nn.Linear(3, 2))

    def step(p):
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(step)
    g = comp(m)
    for i in range(3):
        g(normal(2, 3, seed=i)).square().sum().backward()
    return list(m.parameters()), grads(*m.parameters())


@case
def saved_tensor_hooks_around_count_and_convert(comp):
    packed, x = [], leaf(3)

    def pack(t):
        packed.append(1)
        return t.double()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float()):
        out = comp(lambda x: x.exp().sin())(x)
    out.sum().backward()
    return bool(packed), grads(x)


@case
def saved_tensor_hook_that_raises_in_unpack(comp):
    def unpack(t):
        raise ValueError("no")

    x = leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = comp(lambda x: x.exp().sin())(x)
    try:
        out.sum().backward()
    except Exception as error:
        return type(error).__name__
    return None


@case
def hook_that_raises_leaves_the_rest_usable(comp):
    def fail(g):
        raise ValueError("no")

    x = leaf(3)
    g = comp(lambda x: (x * x).sum())
    out = g(x)
    handle = x.register_hook(fail)
    failed = raises(lambda: out.backward())
    handle.remove()
    g(x).backward()
    return failed, grads(x)


@case(close=SUMMED)
def second_derivative_of_two_results(comp):
    x = leaf(3, dtype=torch.float64)
    a, b = comp(lambda x: (x**3, x.exp()))(x)
    (first,) = torch.autograd.grad((a * b).sum(), x, create_graph=True)
    return first, torch.autograd.grad(first.sum(), x)


@case
def gradient_of_a_gradient_by_a_tangent(comp):
    x, v = leaf(3, dtype=torch.float64), leaf(3, seed=1, dtype=torch.float64)
    out = comp(lambda x: x**3)(x)
    (first,) = torch.autograd.grad(out, x, v, create_graph=True)
    return torch.autograd.grad(first.sum(), v)


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PEERS))
def test_equals_eager(case, frontend):
    check(case, frontend)
