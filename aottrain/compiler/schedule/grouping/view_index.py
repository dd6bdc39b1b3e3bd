"""Where in a value the elements of a view of it are, dimension by dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from aottrain.compiler.lowering import Operand
from aottrain.compiler.schedule.layouts import layout_of
from aottrain.ir.graph import required_spec, storage_root
from aottrain.ir.tensor import TensorSpec


class Term(NamedTuple):
    """What an index in a dimension of a view adds to one in a dimension of the value: step * (index // every % times),
    of which the last two are for an index that runs through several dimensions."""

    dim: int
    step: int
    every: int = 1
    times: int | None = None

    @property
    def is_split(self) -> bool:
        return self.every != 1 or self.times is not None


# For each of a value's dimensions what a view's indices add, and where the view begins.
View = tuple[tuple[Sequence[Term], int], ...]


def view_of(root: fx.Node, view: fx.Node, splits: bool = False) -> View | None:
    """Where in a value an element of its view is; None where no index of the view is an index of the value. splits:
    an index that runs through several of the value's dimensions may be divided, but not along neighbours in memory."""
    layout, spec = layout_of(view), required_spec(root)
    if layout is None or layout.root is not root or required_spec(view).dtype is not spec.dtype:
        return None
    order = sorted((d for d, size in enumerate(spec.shape) if size > 1), key=lambda d: -spec.stride[d])
    if any(spec.stride[d] == 0 for d in order):
        return None
    starts, rest = [0] * len(spec.shape), layout.start
    terms: list[list[Term]] = [[] for _ in spec.shape]
    for d in order:
        starts[d], rest = divmod(rest, spec.stride[d])
    lasts = list(starts)
    for k, (size, stride) in enumerate(zip(layout.shape, layout.stride, strict=True)):
        if size == 1 or stride == 0:
            continue
        own = next((d for d in order if spec.stride[d] <= stride), None)
        if own is None or stride % spec.stride[own]:
            return None
        through = (
            _through(spec, order[: order.index(own) + 1], size) if splits and stride == spec.stride[own] > 1 else []
        )
        for d, every, times in through:
            terms[d].append(Term(k, 1, every, times))
            lasts[d] += (size - 1) // every if times is None else times - 1
        if not through:
            terms[own].append(Term(k, stride // spec.stride[own]))
            lasts[own] += (size - 1) * (stride // spec.stride[own])
    inside = all(last < size for last, size in zip(lasts, spec.shape, strict=True))
    return tuple(zip(terms, starts, strict=True)) if inside and rest == 0 else None


def _through(spec: TensorSpec, outward: Sequence[int], size: int) -> list[tuple[int, int, int | None]]:
    """For an index of so many elements, each as far from the next as in the last of these dimensions, the dimensions
    that it runs through, (dimension, every, times) as of `Term`; none where one dimension has them all."""
    found: list[tuple[int, int, int | None]] = []
    every = 1
    for d, outer in zip(reversed(outward), [*reversed(outward[:-1]), None], strict=True):
        if every * spec.shape[d] >= size or outer is None:
            return [*found, (d, every, None)] if found else []
        if spec.stride[outer] != spec.stride[d] * spec.shape[d]:
            return []
        found.append((d, every, spec.shape[d]))
        every *= spec.shape[d]
    return []


def turned(root: fx.Node, view: fx.Node) -> tuple[int | None, ...] | None:
    """For each of a value's dimensions that of a view with which it is the same index, None of one element; None where
    the view is not all of the value with its dimensions in another order."""
    shape, sizes, found = required_spec(root).shape, required_spec(view).shape, view_of(root, view)
    if found is None or sorted(sizes) != sorted(shape):
        return None
    dims: list[int | None] = []
    for size, (terms, start) in zip(shape, found, strict=True):
        if start or len(terms) > 1 or any(term.step != 1 or sizes[term.dim] != size for term in terms):
            return None
        dims.append(terms[0].dim if terms else None)
    return tuple(dims)


def as_whole(operand: Operand) -> Operand:
    """The value that an operand is, where that is a view of it with dimensions in another order; else the operand."""
    root = storage_root(operand.node)
    dims = None if root is operand.node else turned(root, operand.node)
    return operand if dims is None else Operand(root, tuple(None if d is None else operand.dims[d] for d in dims))


def places_of(operand: Operand, view: View, shape: Sequence[int]) -> list[int | None]:
    """For each dimension of a computed value the reader's that indexes it as it is; None where it is read elsewhere."""
    sizes = required_spec(operand.node).shape
    dims: list[int | None] = []
    for (terms, _), size in zip(view, shape, strict=True):
        whole = len(terms) == 1 and terms[0].step == 1 and not terms[0].is_split and sizes[terms[0].dim] == size
        dims.append(operand.dims[terms[0].dim] if whole else None)
    return dims
