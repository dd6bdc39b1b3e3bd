"""Tensors of other classes, as inputs, parameters, buffers and results: flattened, or run eagerly and counted."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conformance.harness import PYTHON, case, cases_of, check, fill, grads, leaf, normal

# TorchDynamo gives a result of some subclass inputs (closed over, in a list) as a plain tensor, with any backend: of
# those the values are compared alone.


class Tagged(torch.Tensor):
    pass


class Attr(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Attr):
            out.tag = next((a.tag for a in args if isinstance(a, Attr) and hasattr(a, "tag")), None)
        return out


class Doubling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is torch.sin else out


class MyParam(nn.Parameter):
    pass


class OddParam(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return out + 1 if func is F.linear else out


def two(seed=0, grad=False):
    return TwoTensor(normal(3, 3, seed=seed), normal(3, 3, seed=seed + 1)).requires_grad_(grad)


def parts(t):
    return None if t is None else (t.a, t.b) if isinstance(t, TwoTensor) else t


@case
def two_tensor_input(comp):
    x = two(grad=True)
    out = comp(lambda x: (x.sin() * x).cos())(x)
    out.sum().backward()
    return type(out).__name__, parts(out.detach()), parts(x.grad)


@case
def two_tensor_and_plain(comp):
    x = two(grad=True)
    w = leaf(3, 3)
    out = comp(lambda x, w: x @ w)(x, w)
    out.sum().backward()
    return parts(out.detach()), parts(x.grad), parts(w.grad)


@case
def two_tensor_written(comp):
    x = two()

    def f(x):
        x.add_(1)
        return x * 2

    out = comp(f)(x)
    return parts(x), parts(out)


@case
def two_tensor_made_inside(comp):
    def f(x):
        return TwoTensor(x * 2, x * 3) + 1

    out = comp(f)(normal(3))
    return type(out).__name__, parts(out)


@case
def two_tensor_unwrapped_inside(comp):
    x = two()
    return comp(lambda x: x.a * 2 + x.b)(x)


@case
def two_tensor_parameter(comp):
    m = fill(nn.Linear(3, 3))
    m.weight = nn.Parameter(TwoTensor(m.weight.detach(), m.weight.detach() * 2))
    g = comp(m)
    x = normal(2, 3)
    out = g(x)
    out.sum().backward()
    return type(out).__name__, parts(out.detach()), parts(m.weight.grad), parts(m.bias.grad)


@case
def plain_then_two_tensor(comp):
    g = comp(lambda x: x.sin() + 1)
    return g(normal(3)), parts(g(two())), g(normal(3))


@case
def plain_subclass(comp):
    x = normal(3).as_subclass(Tagged)
    x.tag = "t"
    g = comp(lambda x: x * 2 if x.tag == "t" else x * 3)
    a = g(x)
    x.tag = "u"
    return a.as_subclass(torch.Tensor), type(a).__name__, g(x) + 0


@case
def attribute_subclass(comp):
    x = normal(3).as_subclass(Attr)
    x.tag = 5
    out = comp(lambda x: (x * 2).sin())(x)
    return type(out).__name__, getattr(out, "tag", None), out.as_subclass(torch.Tensor)


@case
def function_subclass_changes_values(comp):
    x = normal(3).as_subclass(Doubling)
    out = comp(lambda x: torch.sin(x) + x)(x)
    return type(out).__name__, out.as_subclass(torch.Tensor)


@case
def function_subclass_parameter_changes_values(comp):
    m = fill(nn.Linear(3, 3))
    m.weight = OddParam(m.weight.detach())
    g = comp(m)
    out = g(normal(2, 3))
    out.sum().backward()
    return out, m.weight.grad


@case
def function_subclass_buffer_changes_values(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", normal(3).as_subclass(Doubling))

        def forward(self, x):
            return torch.sin(self.b) + x

    out = comp(M())(normal(3))
    return out.as_subclass(torch.Tensor)


@case
def function_subclass_closed_over(comp):
    b = normal(3).as_subclass(Doubling)
    out = comp(lambda x: torch.sin(b) + x)(normal(3))
    return out.as_subclass(torch.Tensor)


@case
def two_tensor_closed_over(comp):
    b = two()
    out = comp(lambda x: b.sin() + x)(normal(3, 3))
    return type(out).__name__, parts(out)


@case
def parameter_subclass(comp):
    m = fill(nn.Linear(3, 3))
    m.weight = MyParam(m.weight.detach())
    g = comp(m)
    x = leaf(2, 3)
    out = g(x)
    out.sum().backward()
    return out, grads(x, *m.parameters()), type(m.weight).__name__


@case
def buffer_class(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Buffer(torch.ones(3))
            self.c = nn.Buffer(torch.zeros(()), persistent=False)

        def forward(self, x):
            self.c.add_(1)
            return x * self.b + self.c

    m = M()
    g = comp(m)
    return g(normal(3)), g(normal(3)), list(m.state_dict()), m.c, type(m.b).__name__


@case
def masked_tensor_input(comp):
    x = masked_tensor(normal(3), torch.tensor([True, False, True]), requires_grad=True)
    out = comp(lambda x: (x * 2).sin())(x)
    out.sum().backward()
    return out.get_data(), out.get_mask(), x.grad.get_data()


@case
def masked_made_inside(comp):
    out = comp(lambda x: masked_tensor(x, x > 0).sum().get_data())(normal(5))
    return out


def jag(grad=False):
    return torch.nested.nested_tensor([normal(2, 3), normal(4, 3, seed=1)], layout=torch.jagged, requires_grad=grad)


@case
def jagged_input(comp):
    x = jag(True)
    out = comp(lambda x: (x * 2).sin())(x)
    out.sum().backward()
    return out.detach().values(), out.offsets(), x.grad.values()


@case
def jagged_through_linear(comp):
    m = fill(nn.Linear(3, 2))
    out = comp(m)(jag())
    out.values().sum().backward()
    return out.detach().values(), grads(*m.parameters())


@case
def jagged_made_inside(comp):
    def f(v, o):
        return (torch.nested.nested_tensor_from_jagged(v, o) * 2).values()

    return comp(f)(normal(6, 3), torch.tensor([0, 2, 6]))


@case
def jagged_result(comp):
    def f(v, o):
        return torch.nested.nested_tensor_from_jagged(v, o) * 2

    out = comp(f)(normal(6, 3), torch.tensor([0, 2, 6]))
    return out.values(), out.offsets()


@case
def strided_nested(comp):
    x = torch.nested.nested_tensor([normal(2, 3), normal(4, 3)])
    out = comp(lambda x: x * 2)(x)
    return [t for t in out.unbind()]


@case
def sparse_parameter_gradient(comp):
    m = fill(nn.Embedding(5, 3, sparse=True))
    comp(m)(torch.tensor([0, 2, 2])).sum().backward()
    return m.weight.grad.to_dense(), m.weight.grad.layout


@case
def subclass_result_of_plain_inputs(comp):
    out = comp(lambda x: (x * 2).as_subclass(Tagged))(normal(3))
    return type(out).__name__, out.as_subclass(torch.Tensor)


@case
def subclass_in_list(comp):
    out = comp(lambda xs: torch.sin(xs[0]) + xs[1])([normal(3).as_subclass(Doubling), normal(3)])
    return out.as_subclass(torch.Tensor)


@case
def function_mode_around(comp):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.sin else out

    g = comp(lambda x: torch.sin(x) + 1)
    a = g(normal(3))
    with Mode():
        b = g(normal(3))
    return a, b, g(normal(3))


@case
def dispatch_mode_around(comp):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.ops.aten.sin.default else out

    g = comp(lambda x: torch.sin(x) + 1)
    a = g(normal(3))
    with Mode():
        b = g(normal(3))
    return a, b, g(normal(3))


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PYTHON))
def test_equals_eager(case, frontend):
    check(case, frontend)
