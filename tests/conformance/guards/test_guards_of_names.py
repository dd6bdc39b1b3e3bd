"""What a program reads by a name of its module or of the function around it, changed between two calls."""

import enum
import functools

import pytest
import torch

import aottrain
from tests.conformance.changing import before_and_after, set_scale
from tests.conformance.harness import PYTHON, case, cases_of, check, normal

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


def _set_scale(value):
    global _SCALE
    _SCALE = value


@case
def global_read_in_a_method(comp):
    return before_and_after(comp, lambda m: set_scale(9.0), lambda m: set_scale(2.0))


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
def cached_function(comp):
    @functools.lru_cache
    def table(n):
        return torch.arange(float(n))

    g = comp(lambda x: x + table(3))
    a, b = g(normal(3)), g(normal(3))
    return a, b, type(table(3)).__name__


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
