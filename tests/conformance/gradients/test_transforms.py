"""torch.func and autograd's own derivatives, inside compiled code and around it."""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from tests.conformance.harness import PROGRAMS, case, cases_of, check, fill, grads, leaf, normal


def scalar(x):
    return (x.sin() * x).sum()


def vector(x):
    return x.exp() * x.sum()


def mlp():
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


ROUNDED = "derivatives of derivatives are summed in another order"


@case
def grad_inside(comp):
    x = leaf(3)
    out = comp(lambda x: grad(scalar)(x) * 2)(x)
    out.sum().backward()
    return out, grads(x)


@case
def grad_and_value_inside(comp):
    x = leaf(3)
    g, v = comp(lambda x: grad_and_value(scalar)(x))(x)
    (g.sum() + v).backward()
    return g, v, grads(x)


@case
def grad_with_aux_and_argnums_inside(comp):
    def f(x, y):
        return (x * y).sum(), x + y

    (gx, gy), aux = comp(lambda x, y: grad(f, argnums=(0, 1), has_aux=True)(x, y))(normal(3), normal(3, seed=1))
    return gx, gy, aux


@case
def grad_of_grad_inside(comp):
    x = leaf(())
    out = comp(lambda x: grad(grad(lambda y: y.sin() * y**3))(x))(x)
    out.backward()
    return out, grads(x)


@case
def vmap_of_grad_inside(comp):
    x = leaf(4, 3)
    out = comp(lambda x: vmap(grad(scalar))(x))(x)
    out.pow(2).sum().backward()
    return out, grads(x)


@case
def vmap_over_other_dimensions_inside(comp):
    x, y = leaf(3, 4), leaf(4, 2, seed=1)
    out = comp(lambda x, y: vmap(lambda a, b: a.sum() * b, in_dims=(1, 0), out_dims=1)(x, y))(x, y)
    out.sin().sum().backward()
    return out, grads(x, y)


@case
def nested_vmap_inside(comp):
    x = leaf(2, 3)
    out = comp(lambda x: vmap(lambda a: vmap(lambda b: a * b)(a))(x))(x)
    out.sin().sum().backward()
    return out, grads(x)


@case
def vmap_with_random_inside(comp):
    out = comp(lambda x: vmap(lambda a: a * torch.rand(3).sign(), randomness="different")(x))(normal(2, 3))
    return out


@case
def jacobians_inside(comp):
    x = leaf(3)
    a, b = comp(lambda x: (jacrev(vector)(x), jacfwd(vector)(x)))(x)
    (a.sin().sum() + b.cos().sum()).backward()
    return a, b, grads(x)


@case
def hessian_inside(comp):
    return comp(lambda x: hessian(scalar)(x))(normal(3))


@case
def jvp_and_vjp_inside(comp):
    def f(x, t):
        out, tangent = jvp(vector, (x,), (t,))
        same, pull = vjp(vector, x)
        return out, tangent, same, pull(t)[0]

    return comp(f)(normal(3), normal(3, seed=1))


@case
def functional_call_inside(comp):
    m = mlp()

    def f(x, w):
        return functional_call(m, {"0.weight": w}, (x,))

    x, w = leaf(2, 3), leaf(4, 3, seed=1)
    out = comp(f)(x, w)
    out.sum().backward()
    return out, grads(x, w, *m.parameters())


@case
def gradients_of_each_sample_inside(comp):
    m = mlp()
    parameters = {name: value.detach() for name, value in m.named_parameters()}

    def loss(parameters, x):
        return functional_call(m, parameters, (x,)).pow(2).sum()

    return comp(lambda p, x: vmap(grad(loss), in_dims=(None, 0))(p, x))(parameters, normal(4, 3))


@case
def functional_call_around(comp):
    m = mlp()
    g = comp(m)
    weights = {name: (value * 2).detach().requires_grad_() for name, value in m.named_parameters()}
    out = functional_call(g, weights, (normal(2, 3),))
    out.sum().backward()
    return out, grads(*weights.values()), grads(*m.parameters()), g(normal(2, 3))


@case
def wrapped_parameters_of_a_compiled_module(comp):
    m = mlp()
    g = comp(m)
    weights = {name: value.detach() for name, value in m.named_parameters()}
    stacked = {name: torch.stack([value, value * 2]) for name, value in weights.items()}
    x = normal(2, 3)

    def loss(weights):
        return functional_call(g, weights, (x,)).sum()

    return grad(loss)(weights), vmap(loss)(stacked), vmap(grad(loss))(stacked), g(x), jacrev(loss)(weights)


@case
def grad_around(comp):
    g = comp(scalar)
    return grad(g)(normal(3)), grad(g)(normal(3, seed=1)), g(normal(3))


@case
def grad_around_a_program_in_use(comp):
    g = comp(scalar)
    x = leaf(3)
    g(x).backward()
    a = grad(g)(normal(3))
    g(x).backward()
    return a, grads(x), grad(grad(lambda y: g(y * torch.ones(3))))(normal(()))


@case
def vmap_around(comp):
    g = comp(vector)
    plain = g(normal(3))
    return plain, vmap(g)(normal(2, 3)), vmap(g, in_dims=1)(normal(3, 2)), g(normal(2))


@case
def vmap_around_a_module(comp):
    m = mlp()
    g = comp(m)
    x = leaf(4, 3)
    a = g(x)
    b = vmap(g)(x)
    (a + b).sum().backward()
    return a, b, grads(x, *m.parameters())


@case
def jacobians_around(comp):
    g = comp(vector)
    return jacrev(g)(normal(3)), jacfwd(g)(normal(3)), hessian(comp(scalar))(normal(3))


@case
def jvp_and_vjp_around(comp):
    g = comp(vector)
    out, tangent = jvp(g, (normal(3),), (normal(3, seed=1),))
    same, pull = vjp(g, normal(3))
    return out, tangent, same, pull(normal(3, seed=2)), g(normal(3))


@case
def closed_over_wrapped_value(comp):
    def outer(x):
        g = comp(lambda y: (x * y).sum())
        return g(torch.ones(3)).sin()

    return grad(outer)(normal(3))


@case(close=ROUNDED)
def autograd_functional(comp):
    f, h = comp(scalar), comp(vector)
    x, v = normal(3), normal(3, seed=1)
    af = torch.autograd.functional
    return af.jacobian(h, x), af.hessian(f, x), af.hvp(f, x, v), af.vhp(f, x, v), af.vjp(h, x, v), af.jvp(h, x, v)


@case(close=ROUNDED)
def autograd_functional_options(comp):
    h = comp(vector)
    x = leaf(3)
    j = torch.autograd.functional.jacobian(h, x, create_graph=True)
    j.pow(2).sum().backward()
    return j, grads(x), torch.autograd.functional.jacobian(h, normal(3), vectorize=True)


@case(close=ROUNDED)
def autograd_functional_of_a_module(comp):
    m = mlp()
    g = comp(m)
    j = torch.autograd.functional.jacobian(g, normal(2, 3), create_graph=True)
    j.pow(2).sum().backward()
    return j, grads(*m.parameters())


@case
def autograd_functional_inside(comp):
    return comp(lambda x: torch.autograd.functional.jacobian(vector, x))(normal(3))


@case(close=ROUNDED)
def gradient_penalty_inside(comp):
    m = mlp()

    def f(x):
        out = m(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.pow(2).mean() + g.pow(2).sum()

    x = leaf(2, 3)
    out = comp(f)(x)
    out.backward()
    return out, grads(x, *m.parameters())


@case
def gradient_of_parameters_inside(comp):
    m = mlp()

    def f(x):
        loss = m(x).pow(2).sum()
        gs = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
        return loss, sum(g.pow(2).sum() for g in gs)

    loss, norm = comp(f)(normal(2, 3))
    norm.backward()
    return loss, norm, grads(*m.parameters())


@case
def inner_loop_step_inside(comp):
    def f(w, x):
        for _ in range(2):
            (g,) = torch.autograd.grad((w * x).sin().sum(), w, create_graph=True)
            w = w - 0.1 * g
        return (w * x).sum()

    w, x = leaf(3), leaf(3, seed=1)
    comp(f)(w, x).backward()
    return grads(w, x)


@case(close=ROUNDED)
def second_and_third_derivatives_around(comp):
    x, w = leaf(3), leaf(3, seed=1)
    y = comp(lambda x, w: (x.sin() * w).exp().sum())(x, w)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), w, create_graph=True)
    h.sum().backward()
    return g, h, grads(x, w)


@case
def second_derivative_with_a_tangent_that_needs_gradient(comp):
    x, v = leaf(3), leaf(3, seed=1)
    y = comp(vector)(x)
    (g,) = torch.autograd.grad(y, x, v, create_graph=True)
    g.sum().backward()
    return g, grads(x, v)


@case
def backward_with_create_graph(comp):
    x = leaf(3)
    comp(scalar)(x).backward(create_graph=True)
    flag = x.grad.requires_grad
    x.grad.sum().backward()
    return flag, grads(x)


@case
def dual_input(comp):
    g = comp(vector)
    plain = g(normal(3))
    with fwAD.dual_level():
        out = g(fwAD.make_dual(normal(3), normal(3, seed=1)))
        found = fwAD.unpack_dual(out)
    return plain, found.primal, found.tangent, g(normal(3))


@case
def dual_parameter(comp):
    m = mlp()
    g = comp(m)
    g(normal(2, 3))
    x = normal(2, 3)
    with fwAD.dual_level():
        weight = fwAD.make_dual(m[0].weight.detach(), torch.ones(4, 3))
        del m[0]._parameters["weight"]
        m[0].weight = weight
        found = fwAD.unpack_dual(g(x))
        primal, tangent = found.primal.detach(), found.tangent.detach()
    return primal, tangent


@case
def dual_level_without_duals(comp):
    g = comp(vector)
    with fwAD.dual_level():
        a = g(normal(3))
    return a, g(normal(3))


@case
def dual_made_inside(comp):
    def f(x, t):
        with fwAD.dual_level():
            return fwAD.unpack_dual(vector(fwAD.make_dual(x, t))).tangent.clone()

    return comp(f)(normal(3), normal(3, seed=1))


@case
def dual_closed_over(comp):
    with fwAD.dual_level():
        d = fwAD.make_dual(normal(3), normal(3, seed=1))
        found = fwAD.unpack_dual(comp(lambda x: x * d)(normal(3, seed=2)))
        return found.primal, found.tangent


@case(refused={"dynamo": "create_graph=True through a custom Function, in the part before a graph break"})
def double_backward_function_inside(comp):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    def f(x):
        y = Square.apply(x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return (g * g).sum()

    x = leaf(3)
    comp(f)(x).backward()
    return grads(x)


class Cubed(torch.autograd.Function):
    """Its backward, its jvp and its vmap are not those of its forward."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return g * 5 * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 7 * ctx.saved_tensors[0]

    @staticmethod
    def vmap(info, in_dims, x):
        return x**3 + 11, in_dims[0]


@case
def custom_functions_inside(comp):
    def dual(x, t):
        with fwAD.dual_level():
            return tuple(fwAD.unpack_dual(Cubed.apply(fwAD.make_dual(x, t)).sin()))

    x = leaf(3)
    gradient = comp(lambda x: grad(lambda y: Cubed.apply(y).sin().sum())(x))(x)
    gradient.sum().backward()
    return (
        gradient,
        grads(x),
        comp(lambda x: vmap(lambda y: Cubed.apply(y) * 2)(x))(normal(2, 3)),
        comp(lambda x, t: jvp(lambda y: Cubed.apply(y).sin(), (x,), (t,)))(normal(3), normal(3, seed=1)),
        comp(dual)(normal(3), normal(3, seed=1)),
    )


@case
def linearize_and_checks(comp):
    out, push = linearize(comp(vector), normal(3))
    return out, push(normal(3, seed=1))


@case
def gradcheck_around(comp):
    g = comp(lambda x: x.sin() * x.sum())
    x = leaf(3, dtype=torch.float64)
    return torch.autograd.gradcheck(g, (x,)), torch.autograd.gradgradcheck(g, (x,))


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PROGRAMS))
def test_equals_eager(case, frontend):
    check(case, frontend)
