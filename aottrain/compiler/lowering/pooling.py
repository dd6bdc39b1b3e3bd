"""Pooling of images, and gradients that are pooled: each result from the few elements of its window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.rules import (
    Operand,
    Output,
    Rule,
    Values,
    argument,
    arguments,
    lowers,
    moved,
    spec,
    whole,
    wide,
)
from aottrain.ir.graph import value_of
from aottrain.ir.kernels.affine import ZERO, Affine

# Larger windows are many instructions for each result.
LARGEST_WINDOW = 25


# Forward ops with a window: each result reads as many elements as that has, so they are not worth doing twice.
WINDOWED = ("aten.max_pool2d_with_indices.default", "aottrain.max_pool_taps.default", "aten.avg_pool2d.default")


class _Windows:
    """The windows of an image's last two dimensions."""

    def __init__(self, source: fx.Node, node_shape: Sequence[int], sizes: Any, steps: Any, pads: Any, gaps: Any = 1):
        self.shape = spec(source).shape
        self.sizes, self.pads, self.gaps = pair(sizes), pair(pads), pair(gaps)
        self.steps = pair(steps) if steps else self.sizes
        self.rank, self.count = len(self.shape), math.prod(self.sizes)
        self.results = tuple(node_shape)[-2:]

    @property
    def taps(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(self.sizes[0]) for j in range(self.sizes[1])]

    def index(self, b: Builder, tap: tuple[int, int]) -> list[Affine]:
        """Where a tap of the window of the domain's element lies in the image, or in the padding around it."""
        index = list(b.index)
        for axis in (0, 1):
            d = self.rank - 2 + axis
            index[d] = index[d] * self.steps[axis] + Affine((), tap[axis] * self.gaps[axis] - self.pads[axis])
        return index

    def guard(self, b: Builder, tap: tuple[int, int], index: Sequence[Affine]) -> int | None:
        """Whether it lies in the image; None where it always does."""
        guard: int | None = None
        for axis in (0, 1):
            d = self.rank - 2 + axis
            low = tap[axis] * self.gaps[axis] - self.pads[axis]
            high = low + (self.results[axis] - 1) * self.steps[axis]
            position = b.at(index[d])
            for outside, op, limit in ((low < 0, "ge", 0), (high >= self.shape[d], "lt", self.shape[d])):
                if outside:
                    inside = b.compare(op, position, b.constant(limit, torch.int64))
                    guard = b.both(guard, inside)
        return guard

    def first_inside(self, b: Builder, axis: int, step: int) -> int:
        """How far from its start a window's first row or column is that lies in the image, as int32."""
        first = b.constant(self.pads[axis] * step, torch.int32)
        for tap in reversed(range(self.pads[axis])):
            position = b.at(self.index(b, (tap, tap))[self.rank - 2 + axis])
            inside = b.compare("ge", position, b.constant(0, torch.int64))
            first = b.compute("where", inside, b.constant(tap * step, torch.int32), first)
        return first

    def operand(self, source: fx.Node) -> Operand:
        """The image: of windows apart from each other each element is read once."""
        apart = all(step >= size for step, size in zip(self.steps, self.sizes, strict=True)) and self.gaps == (1, 1)
        return moved(source, [*range(self.rank - 2), None, None]) if apart else Operand(source, free=True)

    def largest(self, b: Builder, operand: int, dtype: torch.dtype, row: int) -> tuple[int, int]:
        """The largest of a window, and how far its place is from the window's first one if rows are that long."""
        best = b.constant(-math.inf, dtype)
        chosen = b.compute("add", self.first_inside(b, 0, row), self.first_inside(b, 1, 1))
        for number, tap in enumerate(self.taps):
            value = self.load(b, operand, tap, -math.inf)
            if number == 0 and self.guard(b, tap, self.index(b, tap)) is None:
                best, chosen = value, b.constant(0, torch.int32)
                continue
            larger = b.compute("or", b.compare("gt", value, best), b.compare("ne", value, value))
            step = tap[0] * self.gaps[0] * row + tap[1] * self.gaps[1]
            chosen = b.compute("where", larger, b.constant(step, torch.int32), chosen)
            best = b.compute("where", larger, value, best)
        return best, chosen

    def load(self, b: Builder, operand: int, tap: tuple[int, int], other: float) -> int:
        index = self.index(b, tap)
        return b.load(operand, index, guard=self.guard(b, tap, index), other=other)


def pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[-1])


@lowers("aten.max_pool2d_with_indices.default")
def _max_pool(node: fx.Node) -> Rule | None:
    """The largest of a window, and its place in the image: the first such; NaN is larger than all, the last one."""
    source, sizes = arguments(node)[:2]
    own, indices = value_of(node)
    steps, pads, gaps = (argument(node, *names) for names in (("stride", 2, ()), ("padding", 3, 0), ("dilation", 4, 1)))
    if not all(isinstance(size, int) for size in own.shape[-2:]):
        return None  # a symbolic size divided by the step is no polynomial
    windows = _Windows(source, own.shape, sizes, steps, pads, gaps)
    if windows.count > LARGEST_WINDOW or not own.dtype.is_floating_point:
        return None
    if windows.gaps != (1, 1) and windows.pads != (0, 0):
        return None
    height, width = windows.shape[-2:]
    if height * width > 2**30:
        return None

    def formula(b: Builder, v: Values) -> Sequence[int]:
        best, chosen = windows.largest(b, v[0], own.dtype, width)
        first = windows.index(b, (0, 0))
        start = first[-2] * width + first[-1]
        return [best, b.compute("add", b.at(start), b.cast(chosen, torch.int64))]

    outputs = Output(whole(windows.rank), own.dtype), Output(whole(windows.rank), indices.dtype)
    return Rule(tuple(own.shape), (windows.operand(source),), outputs, formula)


@lowers("aottrain.max_pool_taps.default")
def _max_pool_taps(node: fx.Node) -> Rule:
    """As above, and its place in the window."""
    source, window, step, pad, _ = arguments(node)
    own, taps = value_of(node)
    windows = _Windows(source, own.shape, window, step, pad)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        best, chosen = windows.largest(b, v[0], own.dtype, window[1])
        return [best, b.cast(chosen, taps.dtype)]

    outputs = Output(whole(windows.rank), own.dtype), Output(whole(windows.rank), taps.dtype)
    return Rule(tuple(own.shape), (windows.operand(source),), outputs, formula)


@lowers("aottrain.max_pool_gradient.default")
def _max_pool_gradient(node: fx.Node) -> Rule:
    """Of each element the gradients of the windows that it is the largest of, in the windows' order."""
    gradient, taps, _, window, step, pad = arguments(node)[:6]
    own, rank = spec(node), len(spec(node).shape)
    results, compute = spec(gradient).shape[-2:], wide(own.dtype)

    def along(b: Builder, axis: int, back: int) -> tuple[int, int, int | None]:
        """Of the window that begins that many before the last one that reaches the element: its number, the element's
        place in it, and whether there is such a window; None where there always is."""
        d, last = rank - 2 + axis, own.shape[rank - 2 + axis] - 1 + pad[axis]
        shifted = b.index[d] + Affine((), pad[axis] - back * step[axis])
        number = b.compute("div", b.at(shifted), b.constant(step[axis], torch.int64))
        start = b.compute("mul", number, b.constant(step[axis], torch.int64))
        place = b.compute("sub", b.at(b.index[d] + Affine((), pad[axis])), start)
        tests = []
        if pad[axis] < back * step[axis]:
            tests.append(b.compare("ge", b.at(shifted), b.constant(0, torch.int64)))
        if (last - back * step[axis]) // step[axis] >= results[axis]:
            tests.append(b.compare("lt", number, b.constant(results[axis], torch.int64)))
        if (back + 1) * step[axis] > window[axis]:
            tests.append(b.compare("lt", place, b.constant(window[axis], torch.int64)))
        inside = None
        for test in tests:
            inside = b.both(inside, test)
        return number, place, inside

    def formula(b: Builder, v: Values) -> Sequence[int]:
        counts = [-(-window[axis] // step[axis]) for axis in (0, 1)]
        total = b.constant(0, compute)
        for back in [(i, j) for i in reversed(range(counts[0])) for j in reversed(range(counts[1]))]:
            (row, top, above), (column, left, beside) = (along(b, axis, back[axis]) for axis in (0, 1))
            guard = b.both(above, beside)
            index, positions = [*b.index[: rank - 2], ZERO, ZERO], [(rank - 2, row), (rank - 1, column)]
            tap = b.load(v[1], index, positions, guard=guard, other=-1)
            value = b.cast(b.load(v[0], index, positions, guard=guard), compute)
            place = b.compute("add", b.compute("mul", top, b.constant(window[1], torch.int64)), left)
            is_it = b.compare("eq", b.cast(tap, torch.int32), b.cast(place, torch.int32))  # as wide as a float
            total = b.compute("add", total, b.compute("where", is_it, value, b.constant(0, compute)))
        return [b.cast(total, own.dtype)]

    # What makes the gradient, as a relu's, is done for each element of a window again, from the same few elements.
    operands = (moved(gradient, [*range(rank - 2), None, None]), Operand(taps, free=True))
    return Rule(own.shape, operands, (Output(whole(rank), own.dtype),), formula)


@lowers("aten.avg_pool2d.default")
def _avg_pool(node: fx.Node) -> Rule | None:
    """The sum of a window over a number that is the same for all."""
    source, sizes = arguments(node)[:2]
    steps, pads = argument(node, "stride", 2, ()), argument(node, "padding", 3, 0)
    divisor = argument(node, "divisor_override", 6)
    windows = _Windows(source, spec(node).shape, sizes, steps, pads)
    inside = pair(pads) == (0, 0) or argument(node, "count_include_pad", 5, True) or divisor
    if windows.count > LARGEST_WINDOW or argument(node, "ceil_mode", 4, False) or not inside:
        return None
    return _window_sums(node, source, windows, divisor or windows.count)


@lowers("aten.upsample_nearest2d.default", "aten._upsample_nearest_exact2d.default")
def _nearest(node: fx.Node) -> Rule | None:
    """By whole numbers each element is repeated: then both ways to find the nearest agree."""
    source = arguments(node)[0]
    scales = argument(node, "scales_h", 2), argument(node, "scales_w", 3)
    steps = _repetitions(spec(node).shape, spec(source).shape, scales)
    return None if steps is None else _repeated(node, source, steps, 1)


@lowers("aten.upsample_nearest2d_backward.default", "aten._upsample_nearest_exact2d_backward.default")
def _nearest_backward(node: fx.Node) -> Rule | None:
    """By whole numbers each element was repeated: the sum of what its repetitions get."""
    gradient = arguments(node)[0]
    scales = argument(node, "scales_h", 3), argument(node, "scales_w", 4)
    steps = _repetitions(spec(gradient).shape, spec(node).shape, scales)
    if steps is None or math.prod(steps) > LARGEST_WINDOW:
        return None
    return _window_sums(node, gradient, _Windows(gradient, spec(node).shape, steps, steps, 0), 1)


def _window_sums(node: fx.Node, source: fx.Node, windows: _Windows, divisor: int) -> Rule | None:
    own = spec(node)
    if not own.dtype.is_floating_point:
        return None

    def formula(b: Builder, v: Values) -> Sequence[int]:
        total = b.constant(0, wide(own.dtype))
        for tap in windows.taps:
            total = b.compute("add", total, b.cast(windows.load(b, v[0], tap, 0), wide(own.dtype)))
        if divisor != 1:
            total = b.compute("div", total, b.constant(divisor, wide(own.dtype)))
        return [b.cast(total, own.dtype)]

    return Rule(own.shape, (Operand(source, free=True),), (Output(whole(windows.rank), own.dtype),), formula)


@lowers("aten.avg_pool2d_backward.default")
def _avg_pool_backward(node: fx.Node) -> Rule | None:
    """Of windows that lie side by side and cover the image."""
    gradient, source, sizes, steps, pads, _, _, divisor = arguments(node)
    sizes, steps = pair(sizes), pair(steps or sizes)
    reach = tuple(size * step for size, step in zip(spec(gradient).shape[-2:], steps, strict=True))
    if steps != sizes or pair(pads) != (0, 0) or reach != spec(source).shape[-2:]:
        return None
    return _repeated(node, gradient, steps, divisor or math.prod(sizes))


def _repetitions(large: Sequence[int], small: Sequence[int], scales: Sequence[float | None]) -> tuple[int, int] | None:
    """How often each element is there in the larger image; None where that, or a scale that was given, is not a whole
    number."""
    steps = pair([a // max(b, 1) for a, b in zip(large[-2:], small[-2:], strict=True)])
    if any(scale is not None and scale != step for scale, step in zip(scales, steps, strict=True)):
        return None
    exact = all(b * step == a for a, b, step in zip(large[-2:], small[-2:], steps, strict=True))
    return steps if exact else None


def _repeated(node: fx.Node, source: fx.Node, steps: tuple[int, int], divisor: int) -> Rule | None:
    own, rank = spec(node), len(spec(node).shape)
    if not own.dtype.is_floating_point:
        return None

    def formula(b: Builder, v: Values) -> Sequence[int]:
        positions = [
            (d, b.compute("div", b.position(d), b.constant(step, torch.int64)))
            for d, step in zip((rank - 2, rank - 1), steps, strict=True)
        ]
        value = b.load(v[0], [*b.index[: rank - 2], ZERO, ZERO], positions)
        if divisor != 1:
            value = b.cast(value, wide(own.dtype))
            value = b.cast(b.compute("div", value, b.constant(divisor, wide(own.dtype))), own.dtype)
        return [value]

    return Rule(own.shape, (Operand(source, free=True),), (Output(whole(rank), own.dtype),), formula)
