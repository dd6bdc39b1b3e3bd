"""Guards on what a program can read beside its arguments: the module tree, closures, globals and attributes."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from aottrain.compat import PLAIN_TYPES
from aottrain.errors import UnsupportedError
from aottrain.runtime.guards import describe

# Containers longer than this, and objects nested deeper, are guarded by identity alone.
_MAX_ITEMS = 256
_MAX_DEPTH = 4
_MISSING = object()


class _Cell:
    """A closure cell, read like a dictionary."""

    def __init__(self, cell: Any):
        self.cell = cell

    def get(self, key: Any, default: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # the cell has been emptied
            return default


class _List:
    def __init__(self, items: Any):
        self.items = items

    def get(self, key: int, default: Any) -> Any:
        return self.items[key] if key < len(self.items) else default


class StateGuard:
    """What a call of `target` can reach, as it was when this guard was made.

    holds(): tensors and modules are the same objects with the same metadata; plain values are equal; containers have
    the same length. `reachable`: identities of the tensors that are guarded. restore() undoes shallow changes.
    """

    def __init__(self, target: Any):
        self.reachable: set[int] = set()
        self._slots: list[tuple[Any, Any, Any]] = []
        self._plain: list[tuple[Any, Any, Any, type]] = []
        self._sizes: list[tuple[Any, int]] = []
        self._tensors: list[tuple[Tensor, tuple[Any, ...]]] = []
        self._copies: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._keep: list[Any] = []
        self._visit(target, 0)

    def holds(self) -> bool:
        return (
            all(
                type(value := table.get(key, _MISSING)) is kind and value == known
                for table, key, known, kind in self._plain
            )
            and all(table.get(key, _MISSING) is known for table, key, known in self._slots)
            and all(len(table) == size for table, size in self._sizes)
            and all(describe(tensor) == known for tensor, known in self._tensors)
        )

    def restore(self) -> None:
        """Put the containers and attribute tables back as they were: what tracing did to them never happened."""
        for table, copy in self._copies:
            if isinstance(table, list):
                table[:] = copy
            elif list(map(id, table.values())) != list(map(id, copy.values())) or list(table) != list(copy):
                table.clear()
                table.update(copy)

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, (*PLAIN_TYPES, type, types.ModuleType, types.BuiltinFunctionType)):
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._keep.append(value)  # an identity stays taken while its object lives
        if isinstance(value, Tensor):
            self.reachable.add(id(value))
            self._tensors.append((value, describe(value)))
        elif isinstance(value, nn.Module):
            self._visit_table(vars(value), depth)
            for name in ("_parameters", "_buffers", "_modules"):
                self._visit_table(vars(value)[name], depth)
            self._visit(type(value).forward, depth + 1)
        elif isinstance(value, dict):
            self._visit_table(value, depth)
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
        elif depth < _MAX_DEPTH and isinstance(getattr(value, "__dict__", None), dict) and _is_users(value):
            self._visit_table(vars(value), depth)

    def _visit_table(self, table: dict[Any, Any], depth: int) -> None:
        if len(table) > _MAX_ITEMS and depth > 0:
            return
        self._sizes.append((table, len(table)))
        self._copies.append((table, dict(table)))
        for key, value in table.items():
            self._slot(table, key, value, depth)

    def _visit_list(self, items: Any, depth: int) -> None:
        if len(items) > _MAX_ITEMS:
            return
        if isinstance(items, list):
            self._sizes.append((items, len(items)))
            self._copies.append((items, list(items)))
        table = _List(items)
        for i, value in enumerate(items):
            self._slot(table, i, value, depth)

    def _slot(self, table: Any, key: Any, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN_TYPES):
            # nan is not equal to itself: by identity.
            if value == value:
                self._plain.append((table, key, value, type(value)))
            else:
                self._slots.append((table, key, value))
            return
        self._slots.append((table, key, value))
        self._visit(value, depth + 1)

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        if not _is_users(function):
            return
        for cell in function.__closure__ or ():
            table = _Cell(cell)
            self._slot(table, None, table.get(None, None), depth)
        self._visit_list(function.__defaults__ or (), depth)
        self._visit_table(function.__kwdefaults__ or {}, depth)
        if depth <= _MAX_DEPTH:
            for name in _global_names(function.__code__):
                if name in function.__globals__:
                    self._slot(function.__globals__, name, function.__globals__[name], depth)


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _is_users(value: Any) -> bool:
    """Whether an object is the user's, and not torch's or Python's own."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).split(".")[0] not in ("torch", "builtins", "numpy", "collections", "functools", "weakref")


def check_reachable(guard: StateGuard, captured: Iterable[Tensor]) -> None:
    """Raises UnsupportedError where a captured tensor came from a place that is not guarded."""
    for tensor in captured:
        if id(tensor) not in guard.reachable:
            raise UnsupportedError(f"tensor {tuple(tensor.shape)} is read from a place that cannot be guarded")
