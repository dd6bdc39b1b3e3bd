"""Symbolic sizes: which integers of a call become symbols, where each is read from, and what was assumed about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import SIZE_NAMESPACE, shape_guard, symbolic_fake, symbolic_mode
from aottrain.compat_dynamo import most_sizes
from aottrain.errors import UnsupportedError
from aottrain.guards.guards import dynamic_dims
from aottrain.ir.sizes.expressions import SizeExpression, is_symbolic, size_of

# Where a symbol is read from: (position of an argument, the attribute that holds it or "" for itself, dimension).
Place = tuple[int, str, int]


@dataclass(frozen=True)
class SymbolicSizes:
    """What is symbolic in a call."""

    shape_env: Any
    symbols: Mapping[str, torch.SymInt]
    """By name."""
    places: Mapping[str, Place]
    """Where each symbol is read at a call."""
    fakes: Mapping[int, Tensor] = field(default_factory=dict)
    """The fake tensors with symbolic sizes that stand for real ones, by id. TorchDynamo's examples are fakes themselves
    and are not among them."""

    def read(self, args: Sequence[Any]) -> dict[str, int]:
        """The symbols' values in a call."""
        return {name: _read(args, place) for name, place in self.places.items()}


@dataclass(frozen=True)
class SizeGuard:
    """Whether the sizes of a call are among those that a program was traced for."""

    sizes: SymbolicSizes
    code: CodeType

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        try:
            return bool(eval(self.code, {**SIZE_NAMESPACE, "L": {_name(i): value for i, value in enumerate(tensors)}}))
        except ZeroDivisionError:  # what it was traced for divides by a size that is none here
            return False


def differing_dims(tensors: Sequence[Tensor], others: Sequence[Sequence[torch.Size]]) -> list[frozenset[int]]:
    """For each tensor the dimensions that the caller marked, and those that have another size in one of `others`: the
    shapes of calls that are alike but for their sizes."""
    return [
        dynamic_dims(tensor, False)
        | {dim for dim in dynamic_dims(tensor, True) if any(shapes[i][dim] != tensor.shape[dim] for shapes in others)}
        for i, tensor in enumerate(tensors)
    ]


def symbolic_sizes(tensors: Sequence[Tensor], dims: Sequence[frozenset[int]]) -> SymbolicSizes | None:
    """Symbols for these dimensions of a call's tensors; None where there are none."""
    if not any(dims):
        return None
    mode = symbolic_mode()
    fakes = {i: symbolic_fake(mode, tensor, dims[i], _name(i)) for i, tensor in enumerate(tensors) if dims[i]}
    for i, fake in fakes.items():
        for dim, most in most_sizes(tensors[i]).items():
            _ = bool(fake.shape[dim] <= most)  # a guard, and known from now on
    fakes_by_id = {id(tensors[i]): fake for i, fake in fakes.items()}
    return SymbolicSizes(mode.shape_env, *_find([fakes.get(i) for i in range(len(tensors))]), fakes_by_id)


def example_sizes(examples: Sequence[Any]) -> SymbolicSizes | None:
    """The symbols of TorchDynamo's examples; None where there are none. Raises UnsupportedError for odd ones."""
    numbers = [size for value in examples for size in (value.shape if isinstance(value, Tensor) else [value])]
    symbolic: list[Any] = [value for value in numbers if is_symbolic(value)]
    if not symbolic:
        return None
    return SymbolicSizes(symbolic[0].node.shape_env, *_find(examples))


def size_guard(sizes: SymbolicSizes, tensors: Sequence[Tensor]) -> SizeGuard:
    """Everything that tracing assumed about the sizes. To be asked for when nothing is traced any more."""
    dynamic = [i for i, tensor in enumerate(tensors) if id(tensor) in sizes.fakes]
    text = shape_guard(sizes.shape_env, [_name(i) for i in dynamic], [sizes.fakes[id(tensors[i])] for i in dynamic])
    return SizeGuard(sizes, compile(text, "<aottrain size guard>", "eval"))


def _find(values: Sequence[Any]) -> tuple[dict[str, torch.SymInt], dict[str, Place]]:
    """Each symbol that stands alone as an argument, a size or a stride."""
    symbols: dict[str, torch.SymInt] = {}
    places: dict[str, Place] = {}
    for i, value in enumerate(values):
        numbers: list[tuple[Any, Place]] = [(value, (i, "", 0))]
        if isinstance(value, Tensor):
            numbers = [(size, (i, "shape", dim)) for dim, size in enumerate(value.shape)]
            numbers += [(step, (i, "stride", dim)) for dim, step in enumerate(value.stride())]
        for number, place in numbers:
            size = size_of(number) if is_symbolic(number) else None
            if isinstance(size, SizeExpression) and (size.text,) == size.names and size.text not in symbols:
                if not isinstance(number, torch.SymInt):
                    raise UnsupportedError("an input is a symbolic number that is no integer")
                symbols[size.text], places[size.text] = number, place
    return symbols, places


def _read(args: Sequence[Any], place: Place) -> int:
    position, attribute, dim = place
    value = args[position]
    if attribute == "shape":
        return value.shape[dim]
    return value.stride(dim) if attribute == "stride" else int(value)


def _name(position: int) -> str:
    return f"t{position}"
