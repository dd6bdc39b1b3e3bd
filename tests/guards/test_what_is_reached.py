"""What a program can read in places that are easily overlooked, changed between two calls: the answer is eager's."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import enum
import functools
import multiprocessing
import sys
import types
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn

import aottrain

ONE = torch.ones(2)


def changed_between(function, change, num_programs=2, x=ONE):
    """Both answers are eager's; so many programs were made."""
    call = aottrain.compile(function, kernel="aten", capture="trace", on_unsupported="error")
    assert torch.equal(call(x), function(x))
    change()
    wanted = function(x)
    got = call(x)
    assert torch.equal(got, wanted) and torch.equal(torch.signbit(got), torch.signbit(wanted))
    assert len(call.report.graphs) == num_programs


@dataclass
class Settings:
    scale: float | complex = 0.0


@pytest.mark.parametrize(("before", "after"), [(0.0, -0.0), (-0.0, 0.0), (0.0, 0), (0j, complex(0.0, -0.0))])
def test_a_zero_of_the_other_sign_or_type(before, after):
    settings = Settings(before)
    call = aottrain.compile(lambda x: x * settings.scale, kernel="aten", capture="trace")
    call(ONE)
    settings.scale = after
    got, wanted = call(ONE), ONE * after
    assert repr(got) == repr(wanted) and got.dtype == wanted.dtype and len(call.report.graphs) == 2
    settings.scale = type(after)(after)  # another object, the same number
    call(ONE)
    assert len(call.report.graphs) == 2


def test_how_an_array_is_read():
    table = numpy.array([[1, 2], [3, 4]], dtype=numpy.float32)

    def flat():
        table.shape = (4,)

    changed_between(lambda x: x * torch.from_numpy(table).sum(0), flat)


@pytest.mark.parametrize("make", [numpy.random.default_rng, numpy.random.RandomState], ids=["Generator", "RandomState"])
def test_numbers_that_numpy_draws_are_not_of_the_trace(make):
    def drawing(generator):
        return lambda x: x * generator.normal() + torch.from_numpy(generator.normal(size=1))

    eager, call = drawing(make(0)), aottrain.compile(drawing(make(0)), kernel="aten", capture="trace")
    with pytest.warns(UserWarning, match="of NumPy"):
        assert all(torch.equal(call(ONE), eager(ONE)) for _ in range(3))
    (fallback,) = call.report.fallbacks
    assert "of NumPy" in fallback.reason and fallback.count == 3


def test_a_generator_that_is_not_drawn_from_is_in_nobody_s_way():
    generator = numpy.random.default_rng(0)
    held = {"data": generator}
    changed_between(lambda x: x * len(held), generator.normal, 1)


class Rated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.opt = torch.optim.SGD([self.weight], lr=1.0)
        self.transform = torch.distributions.AffineTransform(loc=0.0, scale=2.0)


def test_the_rate_of_an_optimizer_that_the_program_asks_for():
    model = Rated()
    changed_between(lambda x: x * model.opt.param_groups[0]["lr"], lambda: model.opt.param_groups[0].update(lr=0.1))
    changed_between(lambda x: model.transform(x), lambda: setattr(model.transform, "scale", 5.0))
    # One that it does not ask for is none of its concern.
    changed_between(lambda x: x * model.weight.detach(), lambda: model.opt.param_groups[0].update(lr=0.3), 1)


def test_the_first_attribute_of_a_parameter():
    layer = nn.Linear(2, 2)

    def decayed(x):
        return layer(x) + sum(p.sum() for p in layer.parameters() if not getattr(p, "no_decay", False))

    changed_between(decayed, lambda: setattr(layer.bias, "no_decay", True))


def test_what_a_frozen_set_holds():
    drop = nn.Dropout(0.5)
    held = frozenset([drop])
    changed_between(lambda x: x * next(iter(held)).p, lambda: setattr(drop, "p", 0.25))


def test_the_end_of_a_long_chain():
    chain = last = Settings(1.0)
    for _ in range(40):
        chain = Settings(chain)

    def end():
        value = chain
        while isinstance(value, Settings):
            value = value.scale
        return value

    changed_between(lambda x: x * end(), lambda: setattr(last, "scale", 2.0))


@pytest.mark.parametrize("make", [lambda: ctypes.c_double(1.0), lambda: multiprocessing.Value("d", 1.0)])
def test_numbers_that_lie_in_c(make):
    number = make()
    changed_between(lambda x: x * number.value, lambda: setattr(number, "value", 2.0))


def test_a_plain_namespace():
    space = types.SimpleNamespace(scale=2.0)
    changed_between(lambda x: x * space.scale, lambda: setattr(space, "scale", 3.0))


def test_how_classes_were_defined_is_compared_at_no_call():
    """A library of dataclasses has hundreds of objects that say so."""
    settings = Settings(2.0)
    call = aottrain.compile(lambda x: x * settings.scale, kernel="aten", capture="trace")
    call(ONE)
    told = call.report.graphs[0].guards[-1]
    assert int(told.split()[0].replace(",", "")) < 30, told


def test_another_module_of_the_same_name(monkeypatch):
    def module(scale):
        made = types.ModuleType("imported_inside")
        exec(f"def scaled(x): return x * {scale}", made.__dict__)
        return made

    def imports(x):
        import imported_inside

        return imported_inside.scaled(x)

    monkeypatch.setitem(sys.modules, "imported_inside", module(2))
    changed_between(imports, lambda: monkeypatch.setitem(sys.modules, "imported_inside", module(7)))


def later(x):
    try:
        return x * DEFINED_LATER  # noqa: F821
    except NameError:
        return x * 2


def test_globals_that_are_there_later(monkeypatch):
    changed_between(later, lambda: monkeypatch.setitem(globals(), "DEFINED_LATER", 7.0))
    changed_between(lambda x: x * max(2, 3), lambda: monkeypatch.setitem(globals(), "max", lambda *args: 7))


def sets_a_global(x):
    global SET_INSIDE
    SET_INSIDE = 3
    return x * SET_INSIDE


def test_a_global_that_the_program_makes_is_made_by_eager_alone():
    call = aottrain.compile(sets_a_global, kernel="aten", capture="trace")
    with pytest.warns(UserWarning, match="changes Python state"):
        assert torch.equal(call(ONE), ONE * 3)
    assert SET_INSIDE == 3  # noqa: F821


class ConfiguredOnce(nn.Module):
    """Writes down at the first call what it has found out, as losses of `transformers` do in a configuration."""

    def __init__(self, **values):
        super().__init__()
        self.config = types.SimpleNamespace(**values)

    def forward(self, x):
        if getattr(self.config, "kind", None) is None:
            self.config.kind = "regression"
        return x * len(self.config.kind)


@pytest.mark.parametrize("values", [{"kind": None}, {}], ids=["another", "a new one"])
def test_what_a_program_changes_is_named(values):
    call = aottrain.compile(ConfiguredOnce(**values), kernel="aten", capture="trace")
    with pytest.warns(UserWarning, match=r"changes Python state.* \(kind\)"):
        assert torch.equal(call(ONE), ONE * 10)
    assert torch.equal(call(ONE), ONE * 10)
    assert len(call.report.graphs) == len(call.report.fallbacks) == 1 and call.report.fallbacks[0].count == 1


def test_a_method_of_torch_s_that_is_replaced(monkeypatch):
    layer, old = nn.Linear(2, 2), nn.Linear.forward
    changed_between(
        lambda x: layer(x), lambda: monkeypatch.setattr(nn.Linear, "forward", lambda self, x: old(self, x) * 7)
    )


def test_a_size_of_nothing_where_the_program_divides_by_it():
    call = aottrain.compile(lambda x: x.roll(1, 0), kernel="aten", capture="trace", dynamic=True)
    call(torch.ones(4, 6, requires_grad=True))
    assert call(torch.ones(0, 6, requires_grad=True)).shape == (0, 6)


@pytest.fixture
def package(monkeypatch):
    outer, inner = types.ModuleType("reached"), types.ModuleType("reached.inner")
    exec("SCALE = 1.0\ndef scaled(x): return x * SCALE", inner.__dict__)
    outer.inner = inner
    for name, module in {"reached": outer, "reached.inner": inner}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(globals(), "reached", outer)
    return inner


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        return x * self.config.SCALE


WAYS = {
    "attribute of a package": lambda inner: lambda x: x * reached.inner.SCALE,  # noqa: F821
    "function of it": lambda inner: lambda x: reached.inner.scaled(x),  # noqa: F821
    "attribute of a module": Configured,
    "item": lambda inner: lambda x, places=({"here": inner},): x * places[0]["here"].SCALE,
}


@pytest.mark.parametrize("way", WAYS)
def test_constants_of_modules_that_are_attributes_or_items(package, way):
    changed_between(WAYS[way](package), lambda: setattr(package, "SCALE", 2.0))


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


@dataclass(slots=True)
class Inherited(Slotted):
    other: float = 1.0


class NamedAlone:
    __slots__ = "scale"

    def __init__(self):
        self.scale = 1.0


class Private:
    __slots__ = ("__scale",)

    def __init__(self):
        self.scale = 1.0

    scale = property(lambda self: self.__scale, lambda self, value: setattr(self, "_Private__scale", value))


@pytest.mark.parametrize("kind", [Inherited, NamedAlone, Private])
def test_slots_of_any_kind(kind):
    owner = kind()
    changed_between(lambda x: x * owner.scale, lambda: setattr(owner, "scale", 2.0))


class Listed(collections.deque):
    pass


class Number(float):
    pass


class Kind(enum.IntEnum):
    ONE = 1


def not_run():
    raise AssertionError("it is asked for its attribute alone")


@pytest.mark.parametrize(
    "make", [Listed, lambda: Number(1), lambda: functools.partial(not_run), lambda: Kind.ONE, lambda: not_run]
)
def test_attributes_of_what_has_few(make):
    owner = make()
    owner.scale = 1.0
    try:
        changed_between(lambda x: x * owner.scale, lambda: setattr(owner, "scale", 2.0))
    finally:
        del owner.scale


def test_what_is_reached_through_keys_views_and_methods_in_c():
    drop = nn.Dropout(0.5)
    keyed = {drop: 1}
    changed_between(lambda x: x * next(iter(keyed)).p, lambda: setattr(drop, "p", 0.25))
    named = {"scale": 1.0}
    values = named.values()
    changed_between(lambda x: x * sum(values), lambda: named.update(scale=2.0))
    items = [1.0]
    get = items.__getitem__
    changed_between(lambda x: x * get(0), lambda: items.__setitem__(0, 2.0))


class Counting(nn.Module):
    """Of what is refused for it, nothing that the trace has done stays."""

    def __init__(self):
        super().__init__()
        self.steps, self.sizes = numpy.zeros((2, 2)), array.array("d", [0.0])
        self.last = contextvars.ContextVar("last", default=0)
        self.turned = self.steps.T
        self.number, self.read = ctypes.c_double(0.0), memoryview(self.sizes).toreadonly()
        self.fixed = self.steps.view()
        self.fixed.flags.writeable = False

    def forward(self, x):
        self.steps[0] += 1
        self.turned[0, 1] += 1
        self.sizes[0] += x.shape[0]
        self.number.value += 1
        self.last.set(self.last.get() + 1)
        return x * 2


def test_what_a_refused_trace_wrote_is_undone():
    model = Counting()
    call = aottrain.compile(model, kernel="aten", capture="trace")
    with pytest.warns(UserWarning, match="changes Python state"):
        for _ in range(3):
            call(ONE)
    assert model.steps.tolist() == [[3, 3], [3, 0]] and model.sizes[0] == 6 and model.last.get() == 3
    assert model.number.value == 3 and model.read[0] == 6 and model.fixed.tolist() == model.steps.tolist()


class Label(tuple):
    """Says nothing of itself."""

    def __len__(self):
        raise TypeError("it does not say")

    def __iter__(self):
        raise TypeError("it does not say")

    def __getitem__(self, item):
        raise TypeError("it does not say")

    scale = property(lambda self: tuple.__getitem__(self, 1)[0])


class Row(list):
    __len__ = __iter__ = __getitem__ = Label.__len__
    scale = property(lambda self: list.__getitem__(self, 0))


class Hidden(dict):
    """Shows none of its items."""

    __len__ = lambda self: 0  # noqa: E731
    __iter__ = lambda self: iter(())  # noqa: E731
    keys = values = items = __getitem__ = Label.__len__
    scale = property(lambda self: dict.__getitem__(self, "scale"))


class Chosen(set):
    __len__ = __iter__ = Label.__len__
    scale = property(lambda self: 3.0 if set.__contains__(self, "large") else 2.0)


@pytest.mark.parametrize(
    ("container", "change"),
    [
        (Label(("scale", [2.0])), lambda label: tuple.__getitem__(label, 1).__setitem__(0, 3.0)),
        (Row([2.0]), lambda row: list.__setitem__(row, 0, 3.0)),
        (Hidden(scale=2.0), lambda table: dict.__setitem__(table, "scale", 3.0)),
        (Chosen(), lambda chosen: chosen.add("large")),
    ],
)
def test_a_container_whose_class_reads_it_otherwise(container, change):
    changed_between(lambda x: x * container.scale, lambda: change(container))
    changed_between(lambda x: x * container.scale, lambda: None, num_programs=1)


def test_what_a_refused_trace_wrote_to_such_a_container_is_undone():
    row, table = Row([2.0]), Hidden(scale=2.0)

    def counting(x):
        list.append(row, 1.0)
        dict.update(table, scale=table.scale + 1, other=1)
        return x * 2

    call = aottrain.compile(counting, kernel="aten", capture="trace")
    with pytest.warns(UserWarning, match="changes Python state"):
        for _ in range(3):
            call(ONE)
    assert list(list.__iter__(row)) == [2.0, 1.0, 1.0, 1.0] and table.scale == 5.0


class State:
    def __init__(self, state=None):
        self.factors = dict(state.factors) if state else {}
        self.names = list(state.names) if state else []

    def factor(self, name):
        if name not in self.factors:
            self.factors[name] = 2.0
            self.names.append(name)
        return self.factors[name]


class Registry:
    """Never writes to its state: each question is asked of a copy, which stands in its place."""

    def __init__(self):
        self.state = State()

    def factor(self, name):
        self.state = State(self.state)
        return self.state.factor(name)


def test_what_is_replaced_by_an_equal_is_the_same():
    registry = Registry()

    def function(x):
        return x * registry.factor("a")

    function(ONE)
    changed_between(function, lambda: None, num_programs=1)
    changed_between(function, lambda: function(ONE), num_programs=1)
    changed_between(function, lambda: registry.state.factors.update(a=3.0))
    changed_between(function, lambda: setattr(registry, "state", State()))
    assert registry.factor("a") == 2.0 and len(registry.state.names) == 1


def test_a_module_that_asks_for_classes_is_the_same_after_a_trace(monkeypatch):
    """Its `type` is another one while a trace runs, and no name of its own."""
    asked = types.ModuleType("asked")
    exec("def kind(x):\n    return type(x)", vars(asked))
    monkeypatch.setitem(globals(), "asked", asked)

    def then(x):
        return x * 2 if asked.kind(x) is type(x) else x

    changed_between(lambda x: then(x) if asked.kind(x) else x, lambda: None, num_programs=1)


def test_an_array_of_dates():
    days = numpy.array(["2020-01-01"], dtype="datetime64[D]")
    changed_between(lambda x: x * days.astype(int)[0], lambda: days.__iadd__(1))
