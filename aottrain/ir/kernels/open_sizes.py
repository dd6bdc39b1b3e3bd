"""Kernels for all sizes: the symbols that they take as arguments, and what is known of numbers in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.sizes.polynomials import PREFIX, Polynomial, SizeFacts


def size_names(kernel: KernelIR) -> tuple[str, ...]:
    """The symbols of the sizes that each call has its own of: arguments of a call."""
    found: dict[str, None] = {}
    for value in _numbers(kernel):
        if isinstance(value, Polynomial):
            found.update(dict.fromkeys(sorted(value.symbols)))
    return tuple(found)


def facts_of(kernel: KernelIR) -> SizeFacts | None:
    """Of the symbols of a kernel's sizes; None where all are numbers."""
    return next((value.facts for value in _numbers(kernel) if isinstance(value, Polynomial)), None)


def divides(number: int, value: Any) -> bool:
    """Whether a number divides an integer in every call."""
    if isinstance(value, Polynomial):
        return all(factor % number == 0 for _, factor in value.terms)
    return bool(value % number == 0)


def numbered(text: str, sizes: Sequence[str]) -> str:
    """A kernel's text with names for its sizes that are the same in every program, and that no writer of kernels gives
    to anything else."""
    for k, name in enumerate(sizes):
        text = re.sub(rf"\b{PREFIX}{name}\b", f"size{k}", text)
    return text


def _numbers(value: Any) -> Iterator[Any]:
    """All that a kernel is made of, in order."""
    if is_dataclass(value):
        value = [getattr(value, each.name) for each in fields(value)]
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _numbers(part)
    else:
        yield value
