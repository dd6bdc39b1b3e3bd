"""What a program can read beside its arguments, found before it reads it: modules, closures, globals, attributes."""

from __future__ import annotations

import collections.abc
import contextvars
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn

from aottrain.compat_dispatch import TRACERS
from aottrain.compat_dynamo import enters_dynamo
from aottrain.errors import UnsupportedError
from aottrain.guards.assigned import Assigned, Without
from aottrain.guards.bytecode import codes_of, globals_of, names_of
from aottrain.guards.classes import NAME, Classes, named
from aottrain.guards.containers import MISSING, WRAPPERS, Attributes, Call, Cell, Items, Slot, Variable, shown
from aottrain.guards.contents import GENERATORS, Contents, Generators, is_memory
from aottrain.guards.guards import describe
from aottrain.guards.lifetimes import can_die
from aottrain.guards.ownership import (
    DEFINITION,
    is_librarys,
    is_opaque,
    is_plain,
    is_torchs,
    is_users,
    is_users_package,
    refuse_scripted,
    slots_of,
)

_MAX_ITEMS = 256  # longer containers are guarded by the identity of their items, and of what those hold
_VIEWS = (collections.abc.KeysView, collections.abc.ValuesView, collections.abc.ItemsView)
_MAX_DEPTH = 100  # of objects and of functions that call each other: what lies deeper is not looked at


class Reach:
    """What is found from some objects on, as it is when it is found: `_visit` looks at one, `_run` at what a function
    that is about to run can read.

    `reachable`: identities of the tensors that are found; `seen`: of all.
    Raises UnsupportedError for what cannot be compared: an iterator.
    """

    def __init__(self, assigned: Assigned | None = None) -> None:
        self.assigned = assigned
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}  # known and not yet run
        self._ran, self._classes_asked = set[types.CodeType](), Classes()
        self._packages = set[str]()  # those that these functions come from
        self._slots, self._plain = list[Slot](), list[Slot]()
        self._sizes, self._caches = list[tuple[Any, int]](), list[tuple[Any, int]]()
        self._tensors: list[tuple[Callable[[], Tensor | None], tuple[Any, ...]]] = []
        self._copies, self._items = list[tuple[Any, Any]](), list[tuple[Any, list[int]]]()
        self.reachable, self.seen = set[int](), set[int]()
        self._classes = set[type]()
        self._contents, self._generators = Contents(), Generators()
        self._absent: dict[int, set[str]] = {}  # of a module, by the identity of its globals: names that it has not
        self._named = set[str]()  # by functions that have run
        # What has other things in it than a program asks for, which are looked at once it names them: Python's modules
        # that are attributes or items, and objects of torch's, such as optimizers, by what they are called there.
        self._modules: list[types.ModuleType] = []
        self._torchs: dict[str, list[Any]] = {}
        self._keep: list[Any] = []
        # What a path leads to from the target, and can be let go: once it is, that path leads elsewhere for good.
        self._mortal: dict[int, Any] = {}
        self._lasting = True  # False: where it starts at what may be let go though the program is still the same

    def _attributes(self, owner: Any) -> Attributes:
        return Attributes(weakref.proxy(owner) if id(owner) in self._mortal else owner)

    def _hold(self, value: Any) -> None:
        """Its identity stays taken, or it is known to be gone."""
        if self._lasting and can_die(value):
            self._mortal[id(value)] = value
        else:
            self._keep.append(value)

    def _run(self, frame: types.FrameType) -> None:
        """A function runs for the first time. Those with the same code are the same function with other closures."""
        code = frame.f_code
        if enters_dynamo(code):  # which under the modes of a trace would learn for good not to compile this
            raise UnsupportedError("the program calls what torch.compile compiles, or torch.cond and its like")
        self._classes_asked.look_at(frame)
        functions = self._functions.pop(code, [])
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if self.assigned is not None and package not in TRACERS and is_users_package(package):
            self.assigned.look_at(code)
        if not functions and package in self._packages and package != "aottrain":
            # Handed over by something that is not looked into, and maybe made for this call alone.
            self._lasting = False
            for value in gc.get_referrers(code):
                if isinstance(value, types.FunctionType):
                    self._keep.append(value)
                    self._visit_body(value, 1)
            self._lasting = True
        for inner in codes_of(code):  # what it defines reads its variables, and globals that are guarded with its own
            if not enters_dynamo(inner):
                self._ran.add(inner)
            functions += self._functions.pop(inner, [])
        for function in functions:
            self._visit_body(function, 1)
        self._named |= (names := names_of(code) - self._named)
        for name in names & self._torchs.keys():
            for value in self._torchs.pop(name):
                self._visit(value, 1)
        for module in tuple(self._modules):
            self._visit_names(module, names, 1)

    def _visit(self, value: Any, depth: int) -> None:
        if is_opaque(value) or id(value) in self.seen:
            return
        self.seen.add(id(value))
        self._hold(value)
        if isinstance(value, Tensor):
            self.reachable.add(id(value))
            self._tensors.append((lambda: value, describe(value)))
            self._visit_table(vars(value), depth)
        elif isinstance(value, types.ModuleType):
            if not is_librarys(value):
                self._modules.append(value)
                self._visit_names(value, self._named, depth)
        elif isinstance(value, nn.Module):
            self._visit_module(value, depth)
        elif isinstance(value, type):
            self._visit_class(value, depth)
        elif isinstance(value, (dict, collections.ChainMap, types.MappingProxyType)):
            self._visit_table(value, depth)
            if len(keys := shown(value)):  # of an empty one its size is known
                self._hold_all(keys)
                self._items.append((keys, list(map(id, keys))))
                for key in keys:
                    if not isinstance(key, (str, type, types.FunctionType)):
                        self._visit(key, depth + 1)
        elif isinstance(value, (set, frozenset, collections.deque)):
            self._hold_all(items := shown(value))
            if not isinstance(value, frozenset):
                self._items.append((items, list(map(id, items))))
                self._copies.append((value, list(items)))
            self._visit_own(value, depth)
            for item in items:
                self._visit(item, depth + 1)
        elif isinstance(value, _VIEWS) and hasattr(value, "mapping"):
            self._visit(value.mapping, depth)
        elif isinstance(value, (list, tuple)):
            self._visit_list(value, depth)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, depth)
            self._visit(value.__func__, depth)
        elif isinstance(value, functools.partial):
            self._visit_own(value, depth)
            for part in (value.func, value.args, value.keywords):
                self._visit(part, depth)
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            if isinstance(value.__self__, (list, dict, set, collections.deque)):  # others may well be an iterator
                self._visit(value.__self__, depth)
        elif isinstance(value, (staticmethod, classmethod, property)):
            self._visit(value.fget if isinstance(value, property) else value.__func__, depth)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._caches.append((value, value.cache_info().misses))
            self._visit_own(value, depth)
            self._visit(value.__wrapped__, depth)
        elif isinstance(value, WRAPPERS):
            self._visit_table(vars(value), depth)
        elif isinstance(value, weakref.ref):
            self._slot(Call(value), None, value(), depth)
        elif isinstance(value, contextvars.ContextVar):
            self._slot(table := Variable(value), None, table.get(None, MISSING), depth)
        elif is_memory(value):
            self._contents.add(value)
            self._visit_own(value, depth)
        elif isinstance(value, GENERATORS):
            self._generators.add(value)
        elif isinstance(value, Iterator):
            raise UnsupportedError(f"the program can reach a {type(value).__name__}, which every call moves on")
        elif depth < _MAX_DEPTH and (is_users(value) or is_dataclass(value) or is_torchs(value)):
            self._visit_class(type(value), depth + 1)
            self._slots.append((self._attributes(value), "__class__", type(value)))
            if isinstance(getattr(value, "__dict__", None), dict):
                self._visit_table(vars(value), depth)
            for name in slots_of(type(value)):
                self._slot(self._attributes(value), name, getattr(value, name, MISSING), depth)

    def _visit_module(self, module: nn.Module, depth: int) -> None:
        refuse_scripted(module)
        self._visit(type(module), depth + 1)  # before the class tells of attributes
        if self.assigned is not None:
            self.assigned.met(module)
            self.reachable.update(map(id, self.assigned.inputs()))
        self._visit_table(vars(module), depth)
        for name in ("_parameters", "_buffers", "_modules"):
            self._visit_table(vars(module)[name], depth)
        self._slots.append((self._attributes(module), "__class__", type(module)))

    def _visit_own(self, value: Any, depth: int) -> None:
        """The attributes of a container or the like, whose class may be a user's."""
        if own := getattr(value, "__dict__", None):
            self._visit_table(own, depth)

    def _hold_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if id(value) not in self.seen:  # what is seen is held
                self._hold(value)

    def _visit_class(self, cls: type, depth: int) -> None:
        if cls in self._classes:
            return
        self._classes.add(cls)
        if not is_users(cls):
            if issubclass(cls, nn.Module):
                self._slots.append((vars(cls), "forward", vars(cls).get("forward", MISSING)))
            return
        table: Any = vars(cls)  # a live view
        self._sizes.append((table, len(table)))
        self._copies.append((cls, dict(table)))
        for key, value in table.items():
            if key not in DEFINITION:
                self._slot(table, key, value, depth)
        for base in (*cls.__bases__, type(cls)):
            self._visit_class(base, depth)

    def _visit_table(self, table: Any, depth: int) -> None:
        if type(table) is not dict and hasattr(table, "__dict__"):
            self._visit_table(vars(table), depth)
        items = shown(table)
        self._copies.append((table, dict(items.items())))
        if len(items) > _MAX_ITEMS and depth > 0:
            self._hold_all([*items, *items.values()])
            self._items += [(items, list(map(id, items))), (items.values(), list(map(id, items.values())))]
            for value in items.values():
                self._visit(value, depth + 1)
            return
        assigned = frozenset() if self.assigned is None else self.assigned.left_out(table)
        sized: Any = Without(items, assigned) if assigned else items
        self._sizes.append((sized, len(sized)))
        for key, value in items.items():
            if key not in assigned:
                self._slot(table, key, value, depth)

    def _visit_list(self, container: Any, depth: int) -> None:
        items = shown(container)
        if len(items) > _MAX_ITEMS:
            self._hold_all(items)
            self._items.append((items, list(map(id, items))))
            for value in items:
                self._visit(value, depth + 1)
            return
        if hasattr(container, "__dict__"):
            self._visit_table(vars(container), depth)
        if isinstance(container, list):
            self._sizes.append((items, len(items)))
            self._copies.append((container, list(items)))
        table = Items(items)
        for i, value in enumerate(items):
            self._slot(table, i, value, depth)

    def _slot(self, table: Any, key: Any, value: Any, depth: int) -> None:
        if is_plain(value):
            # nan is not equal to itself: by identity.
            if value == value:
                self._plain.append((table, key, value))
            else:
                self._slots.append((table, key, value))
            return
        self._slots.append((table, key, value))
        if isinstance(key, str) and key not in self._named and is_torchs(value):
            self._torchs.setdefault(key, []).append(value)  # an optimizer, say, whose state is none of the program's
        else:
            self._visit(value, depth + 1)

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        if not is_users(function) and function.__module__ != "functools":
            return
        self._packages.add(str(function.__module__).partition(".")[0])
        if vars(function).keys() - {"__wrapped__"}:  # others than a decorator's
            self._visit_table(vars(function), depth)
        if function.__code__ in self._ran:
            self._visit_body(function, depth)
        else:
            self._functions.setdefault(function.__code__, []).append(function)

    def _visit_body(self, function: types.FunctionType, depth: int) -> None:
        names = names_of(function.__code__)
        for cell in function.__closure__ or ():
            table = Cell(cell)
            self._slot(table, None, table.get(None, None), depth)
            self._visit_names(table.get(None, None), names, depth)
        for name in ("__defaults__", "__kwdefaults__", "__code__"):
            self._slot(self._attributes(function), name, getattr(function, name), depth)
        self._visit_table(vars(function), depth)
        if depth <= _MAX_DEPTH:
            there = function.__globals__
            for name in (known := globals_of(function.__code__)) & named(there):
                if isinstance(there[name], types.ModuleType):
                    self._slots.append((there, name, there[name]))
                    self._visit_names(there[name], names, depth)
                else:
                    self._slot(there, name, there[name], depth)
            # Of builtins, and of what is not there yet, a global of that name would take the place.
            absent = known - there.keys() - self._absent.setdefault(id(there), {NAME})
            self._absent[id(there)] |= absent
            self._slots += [(there, name, MISSING) for name in absent]
            for name in names & sys.modules.keys():  # imported inside
                if is_users(sys.modules[name]):
                    self._slots.append((sys.modules, name, sys.modules[name]))
                    self._visit_names(sys.modules[name], names, depth)

    def _visit_names(self, module: Any, names: set[str], depth: int) -> None:
        """Of a module that a function can reach, what the function may name. Of torch's: whether it is still that."""
        if not isinstance(module, types.ModuleType):
            return
        table = vars(module)
        for name in names & named(table):
            value = table[name]
            if is_users(module):
                self._slot(table, name, value, depth)
            elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
                self._slots.append((table, name, value))
            elif isinstance(value, types.ModuleType) and value is not module and name in ("nn", "functional"):
                self._visit_names(value, names, depth)
