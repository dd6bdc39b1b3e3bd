"""Where in a value the elements of a view of it are, dimension by dimension."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from aottrain.compiler.lowering import Operand
from aottrain.compiler.schedule.layouts import layout_of
from aottrain.ir.graph import required_spec, storage_root

# For each of a value's dimensions (dimension of a view of it, step), and where the view begins.
View = tuple[tuple[Sequence[tuple[int, int]], int], ...]


def view_of(root: fx.Node, view: fx.Node) -> View | None:
    """Where in a value an element of its view is; None where no index of the view is an index of the value."""
    layout, spec = layout_of(view), required_spec(root)
    if layout is None or layout.root is not root or required_spec(view).dtype is not spec.dtype:
        return None
    order = sorted((d for d, size in enumerate(spec.shape) if size > 1), key=lambda d: -spec.stride[d])
    if any(spec.stride[d] == 0 for d in order):
        return None
    starts, rest = [0] * len(spec.shape), layout.start
    terms: list[list[tuple[int, int]]] = [[] for _ in spec.shape]
    for d in order:
        starts[d], rest = divmod(rest, spec.stride[d])
    lasts = list(starts)
    for k, (size, stride) in enumerate(zip(layout.shape, layout.stride, strict=True)):
        if size == 1 or stride == 0:
            continue
        own = next((d for d in order if spec.stride[d] <= stride), None)
        if own is None or stride % spec.stride[own]:
            return None
        terms[own].append((k, stride // spec.stride[own]))
        lasts[own] += (size - 1) * (stride // spec.stride[own])
    inside = all(last < size for last, size in zip(lasts, spec.shape, strict=True))
    return tuple(zip(terms, starts, strict=True)) if inside and rest == 0 else None


def turned(root: fx.Node, view: fx.Node) -> tuple[int | None, ...] | None:
    """For each of a value's dimensions that of a view with which it is the same index, None of one element; None where
    the view is not all of the value with its dimensions in another order."""
    shape, sizes, found = required_spec(root).shape, required_spec(view).shape, view_of(root, view)
    if found is None or sorted(sizes) != sorted(shape):
        return None
    dims: list[int | None] = []
    for size, (terms, start) in zip(shape, found, strict=True):
        if start or len(terms) > 1 or any(step != 1 or sizes[k] != size for k, step in terms):
            return None
        dims.append(terms[0][0] if terms else None)
    return tuple(dims)


def as_whole(operand: Operand) -> Operand:
    """The value that an operand is, where that is a view of it with dimensions in another order; else the operand."""
    root = storage_root(operand.node)
    dims = None if root is operand.node else turned(root, operand.node)
    return operand if dims is None else Operand(root, tuple(None if d is None else operand.dims[d] for d in dims))


def places_of(operand: Operand, view: View, shape: Sequence[int]) -> list[int | None]:
    """For each dimension of a computed value the reader's that indexes it as it is; None where it is read elsewhere."""
    sizes = required_spec(operand.node).shape
    whole = [len(terms) == 1 and terms[0][1] == 1 and sizes[terms[0][0]] == size
             for (terms, _), size in zip(view, shape, strict=True)]  # fmt: skip
    return [operand.dims[terms[0][0]] if flag else None for (terms, _), flag in zip(view, whole, strict=True)]
