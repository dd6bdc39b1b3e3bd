"""Fields of a record that are found when somebody reads them: of most programs that are compiled nobody does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

R = TypeVar("R", bound="Late")


class Late:
    """Mixed into a dataclass: a field may be given by what finds it, which is asked once, at the first read.

    Comparing, copying and pickling read all fields. Such a field has no plain default: its class would answer for it.
    """

    def late(self: R, finders: Mapping[str, Callable[[], Any]]) -> R:
        """The same, with these fields found later."""
        return self._with({name: value for name, value in self._there().items() if name not in finders}, finders)

    def changed(self: R, **changes: Any) -> R:
        """As `dataclasses.replace`, which would read every field."""
        waiting = {name: find for name, find in self._waiting().items() if name not in changes}
        return self._with(self._there() | changes, waiting)

    def _with(self: R, there: Mapping[str, Any], waiting: Mapping[str, Callable[[], Any]]) -> R:
        made = object.__new__(type(self))
        made.__dict__.update(there, _finders=dict(waiting))
        return made

    def _waiting(self) -> dict[str, Callable[[], Any]]:
        waiting: dict[str, Callable[[], Any]] = self.__dict__.get("_finders", {})
        return waiting

    def _there(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_finders"}

    def __getattr__(self, name: str) -> Any:
        """Only for what is not there."""
        find = self._waiting().get(name)
        if find is not None:
            self.__dict__.setdefault(name, find())
            self._waiting().pop(name, None)  # the program is not kept for it any more
        if name not in self.__dict__:  # another thread may have found it just now
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        for name in tuple(self._waiting()):
            getattr(self, name)
        return self._there()
