"""What lies in memory that is no object of Python's: arrays, buffers, and where NumPy's generators of numbers are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy

from aottrain.errors import UnsupportedError

_MAX_BYTES = 1 << 16  # of memory that is compared by content before each call
_IN_C = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
GENERATORS = (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)


def is_memory(value: Any) -> bool:
    is_plain = isinstance(value, (bytearray, memoryview, numpy.ndarray, *_IN_C))
    return is_plain or type(value).__module__ == "array"


def reader_of(value: Any) -> Callable[[], Any]:
    """Gives its bytes and, of an array, how they are read. Raises UnsupportedError for what is too much to compare
    before each call, and for an array of objects."""

    def read() -> Any:
        content = value.tobytes() if hasattr(value, "tobytes") else bytes(value)
        return (value.dtype, value.shape, value.strides, content) if isinstance(value, numpy.ndarray) else content

    size = value.nbytes if isinstance(value, numpy.ndarray) else memoryview(value).nbytes  # dates are no buffers
    if size > _MAX_BYTES:
        raise UnsupportedError(f"the program can reach a {type(value).__name__} that is too large to compare")
    if isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        raise UnsupportedError("the program can reach a NumPy array of objects")
    return read


class Contents:
    """Memory that a program can reach, with what was in it when it was found."""

    def __init__(self) -> None:
        self._found: list[tuple[Any, Callable[[], Any], Any]] = []

    def add(self, value: Any) -> None:
        read = reader_of(value)
        self._found.append((value, read, read()))

    def have_changed(self) -> bool:
        return any(read() != expected for _, read, expected in self._found)

    def restore(self) -> None:
        for value, read, expected in self._found:
            if read() == expected:
                continue
            if isinstance(value, numpy.ndarray):
                dtype, shape, _, content = expected
                if value.flags.writeable:
                    value[...] = numpy.frombuffer(content, dtype).reshape(shape)
            elif not memoryview(value).readonly:  # else what it is a view of is put back
                memoryview(value).cast("B")[:] = expected


class Generators:
    """NumPy's generators that a program can reach, each where it was when it was found: one that a trace moves on is
    drawn from, and a program that is not traced again would give the same numbers each time."""

    def __init__(self) -> None:
        self._found: list[tuple[Any, Any]] = []

    def add(self, generator: Any) -> None:
        self._found.append((generator, _position(generator)))

    def check_unmoved(self) -> None:
        """Raises UnsupportedError where one was drawn from since it was found."""
        for generator, position in self._found:
            if repr(_position(generator)) != repr(position):
                raise UnsupportedError(f"the program draws from a {type(generator).__name__} of NumPy")

    def restore(self) -> None:
        for generator, position in self._found:
            if isinstance(generator, numpy.random.RandomState):
                generator.set_state(position)
            else:
                getattr(generator, "bit_generator", generator).state = position


def _position(generator: Any) -> Any:
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state
