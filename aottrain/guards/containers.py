"""What containers hold under their keys, read one by one, and compared all at once: a guard of a model of a hundred
modules has thousands of them, and is asked before each call."""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import repeat
from operator import getitem, is_
from typing import Any

MISSING = object()
_MADE_AT_RUN_TIME = 1 << 9  # Python's own flag of a class, Py_TPFLAGS_HEAPTYPE
# Containers of Python's own that keep another one in an attribute.
WRAPPERS = (
    collections.UserDict,
    collections.UserList,
    weakref.WeakValueDictionary,
    weakref.WeakKeyDictionary,
    weakref.WeakSet,
    functools.partialmethod,
    functools.cached_property,
    functools.singledispatchmethod,
)

_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)

Slot = tuple[Any, Any, Any]  # a table, a key, and what is there


def _native(value: Any) -> type:
    """The class of Python's own that a container is one of. What a user's class says instead of its methods (its length
    is another one, or an error) is not what the container holds."""
    return next(kind for kind in type(value).__mro__ if kind.__module__ in ("builtins", "collections"))


class Native:
    """A container of a user's class, with what Python's own class says that it holds."""

    def __init__(self, value: Any):
        self._value, self._kind = value, _native(value)

    def __len__(self) -> int:
        return self._kind.__len__(self._value)  # type: ignore[attr-defined, no-any-return]

    def __iter__(self) -> Iterator[Any]:
        return self._kind.__iter__(self._value)  # type: ignore[attr-defined, no-any-return]

    def __getitem__(self, key: Any) -> Any:
        return self._kind.__getitem__(self._value, key)  # type: ignore[attr-defined]

    def keys(self) -> Any:
        return self._kind.keys(self._value)  # type: ignore[attr-defined]

    def values(self) -> Any:
        return self._kind.values(self._value)  # type: ignore[attr-defined]

    def items(self) -> Any:
        return self._kind.items(self._value)  # type: ignore[attr-defined]


_READ_BY = ("__len__", "__iter__", "__getitem__", "keys", "values", "items")


def shown(value: Any) -> Any:
    """A container to be read: itself, but where a user's class has methods of its own to read it by."""
    kind = type(value)
    if kind.__module__ in ("builtins", "collections") or not isinstance(value, _CONTAINERS):
        return value
    native = _native(value)
    is_native = all(getattr(kind, name, None) is getattr(native, name, None) for name in _READ_BY)
    return value if is_native else Native(value)


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
    """What a function of no arguments gives: the object of a weak reference."""

    def __init__(self, read: Callable[[], Any]):
        self.read = read

    def get(self, key: Any, default: Any) -> Any:
        return self.read()


class Variable:
    """A context variable, read like a dictionary."""

    def __init__(self, variable: Any):
        self.variable = variable

    def get(self, key: Any, default: Any) -> Any:
        try:
            return self.variable.get()
        except LookupError:  # it has neither a value nor a default
            return default


class Attributes:
    """Attributes that are in no `__dict__`: of functions, of classes with slots."""

    def __init__(self, owner: Any):
        self.owner = owner

    def get(self, key: str, default: Any) -> Any:
        return getattr(self.owner, key, default)


def read(table: Any, key: Any) -> Any:
    return dict.get(table, key, MISSING) if isinstance(table, dict) else table.get(key, MISSING)


# Asked again, whether what differed still does.
Differs = Callable[[], bool]


class Comparison:
    """difference(): None where each of `same` is the same object, each of `equal`, plain values, of the same type and
    equal, and each of `sizes` as long; else a function that says whether the first that is not so still is not.

    Objects among `mortal` are known by their identity alone, and may be let go: who asks must know that they live.
    Nothing here is a step of Python's own for each: `map` calls functions of C with functions of C.
    """

    def __init__(
        self,
        same: Sequence[Slot],
        equal: Sequence[Slot],
        sizes: Sequence[tuple[Any, int]],
        mortal: Container[int] = (),
    ):
        lasting = [slot for slot in same if id(slot[2]) not in mortal]
        dying = [slot for slot in same if id(slot[2]) in mortal]
        zeros = [slot for slot in equal if _has_zero(slot[2])]
        others = [slot for slot in equal if not _has_zero(slot[2])]
        self._groups = [*_grouped(lasting, _Same), *_grouped(dying, _Alive)]
        self._groups += [*_grouped(others, _Equal), *_grouped(zeros, _Written)]
        self._sized, self._sizes = [table for table, _ in sizes], [size for _, size in sizes]

    def holds(self) -> bool:
        return self.difference() is None

    def difference(self) -> Differs | None:
        if list(map(len, self._sized)) != self._sizes:
            return self._another_size()
        try:
            for group in self._groups:
                if not group.holds():
                    return group.difference()
        except (IndexError, ReferenceError):  # of what has the length that it had, but is no list of Python's own
            return unknown
        return None

    def _another_size(self) -> Differs:
        for table, size in zip(self._sized, self._sizes, strict=True):
            if len(table) != size:
                return lambda: len(table) != size
        return unknown


def unknown() -> bool:
    """Where it cannot be told at once, all is compared."""
    return False


class _Same:
    """Slots of one kind of table whose values are the very objects that they were."""

    def __init__(self, kind: Any, tables: list[Any], keys: list[Any], expected: list[Any]):
        self._default = () if kind in (getitem, read) else (MISSING,)
        self._kind, self._tables, self._keys, self._expected = kind, tables, keys, expected
        self._values = _reader(kind, tables, keys)

    def holds(self) -> bool:
        return all(map(is_, self._values(), self._expected))

    def difference(self) -> Differs:
        for i in range(len(self._expected)):
            if self._differs(i):
                return functools.partial(self._still_differs, i)
        return unknown

    def _still_differs(self, i: int) -> bool:
        try:
            return self._differs(i)
        except (IndexError, ReferenceError):
            return unknown()

    def _differs(self, i: int) -> bool:
        return self._value(i) is not self._expected[i]

    def _value(self, i: int) -> Any:
        return self._kind(self._tables[i], self._keys[i], *self._default)


class _Said(_Same):
    """The same of what a function of C says of each value."""

    say: Callable[[Any], Any]

    def __init__(self, kind: Any, tables: list[Any], keys: list[Any], expected: list[Any]):
        super().__init__(kind, tables, keys, list(map(self.say, expected)))

    def holds(self) -> bool:
        return list(map(self.say, self._values())) == self._expected

    def _differs(self, i: int) -> bool:
        return self.say(self._value(i)) != self._expected[i]


class _Alive(_Said):
    """The same, of objects that are not kept alive here."""

    say = id


class _Written(_Said):
    """Numbers with a zero, which is equal to the one of the other sign: of the same type, and written alike."""

    say = repr


class _Equal(_Same):
    """Plain values: of the same type, and equal."""

    def __init__(self, kind: Any, tables: list[Any], keys: list[Any], expected: list[Any]):
        super().__init__(kind, tables, keys, expected)
        self._kinds = list(map(type, expected))

    def holds(self) -> bool:
        values = list(self._values())
        return all(map(is_, map(type, values), self._kinds)) and values == self._expected

    def _differs(self, i: int) -> bool:
        value = self._value(i)
        return type(value) is not self._kinds[i] or value != self._expected[i]


def _has_zero(value: Any) -> bool:
    """Of a float, whose imaginary part is one in any case, the real part."""
    if isinstance(value, complex):
        return value.real == 0 or value.imag == 0
    return isinstance(value, float) and value == 0


Reader = Callable[[], Iterable[Any]]


def _grouped(slots: Sequence[Slot], group: type[_Same]) -> list[_Same]:
    """For each kind of table what reads and compares all that there are."""
    groups: dict[Any, tuple[list[Any], list[Any], list[Any]]] = {}
    for table, key, expected in slots:
        kind, source = _kind(table)
        for column, value in zip(groups.setdefault(kind, ([], [], [])), (source, key, expected), strict=True):
            column.append(value)
    return [group(kind, *columns) for kind, columns in groups.items()]


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


def has_others(items: Iterable[Any], identities: list[int]) -> bool:
    """Whether it holds other objects, or in another order, than those with these identities."""
    return list(map(id, items)) != identities


def hold_the_same(one: Any, other: Any) -> bool:
    """Of objects with nothing but a `__dict__`: whether their attributes are the same objects, or containers of the
    same objects in the same order."""
    if type(one) is not type(other) or any(base is not object and not _is_pythons(base) for base in type(one).__mro__):
        return False
    mine, its = vars(one), vars(other)
    return list(mine) == list(its) and all(map(_are_the_same, mine.values(), its.values()))


def _is_pythons(cls: type) -> bool:
    """Whether a class statement made it, without slots: all that is in such an object is in its `__dict__`."""
    return bool(cls.__flags__ & _MADE_AT_RUN_TIME) and "__slots__" not in vars(cls)


def _are_the_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or type(one) not in (dict, list, tuple, set, frozenset):
        return False
    if isinstance(one, dict) and list(map(id, one.values())) != list(map(id, other.values())):
        return False
    return list(map(id, one)) == list(map(id, other))


def restore_tables(copies: Iterable[tuple[Any, Any]]) -> None:
    """Put back what each container and class held, by a copy of it."""
    for table, copy in copies:
        if isinstance(table, list):
            list.__setitem__(table, slice(None), copy)
        elif isinstance(table, type):
            _restore_class(table, copy)
        elif isinstance(table, (set, collections.deque)):
            kind = _native(table)
            kind.clear(table)
            getattr(kind, "update" if isinstance(table, set) else "extend")(table, copy)
        elif list(map(id, (now := shown(table)).values())) != list(map(id, copy.values())) or list(now) != list(copy):
            kind = _native(table) if isinstance(table, dict) else type(table)
            kind.clear(table)
            kind.update(table, copy)


def restore_slots(slots: Iterable[Slot]) -> None:
    """Put back what was there."""
    for table, key, kept in slots:
        if read(table, key) is kept:
            continue
        if isinstance(table, Cell):
            table.cell.cell_contents = kept
        elif isinstance(table, Variable) and kept is not MISSING:  # one without a value cannot be made so again
            table.variable.set(kept)
        elif isinstance(table, Attributes):
            setattr(table.owner, key, kept) if kept is not MISSING else delattr(table.owner, key)
        elif isinstance(table, dict):  # the globals of a function
            table.update({key: kept}) if kept is not MISSING else table.pop(key, None)


def _restore_class(cls: type, copy: dict[str, Any]) -> None:
    for key in [key for key in vars(cls) if key not in copy]:
        delattr(cls, key)
    for key, value in copy.items():
        if vars(cls)[key] is not value:
            setattr(cls, key, value)
