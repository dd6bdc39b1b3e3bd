"""Kernels for all sizes: the symbols that they take as arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.sizes.polynomials import Polynomial


def size_names(kernel: KernelIR) -> tuple[str, ...]:
    """The symbols of the sizes that each call has its own of: arguments of a call."""
    found: dict[str, None] = {}
    for value in _numbers(kernel):
        if isinstance(value, Polynomial):
            found.update(dict.fromkeys(sorted(value.symbols)))
    return tuple(found)


def _numbers(value: Any) -> Iterator[Any]:
    """All that a kernel is made of, in order."""
    if is_dataclass(value):
        value = [getattr(value, each.name) for each in fields(value)]
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _numbers(part)
    else:
        yield value
