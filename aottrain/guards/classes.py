"""What class a stand-in is of: `type(x)` looks at the object itself, past every mode of a trace, and would name the
stand-in's. In the modules whose functions ask, another `type` answers while their program is traced."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from aottrain.guards.bytecode import calls_global
from aottrain.guards.counter import Counter

NAME = "type"
_STAND_INS = "torch._subclasses.fake_tensor"
# Code that knows stand-ins, or that no tensor of a program reaches.
_OTHERS = frozenset({"torch", "aottrain", "numpy", *sys.stdlib_module_names} - {"__main__"})


class _ClassOf:
    """Stands where `type` is called by its name. Of all else, which other threads may ask, it says what `type` says."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        kind = type(args[0])
        if kind is Counter:
            return int
        if issubclass(kind, Tensor) and kind.__module__ == _STAND_INS:
            return nn.Parameter if isinstance(args[0], nn.Parameter) else Tensor
        return kind

    def __getattr__(self, name: str) -> Any:
        return getattr(type, name)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(self, cls: type) -> bool:
        return issubclass(cls, type)

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (type,)


CLASS_OF = _ClassOf()
_lock = threading.Lock()
_traces: dict[int, int] = {}  # of a module, by the identity of its globals: how many traces it is in


def named(table: dict[str, Any]) -> Set[str]:
    """The globals of a module, but for what stands there while a trace runs."""
    return table.keys() - {NAME} if table.get(NAME) is CLASS_OF else table.keys()


class Classes:
    """The modules of one program whose functions ask for classes."""

    def __init__(self) -> None:
        self._asking: dict[int, dict[str, Any]] = {}
        self._answered: dict[int, dict[str, Any]] | None = None

    def look_at(self, frame: types.FrameType) -> None:
        """A function that is about to run."""
        table = frame.f_globals
        package = str(table.get("__name__", "")).partition(".")[0]
        if package in _OTHERS or id(table) in self._asking or not calls_global(frame.f_code, NAME):
            return
        if table.get(NAME, CLASS_OF) is CLASS_OF:  # else a name of its own
            self._asking[id(table)] = table
            if self._answered is not None:
                self._answer(table)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Around a trace."""
        self._answered = {}
        try:
            for table in self._asking.values():
                self._answer(table)
            yield
        finally:
            answered, self._answered = self._answered, None
            with _lock:
                for key, table in answered.items():
                    _traces[key] -= 1
                    if not _traces[key]:
                        del _traces[key]
                        table.pop(NAME, None)

    def _answer(self, table: dict[str, Any]) -> None:
        assert self._answered is not None
        with _lock:
            self._answered[id(table)] = table
            _traces[id(table)] = _traces.get(id(table), 0) + 1
            table[NAME] = CLASS_OF
