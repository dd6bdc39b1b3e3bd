"""torch.autograd.Function: its own backward must be the one that runs."""

import pytest
import torch
from torch import nn

from tests.conformance.harness import PROGRAMS, case, cases_of, check, grads, leaf, normal, raises

FOLLOWED = "TorchDynamo follows a custom Function's backward under no_grad: what else is not recorded it does not say"


class Scale(torch.autograd.Function):
    """Gradient times seven: not the derivative."""

    @staticmethod
    def forward(ctx, x, k=2.0):
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx, g):
        return g * 7 * ctx.k, None


@case
def wrong_derivative_is_used(comp):
    x = leaf(3)
    comp(lambda x: Scale.apply(x.sin(), 3.0).sum())(x).backward()
    return grads(x)


@case
def plain_argument_changes(comp):
    g = comp(lambda x, k: Scale.apply(x, k).sum())
    x = leaf(3)
    g(x, 2.0).backward()
    g(x, 5.0).backward()
    return grads(x)


@case
def apply_on_parameter(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (Scale.apply(self.w) * x).sum()

    m = M()
    comp(m)(normal(3)).backward()
    return grads(m.w)


@case
def apply_on_closed_over_tensor(comp):
    w = leaf(3, seed=5)
    comp(lambda x: (Scale.apply(w) * x).sum())(normal(3)).backward()
    return grads(w)


@case
def separate_setup_context(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(x, y):
            return x * y, x + y

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, a, b):
            x, y = ctx.saved_tensors
            return a * y * 3 + b, b * 5

    x, y = leaf(3), leaf(3, seed=1)
    p, s = comp(lambda x, y: S.apply(x, y))(x, y)
    (p.sum() + s.sum()).backward()
    return p, s, grads(x, y)


@case
def marked_dirty(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.mul_(2)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, g):
            return g * 2

    x = leaf(3)
    out = comp(lambda x: S.apply(x * 1).sum())(x)
    out.backward()
    return out, grads(x)


@case
def marked_dirty_on_an_input(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.mul_(2)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, g):
            return g * 2

    b = leaf(3)
    x = b * 1
    out = comp(lambda x: S.apply(x) + 1)(x)
    out.sum().backward()
    return out, x, grads(b)


@case
def result_written_in_place(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 2
            y += 1
            z = x * 3
            z.mul_(2)
            ctx.save_for_backward(y)
            return y, z

        @staticmethod
        def backward(ctx, g, h):
            (y,) = ctx.saved_tensors
            return g * y + h * 6

    x = leaf(3)
    p, s = comp(lambda x: S.apply(x * 1))(x)
    (p.sum() * 3 + s.sum()).backward()
    return p, s, grads(x)


@case
def saved_result(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, g):
            (y,) = ctx.saved_tensors
            return g * y * 2

    x = leaf(3)
    comp(lambda x: S.apply(x).sum())(x).backward()
    return grads(x)


@case
def result_is_the_input(comp):
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return -g

    x = leaf(3)
    out = comp(lambda x: Reverse.apply(x * 2))(x)
    out.sum().backward()
    return out, grads(x)


@case
def reversal_of_the_input_itself(comp):
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return -g

    x = leaf(3)
    out = comp(lambda x: Reverse.apply(x))(x)
    (out * 2).sum().backward()
    return out, grads(x)


@case
def returns_its_input(comp):
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, g):
            return g * 4

    x = leaf(3)
    out = comp(lambda x: Same.apply(x))(x)
    (out * 2).sum().backward()
    return out, grads(x), out is x


@case(dynamo_blind="set_materialize_grads(False): Dynamo gives zeros")
def no_materialised_gradients(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, a, b):
            return (0 if a is None else a * 2) + (100 if b is None else b * 3)

    def f(x):
        a, b = S.apply(x)
        return a.sum()

    x = leaf(3)
    comp(f)(x).backward()
    return grads(x)


@case(dynamo_blind="set_materialize_grads(False): Dynamo gives zeros")
def no_materialised_gradients_outside(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, a, b):
            return (0 if a is None else a * 2) + (100 if b is None else b * 3)

    x = leaf(3)
    a, b = comp(lambda x: S.apply(x))(x)
    a.sum().backward()
    return grads(x)


@case
def needs_input_grad_branches(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return (g * y if ctx.needs_input_grad[0] else None), (g * x * 2 if ctx.needs_input_grad[1] else None)

    g = comp(lambda x, y: S.apply(x, y).sum())
    x, y = leaf(3), leaf(3, seed=1)
    g(x, y).backward()
    one = grads(x, y)
    z = leaf(3, seed=2)
    g(x.detach(), z).backward()
    return one, grads(z)


@case
def once_differentiable_twice_raises(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 3 * x * x

    def go():
        x = leaf(3)
        y = comp(lambda x: S.apply(x).sum())(x)
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.sum().backward()

    return bool(raises(go))  # the compiled error has a type of its own: it comes from create_graph=True already


@case(refused={"dynamo": FOLLOWED})
def second_derivative(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 3 * x * x

    x = leaf(3)
    y = comp(lambda x: S.apply(x).sum())(x)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    g.sum().backward()
    return g, grads(x)


@case
def called_inside_another(comp):
    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return Scale.apply(x, 2.0) + 1

        @staticmethod
        def backward(ctx, g):
            return g * 11

    x = leaf(3)
    out = comp(lambda x: Outer.apply(x).sum())(x)
    out.backward()
    return out, grads(x)


@case
def python_state_in_backward(comp):
    log = []

    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            log.append(1)
            return g * len(log)

    g = comp(lambda x: S.apply(x).sum())
    x = leaf(3)
    g(x).backward()
    g(x).backward()
    return log, grads(x)


@case
def python_state_in_forward(comp):
    class S(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, x):
            S.calls += 1
            return x * S.calls

        @staticmethod
        def backward(ctx, g):
            return g

    g = comp(lambda x: S.apply(x) + 0)
    return g(leaf(2)), g(leaf(2)), S.calls


@case
def gradient_reads_a_global_that_changes(comp):
    scale = {"k": 1.0}

    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * scale["k"]

    g = comp(lambda x: S.apply(x).sum())
    x = leaf(2)
    g(x).backward()
    scale["k"] = 5.0
    g(x).backward()
    return grads(x)


@case
def non_tensor_result(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, 3, None

        @staticmethod
        def backward(ctx, g, *_):
            return g * 5

    x = leaf(3)
    out, k, n = comp(lambda x: S.apply(x))(x)
    out.sum().backward()
    return out, k, n, grads(x)


@case
def quantiser_with_learned_step(comp):
    class Q(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, s):
            ctx.save_for_backward(x, s)
            return (x / s).round().clamp(-2, 1) * s

        @staticmethod
        def backward(ctx, g):
            x, s = ctx.saved_tensors
            q = x / s
            inside = (q >= -2) & (q <= 1)
            return g * inside, (g * torch.where(inside, q.round() - q, q.clamp(-2, 1))).sum().reshape(s.shape)

    x, s = leaf(6), torch.tensor([0.3], requires_grad=True)
    out = comp(lambda x, s: Q.apply(x, s))(x, s)
    out.sum().backward()
    return out, grads(x, s)


@case(dynamo_blind="the number of gradients that a backward returns")
def wrong_number_of_gradients_raises(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x * y

        @staticmethod
        def backward(ctx, g):
            return g

    return raises(lambda: comp(lambda x, y: S.apply(x, y).sum())(leaf(2), leaf(2)).backward())


@case
def backward_raises(comp):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            raise ValueError("no gradient")

    return raises(lambda: comp(lambda x: S.apply(x).sum())(leaf(2)).backward())


@case
def random_mask_kept_on_ctx(comp):
    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mask = torch.rand_like(x) > 0.5
            return x * ctx.mask

        @staticmethod
        def backward(ctx, g):
            return g * ctx.mask

    x = torch.ones(64, requires_grad=True)
    out = comp(lambda x: Drop.apply(x))(x)
    out.sum().backward()
    return torch.equal(out.detach(), x.grad)


@case
def custom_operator(comp):
    name = "conformance::triple"
    if not hasattr(torch.ops.conformance, "triple"):

        @torch.library.custom_op(name, mutates_args=())
        def triple(x: torch.Tensor) -> torch.Tensor:
            return x * 3

        triple.register_fake(lambda x: torch.empty_like(x))
        triple.register_autograd(lambda ctx, g: g * 5, setup_context=lambda ctx, inputs, output: None)
    x = leaf(3)
    out = comp(lambda x: torch.ops.conformance.triple(x).sum())(x)
    out.backward()
    return out, grads(x)


@case
def custom_operator_that_writes(comp):
    if not hasattr(torch.ops.conformance, "bump"):

        @torch.library.custom_op("conformance::bump", mutates_args=("x",))
        def bump(x: torch.Tensor) -> None:
            x.add_(1)

    def f(x):
        torch.ops.conformance.bump(x)
        return x * 2

    x = normal(3)
    out = comp(f)(x)
    return out, x


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, a, b):
        (x,) = ctx.saved_tensors
        return a * x.cos() - b * x.sin()


class FirstAlone(torch.autograd.Function):
    """Gives no gradient for its second argument."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


@case
def no_gradient_beside_several_results(comp):
    def f(x, y):
        total = sum(Both.apply(x))
        first, second = torch.stack([y, y]).unbind(0)
        return FirstAlone.apply(total, first * 2), total * second

    found = []
    for numbers in ((0,), (1,), (0, 1)):
        x, y = leaf(3), leaf(3, seed=1)
        out = comp(f)(x, y)
        sum(out[i].sum() for i in numbers).backward()
        found.append(grads(x, y))
    return found


class Cube(torch.autograd.Function):
    """Saves an argument, and its result, which have a history, and keeps a value that has none."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.k, ctx.half, result = k, x / 2, x**3 * k
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, g):
        x, result = ctx.saved_tensors
        return g * (x * x * 2 * ctx.k + result / x + ctx.half * 0), None


@case(close="second derivatives are summed in another order", refused={"dynamo": FOLLOWED})
def third_derivative(comp):
    x, w = leaf(3), leaf(3, seed=1)
    out = comp(lambda x, w: Cube.apply(Cube.apply(x * w, 2.0) + x, 3.0) * w)(x, w)
    first = torch.autograd.grad(out.sum(), (x, w), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, w), create_graph=True)
    sum(g.sum() for g in second).backward()
    return first, second, grads(x, w)


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PROGRAMS))
def test_equals_eager(case, frontend):
    check(case, frontend)
