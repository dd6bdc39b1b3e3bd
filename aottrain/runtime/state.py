"""Guards on what a program can read beside its arguments: the module tree, closures, globals and attributes."""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import io
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import numpy
from torch import Tensor, nn

from aottrain.errors import UnsupportedError
from aottrain.ir.values import PLAIN_TYPES
from aottrain.runtime.codes import codes_of, globals_of, names_of
from aottrain.runtime.guards import describe
from aottrain.runtime.tables import MISSING, Attributes, Call, Cell, Comparison, Items, Slot, read

# Containers longer than this are guarded by the identity of their items, and of what those hold.
_MAX_ITEMS = 256
# Of objects and of functions that call each other: what lies deeper is not looked at.
_MAX_DEPTH = 32
# Memory that is compared by content before each call.
_MAX_BYTES = 1 << 16
# What the code of a program does with these is refused while it is traced; they lead to all else in the process.
_OPAQUE = (io.IOBase, logging.Filterer, logging.Manager)
_NOT_USERS = {"torch", "numpy", *sys.stdlib_module_names}
# Containers of Python's own that keep another one in an attribute.
_WRAPPERS = (
    collections.UserDict,
    collections.UserList,
    weakref.WeakValueDictionary,
    weakref.WeakKeyDictionary,
    weakref.WeakSet,
    functools.partialmethod,
    functools.cached_property,
    functools.singledispatchmethod,
)


class StateGuard:
    """What a call of `target` with these objects among its arguments can reach, as it was when this guard was made.

    holds(): tensors and modules are the same objects with the same metadata; plain values are equal; containers have
    the same items. `reachable`: identities of the tensors that are guarded; `seen`: of all. restore() undoes changes.
    watching(): around every trace. What a function reads beside its arguments (closure, globals, defaults) is looked at
    when it first runs: of a large library a program runs little, and the rest of it is none of its concern.
    Raises UnsupportedError for what cannot be compared: an iterator.
    """

    def __init__(self, target: Any, arguments: Iterable[Any] = ()):
        self.reachable: set[int] = set()
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}  # known and not yet run
        self._ran: set[types.CodeType] = set()
        self._packages: set[str] = set()  # those that these functions come from
        self._slots: list[Slot] = []
        self._plain: list[Slot] = []
        self._sizes: list[tuple[Any, int]] = []
        self._compared: tuple[int, Comparison] | None = None
        self._tensors: list[tuple[Tensor, tuple[Any, ...]]] = []
        self._copies: list[tuple[Any, Any]] = []
        self._items: list[tuple[Any, list[int]]] = []
        self.seen: set[int] = set()
        self._classes: set[type] = set()
        self._caches: list[tuple[Any, int]] = []
        self._contents: list[tuple[Callable[[], bytes], bytes]] = []
        self._keep: list[Any] = []
        for value in (target, *arguments):
            self._visit(value, 0)

    def holds(self) -> bool:
        return (
            self._comparison().holds()
            and all(list(map(id, items)) == known for items, known in self._items)
            and all(describe(tensor) == known for tensor, known in self._tensors)
            and all(function.cache_info().misses == misses for function, misses in self._caches)
            and all(read() == known for read, known in self._contents)
        )

    def _comparison(self) -> Comparison:
        """Made anew where more is guarded than when it was made."""
        size = len(self._slots) + len(self._plain) + len(self._sizes)
        if self._compared is None or self._compared[0] != size:
            self._compared = size, Comparison(self._slots, self._plain, self._sizes)
        return self._compared[1]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, guard what each function that runs can read, as it is before the function runs."""
        before = sys.getprofile()

        def watch(frame: types.FrameType, event: str, called: Any) -> None:
            if event == "call" and frame.f_code not in self._ran:
                sys.setprofile(None)  # not this one's own calls
                try:
                    self._run(frame)
                finally:
                    sys.setprofile(watch)
            if before is not None:
                before(frame, event, called)

        sys.setprofile(watch)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _run(self, frame: types.FrameType) -> None:
        """A function runs for the first time. Those with the same code are the same function with other closures."""
        code = frame.f_code
        functions = self._functions.pop(code, [])
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if not functions and package in self._packages and package != "aottrain":
            # Handed over by something that is not looked into.
            functions = [value for value in gc.get_referrers(code) if isinstance(value, types.FunctionType)]
        for inner in codes_of(code):  # what it defines reads its variables, and globals that are guarded with its own
            self._ran.add(inner)
            functions += self._functions.pop(inner, [])
        for function in functions:
            self._visit_body(function, 1)

    def clear_caches(self) -> None:
        """Drop what functools.lru_cache and the like have kept of a trace: stand-ins."""
        for function, misses in self._caches:
            if function.cache_info().misses != misses:
                function.cache_clear()

    def restore(self) -> None:
        """Put the containers and attribute tables back as they were: what tracing did to them never happened."""
        for table, copy in self._copies:
            if isinstance(table, list):
                table[:] = copy
            elif isinstance(table, type):
                _restore_class(table, copy)
            elif isinstance(table, (set, collections.deque)):
                table.clear()
                getattr(table, "update" if isinstance(table, set) else "extend")(copy)
            elif list(map(id, table.values())) != list(map(id, copy.values())) or list(table) != list(copy):
                table.clear()
                table.update(copy)
        for table, key, known in [*self._slots, *self._plain]:
            if read(table, key) is known:
                continue
            if isinstance(table, Cell):
                table.cell.cell_contents = known
            elif isinstance(table, Attributes):
                setattr(table.owner, key, known)
            elif isinstance(table, dict):  # the globals of a function
                table[key] = known

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, (*PLAIN_TYPES, types.ModuleType, types.BuiltinFunctionType, *_OPAQUE)):
            return
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        self._keep.append(value)  # an identity stays taken while its object lives
        if isinstance(value, Tensor):
            self.reachable.add(id(value))
            self._tensors.append((value, describe(value)))
            if vars(value):
                self._visit_table(vars(value), depth)
        elif isinstance(value, nn.Module):
            self._visit_table(vars(value), depth)
            for name in ("_parameters", "_buffers", "_modules"):
                self._visit_table(vars(value)[name], depth)
            self._visit(type(value), depth + 1)
            self._slots.append((Attributes(value), "__class__", type(value)))
        elif isinstance(value, type):
            self._visit_class(value, depth)
        elif isinstance(value, (dict, collections.ChainMap, types.MappingProxyType)):
            self._visit_table(value, depth)
            if value:  # of an empty one its size is known
                self._items.append((value, list(map(id, value))))
        elif isinstance(value, (set, collections.deque)):
            self._items.append((value, list(map(id, value))))
            self._copies.append((value, list(value)))
            for item in value:
                self._visit(item, depth + 1)
        elif isinstance(value, (list, tuple)):
            self._visit_list(value, depth)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, depth)
            self._visit(value.__func__, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(part, depth)
        elif isinstance(value, (staticmethod, classmethod)):
            self._visit(value.__func__, depth)
        elif isinstance(value, property):
            self._visit(value.fget, depth)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._caches.append((value, value.cache_info().misses))
            self._visit(value.__wrapped__, depth)
        elif isinstance(value, _WRAPPERS):
            self._visit_table(vars(value), depth)
        elif isinstance(value, weakref.ref):
            self._slot(Call(value), None, value(), depth)
        elif isinstance(value, contextvars.ContextVar):
            self._slot(Call(lambda: value.get(None)), None, value.get(None), depth)
        elif isinstance(value, (bytearray, memoryview, numpy.ndarray)) or type(value).__module__ == "array":
            self._visit_memory(value)
        elif isinstance(value, Iterator):
            raise UnsupportedError(f"the program can reach a {type(value).__name__}, which every call moves on")
        elif depth < _MAX_DEPTH and (_is_users(value) or is_dataclass(value)):
            self._visit_class(type(value), depth + 1)
            self._slots.append((Attributes(value), "__class__", type(value)))
            if isinstance(getattr(value, "__dict__", None), dict):
                self._visit_table(vars(value), depth)
            for name in getattr(type(value), "__slots__", ()):
                self._slot(Attributes(value), name, getattr(value, name, MISSING), depth)

    def _visit_memory(self, value: Any) -> None:
        if len(content := value.tobytes() if hasattr(value, "tobytes") else bytes(value)) > _MAX_BYTES:
            raise UnsupportedError(f"the program can reach a {type(value).__name__} that is too large to compare")
        if isinstance(value, numpy.ndarray) and value.dtype.hasobject:
            raise UnsupportedError("the program can reach a NumPy array of objects")
        self._contents.append((getattr(value, "tobytes", lambda: bytes(value)), content))

    def _visit_class(self, cls: type, depth: int) -> None:
        if not _is_users(cls) or cls in self._classes:
            return
        self._classes.add(cls)
        table: Any = vars(cls)  # a live view
        self._sizes.append((table, len(table)))
        self._copies.append((cls, dict(table)))
        for key, value in table.items():
            if key not in ("__dict__", "__weakref__", "__doc__"):
                self._slot(table, key, value, depth)
        for base in (*cls.__bases__, type(cls)):
            self._visit_class(base, depth)

    def _visit_table(self, table: Any, depth: int) -> None:
        if type(table) is not dict and hasattr(table, "__dict__"):
            self._visit_table(vars(table), depth)
        if len(table) > _MAX_ITEMS and depth > 0:
            self._copies.append((table, dict(table)))
            self._items += [(table, list(map(id, table))), (table.values(), list(map(id, table.values())))]
            for value in table.values():
                self._visit(value, depth + 1)
            return
        self._sizes.append((table, len(table)))
        self._copies.append((table, dict(table)))
        for key, value in table.items():
            self._slot(table, key, value, depth)

    def _visit_list(self, items: Any, depth: int) -> None:
        if len(items) > _MAX_ITEMS:
            self._keep.append(list(items))
            self._items.append((items, list(map(id, items))))
            for value in items:
                self._visit(value, depth + 1)
            return
        if hasattr(items, "__dict__"):
            self._visit_table(vars(items), depth)
        if isinstance(items, list):
            self._sizes.append((items, len(items)))
            self._copies.append((items, list(items)))
        table = Items(items)
        for i, value in enumerate(items):
            self._slot(table, i, value, depth)

    def _slot(self, table: Any, key: Any, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN_TYPES):
            # nan is not equal to itself: by identity.
            if value == value:
                self._plain.append((table, key, value))
            else:
                self._slots.append((table, key, value))
            return
        self._slots.append((table, key, value))
        self._visit(value, depth + 1)

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        if not _is_users(function) and function.__module__ != "functools":
            return
        self._packages.add(str(function.__module__).partition(".")[0])
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
            self._slot(Attributes(function), name, getattr(function, name), depth)
        self._visit_table(vars(function), depth)
        if depth <= _MAX_DEPTH:
            for name in globals_of(function.__code__) & function.__globals__.keys():
                self._slot(function.__globals__, name, function.__globals__[name], depth)
                self._visit_names(function.__globals__[name], names, depth)
            for name in names & sys.modules.keys():  # imported inside
                if _is_users(sys.modules[name]):
                    self._visit_names(sys.modules[name], names, depth)

    def _visit_names(self, module: Any, names: set[str], depth: int) -> None:
        """Of a module that a function can reach, what the function may name. Of torch's: whether it is still that."""
        if not isinstance(module, types.ModuleType):
            return
        table = vars(module)
        for name in names & table.keys():
            value = table[name]
            if _is_users(module):
                self._slot(table, name, value, depth)
            elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
                self._slots.append((table, name, value))
            elif isinstance(value, types.ModuleType) and value is not module and name in ("nn", "functional"):
                self._visit_names(value, names, depth)


def _restore_class(cls: type, copy: dict[str, Any]) -> None:
    for key in [key for key in vars(cls) if key not in copy]:
        delattr(cls, key)
    for key, value in copy.items():
        if vars(cls)[key] is not value:
            setattr(cls, key, value)


def _is_users(value: Any) -> bool:
    """Whether an object is the user's, and not torch's or Python's own. Of Python's own, what holds other objects is
    the user's: instances of its classes, and its modules, whose constants can be replaced."""
    module = getattr(value, "__module__", None) or type(value).__module__
    if isinstance(value, types.ModuleType):
        module = value.__name__
    package = str(module).partition(".")[0]
    if isinstance(value, (type, types.FunctionType)):
        return package not in _NOT_USERS
    return package not in ("torch", "builtins", "numpy", "collections", "functools", "weakref")


def check_reachable(guard: StateGuard, captured: Iterable[Tensor]) -> None:
    """Raises UnsupportedError where a captured tensor came from a place that is not guarded."""
    for tensor in captured:
        if id(tensor) not in guard.reachable:
            raise UnsupportedError(f"tensor {tuple(tensor.shape)} is read from a place that cannot be guarded")
