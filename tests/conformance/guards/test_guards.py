"""What may change between two calls: attributes, methods, arguments and settings. A program that was right once must
not be used when it is no longer."""

import enum
import types

import pytest
import torch
from torch import nn

from tests.conformance.changing import Scaled, before_and_after
from tests.conformance.harness import PYTHON, case, cases_of, check, fill, grads, leaf, normal


@case
def float_attribute(comp):
    return before_and_after(comp, lambda m: setattr(m, "k", 5.0))


@case
def string_attribute(comp):
    return before_and_after(comp, lambda m: setattr(m, "mode", "b"))


@case
def nested_container(comp):
    return before_and_after(comp, lambda m: m.nested["x"][1].update(y=7.0))


@case
def configuration_object(comp):
    return before_and_after(comp, lambda m: setattr(m.config, "scale", 7.0))


@case
def configuration_object_inside(comp):
    return before_and_after(comp, lambda m: setattr(m.config.inner, "deep", 7.0))


@case
def configuration_object_replaced(comp):
    return before_and_after(
        comp, lambda m: setattr(m, "config", types.SimpleNamespace(scale=9.0, inner=m.config.inner))
    )


@case
def class_attribute(comp):
    return before_and_after(comp, lambda m: setattr(Scaled, "factor", 5.0), lambda m: setattr(Scaled, "factor", 2.0))


@case
def instance_attribute_hides_class_attribute(comp):
    return before_and_after(comp, lambda m: setattr(m, "factor", 5.0))


@case
def attribute_deleted(comp):
    def change(m):
        del m.factor

    def make():
        m = Scaled()
        m.factor = 4.0
        return m

    return before_and_after(comp, change, make=make)


@case
def method_replaced_on_instance(comp):
    return before_and_after(comp, lambda m: setattr(m, "helper", lambda x: x + 100))


@case
def method_replaced_on_class(comp):
    old = Scaled.helper
    return before_and_after(
        comp, lambda m: setattr(Scaled, "helper", lambda self, x: x + 100), lambda m: setattr(Scaled, "helper", old)
    )


@case
def forward_replaced_on_instance(comp):
    return before_and_after(comp, lambda m: setattr(m, "forward", lambda x: x + 100))


@case
def forward_replaced_on_class(comp):
    old = Scaled.forward
    return before_and_after(
        comp, lambda m: setattr(Scaled, "forward", lambda self, x: x + 100), lambda m: setattr(Scaled, "forward", old)
    )


@case
def property_replaced(comp):
    old = Scaled.double
    return before_and_after(
        comp, lambda m: setattr(Scaled, "double", property(lambda self: 50.0)), lambda m: setattr(Scaled, "double", old)
    )


@case
def default_dtype_changes(comp):
    g = comp(lambda x: x.float() + torch.ones(2) + torch.tensor(0.5))
    a = g(normal(2))
    torch.set_default_dtype(torch.float64)
    b = g(normal(2))
    torch.set_default_dtype(torch.float32)
    return a, b, g(normal(2))


@case
def grad_mode_changes(comp):
    g = comp(lambda x: x * 2)
    x = leaf(2)
    a = g(x)
    torch.set_grad_enabled(False)
    b = g(x)
    torch.set_grad_enabled(True)
    return a, b, g(x)


@case
def deterministic_flag_changes(comp):
    def f(x):
        return x * 2 if torch.are_deterministic_algorithms_enabled() else x * 3

    g = comp(f)
    a = g(normal(2))
    torch.use_deterministic_algorithms(True)
    b = g(normal(2))
    torch.use_deterministic_algorithms(False)
    return a, b, g(normal(2))


@case
def deterministic_fill_of_empty_memory(comp):
    torch.use_deterministic_algorithms(True)
    return comp(lambda x: torch.empty_like(x).isnan() & (x == x))(normal(2))


@case
def dtype_layout_and_offset_of_inputs(comp):
    g = comp(lambda x: x.sin() * 2)
    b = normal(4, 4)
    return g(b), g(b.t()), g(b[1:]), g(b[:, ::2]), g(b.double()), g(b.bfloat16()), g(b.expand(2, 4, 4)), g(b[0, 0])


@case
def number_kinds_as_arguments(comp):
    g = comp(lambda x, k: x * k if k else x - 1)
    i = torch.tensor([1, 2])
    return [g(i, k) for k in (2, 2.0, True, False, 0, 0.0, -0.0, 1, 1.0, 2 + 0j, float("nan"), float("inf"))]


@case
def strings_none_and_types_as_arguments(comp):
    def f(x, mode=None, dtype=None, dims=()):
        if mode == "sum":
            x = x.sum(dims or None)
        return x.to(dtype) if dtype else x * 2

    g = comp(f)
    x = normal(2, 3)
    return (
        g(x),
        g(x, "sum"),
        g(x, "sum", None, (0,)),
        g(x, dtype=torch.float64),
        g(x, None, torch.int32),
        g(x, "sum", dims=(1,)),
    )


@case
def tuple_list_and_size_arguments(comp):
    g = comp(lambda x, s: x.reshape(s) * len(s))
    x = normal(4)
    return g(x, (2, 2)), g(x, [2, 2]), g(x, torch.Size([4, 1])), g(x, [4])


@case
def function_as_argument(comp):
    g = comp(lambda x, f: f(x))
    return g(normal(2), torch.sin), g(normal(2), torch.cos), g(normal(2), lambda v: v * 2)


@case
def function_as_argument_that_reads_its_own_state(comp):
    def scaled(by):
        def f(x):
            return x * by * table["factor"] + offset[0]

        return f

    table, offset = {"factor": 2.0}, [leaf(2, seed=3)]
    g, one, other = comp(lambda x, f: f(x).sin()), scaled(2.0), scaled(3.0)
    found = [g(normal(2), one), g(normal(2), other), g(normal(2), one)]
    table["factor"] = 5.0
    found.append(g(normal(2), one))
    offset[0] = leaf(2, seed=4)
    found += [g(normal(2), one), g(normal(2), other)]
    found[-1].sum().backward()
    return found, grads(*offset)


@case
def function_as_argument_with_defaults_that_change(comp):
    def f(x, by=2.0, *, more=None):
        return x * by + (0 if more is None else more)

    g = comp(lambda x, f: f(x))
    found = [g(normal(2), f)]
    f.__defaults__ = (3.0,)
    found.append(g(normal(2), f))
    f.__kwdefaults__ = {"more": 1.0}
    return found, g(normal(2), f)


@case
def function_as_argument_that_counts(comp):
    seen = []
    g = comp(lambda x, f: f(x) * 2)
    return [g(normal(2), lambda x: (seen.append(1), x + 1)[1]) for _ in range(3)], len(seen)


class Kind(enum.Enum):
    PLAIN = 1.0
    SCALED = 2.0

    @property
    def factor(self):
        return self.value * getattr(self, "more", 1.0)


@case
def member_of_an_enum_as_argument(comp):
    g = comp(lambda x, kind: x * kind.factor if kind is not Kind.PLAIN else x.sin())
    found = [g(normal(2), kind) for kind in (Kind.PLAIN, Kind.SCALED, Kind.PLAIN)]
    Kind.SCALED.more = 3.0
    found.append(g(normal(2), Kind.SCALED))
    del Kind.SCALED.more
    return found, g(normal(2), Kind.SCALED)


@case
def method_of_a_list_as_argument(comp):
    seen = []
    g = comp(lambda x, note: (note(1), x * 2)[1])
    return [g(normal(2), seen.append) for _ in range(2)], seen


@case
def functions_of_c_as_arguments(comp):
    g = comp(lambda x, f: f(x) * 2)
    return [g(normal(2), f) for f in (torch.sin, torch.nn.functional.relu, abs, torch.sin)]


@case
def methods_of_tensor_as_arguments(comp):
    g = comp(lambda x, f: f(x) * 2)
    return [g(normal(2), f) for f in (torch.Tensor.cos, torch.Tensor.sin, torch.sin, torch.Tensor.cos)]


@case
def methods_of_tensor_in_lists_and_attributes(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = torch.Tensor.cos

        def forward(self, x, functions):
            return functions[0](self.act(x))

    m, x = M(), normal(2)
    g = comp(m)
    out = [g(x, [torch.Tensor.exp]), g(x, [torch.Tensor.tanh])]
    m.act = torch.Tensor.sin
    return out, g(x, [torch.Tensor.tanh])


@case
def module_as_argument(comp):
    g = comp(lambda x, m: m(x))
    a, b = fill(nn.Linear(2, 2)), fill(nn.Linear(2, 2), 30)
    x = normal(1, 2)
    out = g(x, a), g(x, b)
    sum(o.sum() for o in out).backward()
    return out, grads(*a.parameters(), *b.parameters())


@case
def tensor_becomes_number(comp):
    g = comp(lambda x, k: x * k)
    return g(normal(2), torch.tensor(2.0)), g(normal(2), 2.0), g(torch.tensor(1.0), torch.tensor(3))


@case
def many_shapes(comp):
    g = comp(lambda x: (x * 2).sum(0))
    return [g(normal(n, 2)) for n in range(1, 24)]


@case
def many_numbers(comp):
    g = comp(lambda x, k: x * k)
    return [g(normal(2), float(k)) for k in range(24)]


@case
def identity_of_arguments(comp):
    g = comp(lambda x, y: x * 2 if x is y else x * 3)
    x, y = normal(2), normal(2, seed=1)
    return g(x, x), g(x, y), g(y, y)


@case
def identity_of_buffer_and_argument(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.ones(2))

        def forward(self, x):
            return x * 2 if x is self.b else x * 3

    m = M()
    g = comp(m)
    return g(m.b), g(normal(2)), g(m.b)


@case
def attribute_on_an_argument(comp):
    g = comp(lambda x: x * getattr(x, "scale", 1.0))
    x = normal(2)
    x.scale = 3.0
    a = g(x)
    x.scale = 7.0
    return a, g(x), g(normal(2))


@case(dynamo_blind="os.environ")
def environment_variable(comp):
    import os

    g = comp(lambda x: x * float(os.environ.get("CONFORMANCE_K", "2")))
    a = g(normal(2))
    try:
        os.environ["CONFORMANCE_K"] = "7"
        return a, g(normal(2))
    finally:
        os.environ.pop("CONFORMANCE_K", None)


@case
def inference_tensors_as_arguments(comp):
    g = comp(lambda x, w: x * w)
    with torch.inference_mode():
        i = normal(2)
    w = leaf(2)
    a = g(normal(2), w)
    with torch.no_grad():
        b = g(i, w)
    return a, b.tolist()


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PYTHON))
def test_equals_eager(case, frontend):
    check(case, frontend)
