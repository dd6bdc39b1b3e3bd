"""What may change between two calls: a compiled program that was right once must not be used when it is no longer."""

import enum
import functools
import types

import pytest
import torch
from torch import nn

import aottrain
from tests.conformance.harness import PYTHON, case, cases_of, check, fill, grads, leaf, normal

_SCALE = 2.0
_TABLE = {"k": 2.0}
_TENSOR = torch.ones(2)


def _helper(x):
    return x * _SCALE


def _deep_a(x):
    return _deep_b(x)


def _deep_b(x):
    return _deep_c(x)


def _deep_c(x):
    return _deep_d(x)


def _deep_d(x):
    return _deep_e(x)


def _deep_e(x):
    return _deep_f(x)


def _deep_f(x):
    return x * _SCALE


class Scaled(nn.Module):
    factor = 2.0

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.k = 3.0
        self.mode = "a"
        self.nested = {"x": [1.0, {"y": 2.0}]}
        self.config = types.SimpleNamespace(scale=2.0, inner=types.SimpleNamespace(deep=1.0))

    @property
    def double(self):
        return self.k * 2

    def helper(self, x):
        return x * _SCALE

    def forward(self, x):
        y = self.w * x * self.factor + self.double
        if self.mode == "b":
            y = y * 10
        return self.helper(y) + self.nested["x"][1]["y"] * self.config.scale + self.config.inner.deep


def before_and_after(comp, change, undo=None, make=Scaled):
    m = make()
    g = comp(m)
    x = normal(2)
    first = g(x)
    try:
        change(m)
        second = g(x)
        third = g(x)
    finally:
        if undo:
            undo(m)
    return first, second, third, g(x)


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


def _set_scale(value):
    global _SCALE
    _SCALE = value


@case
def global_read_in_a_method(comp):
    return before_and_after(comp, lambda m: _set_scale(9.0), lambda m: _set_scale(2.0))


def around_scale(comp, f):
    g = comp(f)
    x = normal(2)
    first = g(x)
    try:
        _set_scale(9.0)
        second = g(x)
    finally:
        _set_scale(2.0)
    return first, second, g(x)


@case
def global_number(comp):
    return around_scale(comp, lambda x: x * _SCALE)


@case
def global_read_in_a_helper(comp):
    return around_scale(comp, lambda x: _helper(x) + 1)


@case
def global_read_six_calls_deep(comp):
    return around_scale(comp, lambda x: _deep_a(x) + 1)


@case
def global_read_in_a_nested_function(comp):
    def f(x):
        def inner(y):
            return [v * _SCALE for v in (y, y)][0]

        return inner(x)

    return around_scale(comp, f)


@case
def global_read_through_partial_and_map(comp):
    return around_scale(comp, lambda x: sum(map(functools.partial(_helper), [x, x])))


@case
def global_read_in_a_callable_object(comp):
    class Call:
        def __call__(self, x):
            return x * _SCALE

    c = Call()
    return around_scale(comp, lambda x: c(x) + 1)


@case
def global_read_in_an_object_made_inside(comp):
    class Op:
        def __init__(self, k):
            self.k = k * _SCALE

        def run(self, x):
            return x * self.k

    return around_scale(comp, lambda x: Op(3).run(x))


@case
def global_read_in_a_static_method(comp):
    class Ops:
        @staticmethod
        def one(x):
            return x * _SCALE

        @classmethod
        def two(cls, x):
            return x * _SCALE

    return around_scale(comp, lambda x: Ops.one(x) + Ops.two(x))


@case
def global_read_through_getattr(comp):
    import sys

    return around_scale(comp, lambda x: x * sys.modules[__name__]._SCALE)


@case
def global_read_through_globals(comp):
    return around_scale(comp, lambda x: x * globals()["_SCALE"])


@case
def module_constant_read_as_attribute(comp):
    import math

    g = comp(lambda x: x * math.tau)
    first = g(normal(2))
    old = math.tau
    try:
        math.tau = 1.0
        return first, g(normal(2))
    finally:
        math.tau = old


@case
def global_dictionary(comp):
    g = comp(lambda x: x * _TABLE["k"])
    first = g(normal(2))
    try:
        _TABLE["k"] = 7.0
        return first, g(normal(2))
    finally:
        _TABLE["k"] = 2.0


@case
def global_tensor_replaced(comp):
    global _TENSOR
    g = comp(lambda x: x * _TENSOR)
    first = g(normal(2))
    old = _TENSOR
    try:
        _TENSOR = torch.full((2,), 5.0)
        return first, g(normal(2))
    finally:
        _TENSOR = old


@case
def closed_over_number(comp):
    k = 2.0

    def f(x):
        return x * k

    def change():
        nonlocal k
        k = 7.0

    g = comp(f)
    first = g(normal(2))
    change()
    return first, g(normal(2))


@case
def closed_over_tensor_replaced_and_written(comp):
    k = torch.ones(2)

    def f(x):
        return x * k

    def change():
        nonlocal k
        k = torch.full((2,), 7.0)

    g = comp(f)
    a = g(normal(2))
    k.add_(1)
    b = g(normal(2))
    change()
    return a, b, g(normal(2))


@case
def closed_over_list_of_tensors(comp):
    ks = [torch.ones(2)]
    g = comp(lambda x: sum(k * x for k in ks))
    a = g(normal(2))
    ks.append(torch.ones(2) * 3)
    b = g(normal(2))
    ks[0] = torch.zeros(2)
    return a, b, g(normal(2))


@case
def closed_over_set_and_dict_order(comp):
    names, table = {"a"}, {"a": 1.0, "b": 2.0}

    def f(x):
        out = x
        for i, v in enumerate(table.values()):
            out = out * v + i
        return out + len(names) + ("b" in names)

    g = comp(f)
    a = g(normal(2))
    names.add("b")
    b = g(normal(2))
    table["a"] = table.pop("a")
    return a, b, g(normal(2))


@case
def set_member_swapped(comp):
    names = {"a", "b"}
    g = comp(lambda x: x * 2 if "b" in names else x * 3)
    a = g(normal(2))
    names.remove("b")
    names.add("c")
    return a, g(normal(2))


@case
def long_list_of_numbers(comp):
    ks = [1.0] * 300
    g = comp(lambda x: x * sum(ks))
    a = g(normal(2))
    ks[150] = 9.0
    return a, g(normal(2))


@case
def long_dictionary(comp):
    ks = {i: 1.0 for i in range(300)}
    g = comp(lambda x: x * sum(ks.values()))
    a = g(normal(2))
    ks[150] = 9.0
    return a, g(normal(2))


@case
def deep_object(comp):
    class Node:
        def __init__(self, inner):
            self.inner = inner

    bottom = Node(2.0)
    top = bottom
    for _ in range(8):
        top = Node(top)

    def f(x):
        node = top
        while isinstance(node.inner, Node):
            node = node.inner
        return x * node.inner

    g = comp(f)
    a = g(normal(2))
    bottom.inner = 7.0
    return a, g(normal(2))


@case
def object_with_slots(comp):
    class Slots:
        __slots__ = ("k",)

    s = Slots()
    s.k = 2.0
    g = comp(lambda x: x * s.k)
    a = g(normal(2))
    s.k = 7.0
    return a, g(normal(2))


@case
def numpy_array_closed_over(comp):
    import numpy

    k = numpy.ones(2, dtype=numpy.float32)
    g = comp(lambda x: x * torch.from_numpy(k))
    a = g(normal(2))
    k[:] = 5
    return a, g(normal(2))


@case
def iterator_closed_over(comp):
    it = iter(range(10))
    g = comp(lambda x: x * next(it))
    return g(normal(2)), g(normal(2)), g(normal(2))


@case
def counter_closed_over(comp):
    import itertools

    c = itertools.count()
    g = comp(lambda x: x * next(c))
    return g(normal(2)), g(normal(2)), next(c)


@case
def generator_closed_over(comp):
    def numbers():
        yield from range(10)

    it = numbers()
    g = comp(lambda x: x * next(it))
    return g(normal(2)), g(normal(2)), g(normal(2))


@case
def deque_closed_over(comp):
    import collections

    d = collections.deque([1.0, 2.0])
    g = comp(lambda x: x * d[0])
    a = g(normal(2))
    d.rotate()
    return a, g(normal(2))


@case
def default_dictionary_closed_over(comp):
    import collections

    d = collections.defaultdict(lambda: 1.0)
    g = comp(lambda x: x * d["a"])
    a = g(normal(2))
    d["a"] = 5.0
    return a, g(normal(2)), dict(d)


@case
def enumeration_member(comp):
    import enum

    class Mode(enum.Enum):
        A = 1
        B = 2

    state = {"mode": Mode.A}
    g = comp(lambda x: x * 2 if state["mode"] is Mode.A else x * 3)
    a = g(normal(2))
    state["mode"] = Mode.B
    return a, g(normal(2))


@case
def function_default_changed(comp):
    def f(x, k=2.0, *, j=1.0):
        return x * k + j

    g = comp(f)
    a = g(normal(2))
    f.__defaults__ = (7.0,)
    b = g(normal(2))
    f.__kwdefaults__["j"] = 3.0
    return a, b, g(normal(2))


@case
def function_attribute(comp):
    def f(x):
        return x * f.k

    f.k = 2.0
    g = comp(f)
    a = g(normal(2))
    f.k = 7.0
    return a, g(normal(2))


@case
def training_flag_of_a_child(comp):
    m = nn.Sequential(nn.Dropout(1.0), nn.Linear(2, 2))
    fill(m)
    g = comp(m)
    a = g(normal(1, 2))
    m[0].eval()
    b = g(normal(1, 2))
    m.train()
    return a, b, g(normal(1, 2))


@case
def parameter_replaced(comp):
    def change(m):
        m.w = nn.Parameter(torch.full((2,), 9.0))

    return before_and_after(comp, change)


@case
def parameter_replaced_gets_the_gradient(comp):
    m = Scaled()
    g = comp(m)
    g(normal(2)).sum().backward()
    old = m.w
    m.w = nn.Parameter(torch.full((2,), 9.0))
    g(normal(2)).sum().backward()
    return grads(old, m.w)


@case
def parameter_data_swapped(comp):
    def change(m):
        m.w.data = torch.full((2,), 9.0)

    return before_and_after(comp, change)


@case
def parameter_data_of_another_shape(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    m.weight.data = normal(4, 2)
    m.bias.data = normal(4)
    return a, g(normal(1, 2))


@case
def parameter_becomes_none(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    m.bias = None
    return a, g(normal(1, 2))


@case
def parameter_frozen_later(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    g(normal(1, 2)).sum().backward()
    m.weight.requires_grad_(False)
    m.zero_grad()
    out = g(normal(1, 2))
    out.sum().backward()
    return out, grads(*m.parameters())


@case
def submodule_replaced(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    g = comp(m)
    a = g(normal(1, 2))
    m[1] = nn.Tanh()
    b = g(normal(1, 2))
    m[0] = fill(nn.Linear(2, 3), 50)
    return a, b, g(normal(1, 2))


@case
def submodule_appended_and_removed(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2)))
    g = comp(m)
    a = g(normal(1, 2))
    m.append(nn.Tanh())
    b = g(normal(1, 2))
    del m[0]
    return a, b, g(normal(1, 2))


@case
def module_list_reordered(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([fill(nn.Linear(2, 2), i) for i in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).sin()
            return x

    m = M()
    g = comp(m)
    a = g(normal(1, 2))
    m.layers = nn.ModuleList(reversed(list(m.layers)))
    return a, g(normal(1, 2))


@case
def children_iterated(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = fill(nn.Linear(2, 2))

        def forward(self, x):
            for child in self.children():
                x = child(x)
            return x + len(dict(self.named_parameters()))

    m = M()
    g = comp(m)
    a = g(normal(1, 2))
    m.b = fill(nn.Linear(2, 2), 60)
    return a, g(normal(1, 2))


@case
def hook_added_and_removed(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    g = comp(m)
    a = g(normal(1, 2))
    h = m[0].register_forward_hook(lambda m, i, o: o * 5)
    b = g(normal(1, 2))
    h.remove()
    return a, b, g(normal(1, 2))


@case
def hook_added_to_the_target(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    h = m.register_forward_hook(lambda m, i, o: o * 5)
    b = g(normal(1, 2))
    h.remove()
    p = m.register_forward_pre_hook(lambda m, i: (i[0] + 1,))
    c = g(normal(1, 2))
    p.remove()
    return a, b, c, g(normal(1, 2))


@case
def backward_hook_added_later(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    g = comp(m)
    x = leaf(1, 2)
    g(x).sum().backward()
    one = x.grad.clone()
    m[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 5,))
    g(x).sum().backward()
    return one, grads(x)


@case
def hook_reads_a_number_that_changes(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    k = {"v": 2.0}
    m[0].register_forward_hook(lambda m, i, o: o * k["v"])
    g = comp(m)
    a = g(normal(1, 2))
    k["v"] = 9.0
    return a, g(normal(1, 2))


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
def module_moved_between_dtypes(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    m.double()
    b = g(normal(1, 2, dtype=torch.float64))
    m.bfloat16()
    c = g(normal(1, 2, dtype=torch.bfloat16))
    m.float()
    return a, b, c, g(normal(1, 2))


@case
def state_dict_loaded(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    m.load_state_dict(fill(nn.Linear(2, 2), 99).state_dict())
    b = g(normal(1, 2))
    m.load_state_dict(fill(nn.Linear(2, 2), 77).state_dict(), assign=True)
    return a, b, g(normal(1, 2))


@case
def tied_then_untied(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = fill(nn.Linear(2, 2)), nn.Linear(2, 2)
            self.b.weight = self.a.weight
            self.b.bias = self.a.bias

        def forward(self, x):
            return self.b(self.a(x))

    m = M()
    g = comp(m)
    g(normal(1, 2)).sum().backward()
    one = m.a.weight.grad.clone()
    m.zero_grad()
    m.b = fill(nn.Linear(2, 2), 42)
    g(normal(1, 2)).sum().backward()
    return one, grads(m.a.weight, m.b.weight)


@case
def untied_then_tied(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    g = comp(m)
    a = g(normal(1, 2))
    m[1].weight = m[0].weight
    b = g(normal(1, 2))
    b.sum().backward()
    return a, b, grads(*m.parameters())


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
def parametrisation_added_later(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    nn.utils.parametrizations.weight_norm(m)
    b = g(normal(1, 2))
    return a, b


@case
def pruned_later(comp):
    from torch.nn.utils import prune

    m = fill(nn.Linear(3, 3))
    g = comp(m)
    a = g(normal(1, 3))
    prune.l1_unstructured(m, "weight", 4)
    b = g(normal(1, 3))
    prune.remove(m, "weight")
    return a, b, g(normal(1, 3))


@case
def attribute_on_a_parameter(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.w.scale = 3.0

        def forward(self, x):
            return x * self.w * getattr(self.w, "scale", 1.0)

    m = M()
    g = comp(m)
    a = g(normal(2))
    m.w.scale = 7.0
    return a, g(normal(2))


@case
def attribute_on_an_argument(comp):
    g = comp(lambda x: x * getattr(x, "scale", 1.0))
    x = normal(2)
    x.scale = 3.0
    a = g(x)
    x.scale = 7.0
    return a, g(x), g(normal(2))


@case
def kind_of_a_parameter(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("b", torch.ones(2))

        def forward(self, x):
            return x * (2 if isinstance(self.w, nn.Parameter) else 3) + (5 if isinstance(self.b, nn.Parameter) else 7)

    return comp(M())(normal(2))


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
def cached_function(comp):
    @functools.lru_cache
    def table(n):
        return torch.arange(float(n))

    g = comp(lambda x: x + table(3))
    a, b = g(normal(3)), g(normal(3))
    return a, b, type(table(3)).__name__


@case
def cache_dictionary_on_the_module(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = {}

        def forward(self, x):
            n = x.shape[0]
            if n not in self.cache:
                self.cache[n] = torch.arange(float(n))
            return x + self.cache[n]

    m = M()
    g = comp(m)
    outs = [g(normal(n)) for n in (3, 3, 4, 3)]
    return outs, m.cache


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


_scale = [1.0]


def test_an_attribute_is_not_the_global_of_its_name():
    """`x._scale` reads no global: what a script keeps under that name may change without another program."""

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self._scale = 2.0

        def forward(self, x):
            return x * self._scale

    compiled = aottrain.compile(Holder(), capture="trace")
    for i in range(3):
        _scale.append(float(i))
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert len(compiled.report.graphs) == 1


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PYTHON))
def test_equals_eager(case, frontend):
    check(case, frontend)
