"""A number that stands for an attribute to which a program adds at each call, and what is said where none can."""

from __future__ import annotations

from typing import Any

from aottrain.errors import UnsupportedError

Key = tuple[int, str, str]  # a module by its identity, where it keeps what it has, and a name there
_CHANGED = "the program changes Python state: an attribute, a list, a dictionary, a hook or a cache"


def refusal(name: str) -> UnsupportedError:
    return UnsupportedError(f"{_CHANGED} ({name})" if name else _CHANGED)


class Counter:
    """Stands for an int that the program may add to, and not ask for: then it need not be the same at the next call."""

    __slots__ = ("key", "start", "steps")

    def __init__(self, start: int, key: Key, steps: int = 0):
        self.start, self.key, self.steps = start, key, steps

    @property
    def __class__(self) -> Any:  # what isinstance() says
        return int

    @property
    def name(self) -> str:
        return self.key[2]

    def __add__(self, other: Any) -> Any:
        return Counter(self.start, self.key, self.steps + other) if type(other) is int else self.refuse()

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return Counter(self.start, self.key, self.steps - other) if type(other) is int else self.refuse()

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise refusal(self.name)

    def __getattr__(self, name: str) -> Any:
        return self.refuse()


_OF_OBJECTS = {*vars(object)} - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__",
                                 "__str__", "__format__", "__reduce__", "__reduce_ex__"}  # fmt: skip
for _name in {*dir(int)} - {*vars(Counter)} - _OF_OBJECTS:
    setattr(Counter, _name, Counter.refuse if callable(getattr(int, _name)) else property(Counter.refuse))
