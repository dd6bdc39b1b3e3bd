"""Where in a value the elements of a view of it are, dimension by dimension."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from aottrain.compiler.schedule.layouts import layout_of
from aottrain.ir.graph import required_spec

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
