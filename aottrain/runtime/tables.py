"""What containers hold under their keys, read one by one, and compared all at once: a guard of a model of a hundred
modules has thousands of them, and is asked before each call."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import getitem, is_
from typing import Any

MISSING = object()

Slot = tuple[Any, Any, Any]  # a table, a key, and what is there


class Cell:
    """A closure cell, read like a dictionary."""

    def __init__(self, cell: Any):
        self.cell = cell

    def get(self, key: Any, default: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # the cell has been emptied
            return default


class Items:
    """Those of a list or a tuple."""

    def __init__(self, items: Any):
        self.items = items

    def get(self, key: int, default: Any) -> Any:
        return self.items[key] if key < len(self.items) else default


class Call:
    """What a function of no arguments gives: the object of a weak reference, the value of a context variable."""

    def __init__(self, read: Callable[[], Any]):
        self.read = read

    def get(self, key: Any, default: Any) -> Any:
        return self.read()


class Attributes:
    """Attributes that are in no `__dict__`: of functions, of classes with slots."""

    def __init__(self, owner: Any):
        self.owner = owner

    def get(self, key: str, default: Any) -> Any:
        return getattr(self.owner, key, default)


def read(table: Any, key: Any) -> Any:
    return dict.get(table, key, MISSING) if isinstance(table, dict) else table.get(key, MISSING)


class Comparison:
    """holds(): each of `same` is the same object, each of `equal`, plain values, of the same type and equal, and each
    of `sizes` as long.

    Nothing here is a step of Python's own for each: `map` calls functions of C with functions of C.
    """

    def __init__(self, same: Sequence[Slot], equal: Sequence[Slot], sizes: Sequence[tuple[Any, int]]):
        self._same, self._equal = _grouped(same), _grouped(equal)
        self._kinds = [list(map(type, known)) for _, known in self._equal]
        self._sized, self._sizes = [table for table, _ in sizes], [size for _, size in sizes]

    def holds(self) -> bool:
        if list(map(len, self._sized)) != self._sizes:
            return False
        try:
            for reader, known in self._same:
                if not all(map(is_, reader(), known)):
                    return False
            for (reader, known), kinds in zip(self._equal, self._kinds, strict=True):
                values = list(reader())
                if not all(map(is_, map(type, values), kinds)) or values != known:
                    return False
        except IndexError:  # of what has the length that it had, but is no list of Python's own
            return False
        return True


Reader = Callable[[], Iterable[Any]]


def _grouped(slots: Sequence[Slot]) -> list[tuple[Reader, list[Any]]]:
    """For each kind of table what reads all that there are, and what they held."""
    groups: dict[Any, tuple[list[Any], list[Any], list[Any]]] = {}
    for table, key, known in slots:
        kind, source = _kind(table)
        for column, value in zip(groups.setdefault(kind, ([], [], [])), (source, key, known), strict=True):
            column.append(value)
    return [(_reader(kind, tables, keys), known) for kind, (tables, keys, known) in groups.items()]


def _kind(table: Any) -> tuple[Any, Any]:
    """A function that reads such tables, and what it reads."""
    if isinstance(table, dict):
        return dict.get, table
    if isinstance(table, types.MappingProxyType):
        return types.MappingProxyType.get, table
    if isinstance(table, Attributes):
        return getattr, table.owner
    if isinstance(table, Items) and type(table.items) in (list, tuple):
        return getitem, table.items
    return read, table


def _reader(kind: Any, tables: list[Any], keys: list[Any]) -> Reader:
    if kind in (getitem, read):
        return lambda: map(kind, tables, keys)
    return lambda: map(kind, tables, keys, repeat(MISSING))
