"""What a program reads beside its arguments, in places that are easy to forget, changed between two calls."""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import sys
import types
import weakref

import pytest
import torch
from torch import nn

from tests.conformance.harness import PYTHON, case, cases_of, check, normal

SCALE = contextvars.ContextVar("SCALE", default=2.0)


class Box:
    def __init__(self, k, inner=None):
        self.k = k
        self.inner = inner


def changed(comp, program, change):
    g, x = comp(program), normal(3)
    before = g(x)
    change()
    return before, g(x)


@case
def context_variable(comp):
    before = comp(lambda x: x * SCALE.get())
    x = normal(3)
    one = before(x)
    token = SCALE.set(5.0)
    two = before(x)
    SCALE.reset(token)
    return one, two, before(x)


@case
def mapping_views_and_wrappers(comp):
    table = {"a": 2.0}
    view, chain, user = types.MappingProxyType(table), collections.ChainMap({}, table), collections.UserDict(a=1.0)

    def change():
        table["a"] = 5.0
        user["a"] = 7.0

    return changed(comp, lambda x: x * view["a"] + chain["a"] * user["a"], change)


@case
def attributes_of_containers(comp):
    class Items(list):
        pass

    class Table(dict):
        pass

    items, table = Items([1.0]), Table(a=1.0)
    items.k = table.k = 2.0

    def change():
        items.k, table.k = 3.0, 5.0

    return changed(comp, lambda x: x * items.k + table.k, change)


@case
def raw_memory(comp):
    one, two, three = bytearray([1]), array.array("d", [2.0]), __import__("numpy").array([3.0])

    def change():
        one[0], two[0], three[0] = 4, 5.0, 6.0

    return changed(comp, lambda x: x * one[0] + two[0] * float(three[0]), change)


@case
def items_of_long_containers(comp):
    lists, objects, table = (
        [[float(i)] for i in range(300)],
        [Box(1.0) for _ in range(300)],
        {i: [1] for i in range(300)},
    )

    def change():
        lists[299][0], objects[299].k, table[299][0] = 1.5, 2.5, 3

    return changed(comp, lambda x: x * lists[299][0] + objects[299].k * table[299][0], change)


@case
def twenty_objects_deep(comp):
    inner = box = Box(2.0)
    for _ in range(20):
        box = Box(1.0, box)

    def f(x):
        found = box
        while found.inner is not None:
            found = found.inner
        return x * found.k

    return changed(comp, f, lambda: setattr(inner, "k", 9.0))


@case
def behind_weak_references(comp):
    box = Box(2.0)
    reference, table = weakref.ref(box), weakref.WeakValueDictionary(a=box)
    return changed(comp, lambda x: x * reference().k + table["a"].k, lambda: setattr(box, "k", 5.0))


@case
def class_of_a_module_and_of_an_object(comp):
    class Twice(nn.Module):
        def forward(self, x):
            return x * 2

    class Thrice(nn.Module):
        def forward(self, x):
            return x * 3

    m = nn.Sequential(Twice())
    return changed(comp, m, lambda: setattr(m[0], "__class__", Thrice))


@case
def attribute_added_to_a_subclass(comp):
    class Base:
        k = 2.0

    class Derived(Base):
        pass

    box = Derived()
    return changed(comp, lambda x: x * box.k, lambda: setattr(Derived, "k", 7.0))


@case(dynamo_blind="attributes of metaclasses")
def metaclass(comp):
    class Meta(type):
        k = 2.0

    class Plain(metaclass=Meta):
        pass

    return changed(comp, lambda x: x * Plain.k, lambda: setattr(Meta, "k", 5.0))


@case
def dispatched_by_type(comp):
    @functools.singledispatch
    def scale(value):
        return 2.0

    return changed(comp, lambda x: x * scale(3), lambda: scale.register(int)(lambda value: 7.0))


@case(dynamo_blind="functools.lru_cache, which TorchDynamo looks through and warns about")
def cache_is_kept_and_cleared(comp):
    state = [2.0]

    @functools.lru_cache(None)
    def scale(n):
        return n * state[0]

    g, x = comp(lambda x: x * scale(3)), normal(3)
    one = g(x)
    state[0] = 9.0
    two = g(x)
    scale.cache_clear()
    return one, two, g(x)


@case(dynamo_blind="modules that are put into sys.modules by hand")
def module_imported_inside(comp):
    module = types.ModuleType("imported_inside_for_a_test")
    module.k = 2.0
    sys.modules[module.__name__] = module

    def f(x):
        import imported_inside_for_a_test

        return x * imported_inside_for_a_test.k

    try:
        return changed(comp, f, lambda: setattr(module, "k", 5.0))
    finally:
        del sys.modules[module.__name__]


@case
def torch_function_replaced(comp):
    old = nn.functional.relu
    try:
        return changed(
            comp, lambda x: nn.functional.relu(x) + 1, lambda: setattr(nn.functional, "relu", lambda x: x * 0 + 9)
        )
    finally:
        nn.functional.relu = old


@case
def settings_read(comp):
    def f(x):
        return x * (2 if torch.get_float32_matmul_precision() == "highest" else 3)

    try:
        return changed(comp, f, lambda: torch.set_float32_matmul_precision("high"))
    finally:
        torch.set_float32_matmul_precision("highest")


@case
def length_of_a_printed_tensor(comp):
    g = comp(lambda x: len(str(x)))
    return g(normal(2)), g(normal(3)), comp(lambda x: f"{x.sum():.3f}")(normal(3))


@case
def attribute_lookup_that_fails_in_its_own_way(comp):
    class Open:
        def __init__(self):
            self.__dict__["table"] = {"k": 2.0}

        def __getattr__(self, name):
            return self.__dict__["table"][name]

    box = Open()
    return changed(comp, lambda x: x * box.k, lambda: box.table.update(k=5.0))


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PYTHON))
def test_equals_eager(case, frontend):
    check(case, frontend)
