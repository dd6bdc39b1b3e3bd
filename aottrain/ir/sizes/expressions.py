"""Symbolic sizes: integers that a program reads from its inputs' shapes at each call, and expressions of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import torch

from aottrain.compat import SIZE_NAMESPACE, size_hint, size_text
from aottrain.errors import UnsupportedError
from aottrain.ir.sizes.polynomials import Polynomial, current_values, likely


@dataclass(frozen=True)
class SizeExpression:
    """An integer, float or truth value as an expression of symbols, e.g. `s0*s1 + 3`; two are equal if their texts are.

    A graph calls it with the values of `names`, in that order.
    """

    text: str
    names: tuple[str, ...]

    def __call__(self, *values: Any) -> Any:
        return self.of(dict(zip(self.names, values, strict=True)))

    def of(self, values: Mapping[str, Any]) -> Any:
        """Its value where the symbols have these values; symbols themselves (SymInt) may be given, too."""
        return eval(_code(self.text), SIZE_NAMESPACE, values)

    @property
    def __name__(self) -> str:
        return "size"

    def __str__(self) -> str:
        return self.text


Size = int | SizeExpression


@cache
def _code(text: str) -> CodeType:
    return compile(text, "<aottrain size>", "eval")


def is_symbolic(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def size_of(value: Any) -> Any:
    """A number as it is; a symbolic one as its expression, or as a number where it has only one value."""
    if not is_symbolic(value):
        return value
    traced(value)
    text, names = size_text(value)
    return SizeExpression(text, names) if names else eval(_code(text), SIZE_NAMESPACE)


def hint(value: Any) -> int:
    """The value that a size had when it was traced, or has inside `sizes_at`; adds no guard. Raises UnsupportedError
    where it had none."""
    if isinstance(value, Polynomial):
        return likely(value)
    values = current_values()
    if values is None or not is_symbolic(value):
        return traced(value)
    return int(eval(_code(size_text(value)[0]), SIZE_NAMESPACE, values))


def traced(value: Any) -> int:
    """The value that a size had when it was traced, wherever this is asked; raises as `hint`."""
    size = size_hint(value) if is_symbolic(value) else value
    if size is None:
        raise UnsupportedError("a size depends on the values of a tensor")
    return int(size)


def concrete(value: Any) -> Any:
    """A symbolic number as the number that was traced; anything else as it is."""
    return hint(value) if is_symbolic(value) else value


def resolve(sizes: Sequence[Size], values: Mapping[str, Any]) -> tuple[int, ...]:
    """A shape or stride for one call."""
    return tuple(size.of(values) if isinstance(size, SizeExpression) else size for size in sizes)
