"""Sums, means, extrema and variances over any dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.rules import (
    LONGEST_SIDE_BY_SIDE,
    NEIGHBOURS,
    Operand,
    Output,
    Rule,
    Values,
    aligned,
    argument,
    arguments,
    lowers,
    spec,
    whole,
    wide,
)
from aottrain.ir.sizes.polynomials import likely
from aottrain.ir.tensor import TensorSpec

# Vectors that are added up for each result at least, where results lie on either side of what is added up.
_FEWEST_SUMMED = 8


def reduced_dims(node: fx.Node, dim: Any) -> tuple[int, ...]:
    """The dimensions as non-negative numbers; None and () mean all."""
    rank = len(spec(node).shape)
    if dim is None or dim == [] or dim == ():
        return tuple(range(rank))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return tuple(sorted(d % rank for d in dims)) if rank else ()


def is_of_one(node: fx.Node, dims: Sequence[int]) -> bool:
    """Whether each result of a reduction of these dimensions is made of a single number."""
    return all(spec(node).shape[d] == 1 for d in dims)


def kept_dims(rank: int, dims: Sequence[int], keepdim: bool) -> tuple[int | None, ...]:
    """An output's dimensions after reducing `dims`."""
    if keepdim:
        return tuple(None if d in dims else d for d in range(rank))
    return tuple(d for d in range(rank) if d not in dims)


def _is_across(source: TensorSpec, dims: tuple[int, ...]) -> bool:
    """Whether neither rows nor columns are as memory is: neighbours are kept, and so is what is farther apart than what
    is reduced. As a row's each element would be a load of its own: vectors are added up."""
    sizes, strides = [[likely(each) for each in of] for of in (source.shape, source.stride)]
    order = sorted((d for d, size in enumerate(sizes) if size > 1), key=lambda d: -strides[d])
    reduced = [i for i, d in enumerate(order) if d in dims]
    if source.device.type != "cpu" or not reduced or sizes[order[-1]] < NEIGHBOURS:
        return False
    return order[-1] not in dims and reduced != list(range(len(reduced)))


def _sums_few(source: TensorSpec, dims: tuple[int, ...]) -> bool:
    """Whether so few vectors are added up for each result that to begin and end it costs more: rows do it."""
    return likely(math.prod(source.shape[d] for d in dims)) < _FEWEST_SUMMED


def _reduction(node: fx.Node, op: str, dims: tuple[int, ...], keepdim: bool, divisor: int = 1) -> list[Rule] | None:
    """As a row's reduction with readers in the kernel, and as one over the rows, or over all, without."""
    source, own = arguments(node)[0], spec(node)
    if not isinstance(source, fx.Node):
        return None
    shape = spec(source).shape
    operands = (Operand(source, whole(len(shape))),)
    kept = kept_dims(len(shape), dims, keepdim)
    compute = wide(own.dtype)

    def row(b: Builder, v: Values) -> Sequence[int]:
        total = b.reduce(op, b.cast(v[0], compute))
        if divisor != 1:
            total = b.compute("div", total, b.constant(divisor, compute))
        return [b.cast(total, own.dtype)]

    def column(b: Builder, v: Values) -> Sequence[int]:
        return [b.cast(v[0], compute)]

    rows = Rule(shape, operands, (Output(kept, own.dtype),), row, dims, side_by_side=True)
    columns = Rule(shape, operands, (Output(kept, own.dtype, op, divisor),), column)
    if _is_across(spec(source), dims):
        short = likely(math.prod(shape[d] for d in dims)) <= LONGEST_SIDE_BY_SIDE
        return [rows] if _sums_few(spec(source), dims) else [columns, rows] if short else [columns]
    return [rows, columns]


def reduce_all(
    node: fx.Node, sources: Sequence[fx.Node], formula: Callable[[Builder, Values], int], mean: bool
) -> list[Rule] | None:
    """The sum or mean over all elements of what the formula gives from operands, of which the first has their shape."""
    shape, own = spec(sources[0]).shape, spec(node)
    if 0 in shape:
        return None
    compute, count = wide(own.dtype), math.prod(shape) if mean else 1
    operands = tuple(Operand(source, aligned(spec(source).shape, shape)) for source in sources)

    def column(b: Builder, v: Values) -> Sequence[int]:
        return [formula(b, [b.cast(value, compute) for value in v])]

    def row(b: Builder, v: Values) -> Sequence[int]:
        total = b.reduce("sum", column(b, v)[0])
        return [b.cast(b.compute("div", total, b.constant(count, compute)) if mean else total, own.dtype)]

    return [
        Rule(shape, operands, (Output((), own.dtype),), row, whole(len(shape))),
        Rule(shape, operands, (Output((), own.dtype, "sum", count),), column),
    ]


@lowers("aten.sum.dim_IntList", "aten.sum.default")
def _sum(node: fx.Node) -> list[Rule] | None:
    source = arguments(node)[0]
    if not isinstance(source, fx.Node):
        return None
    dims = reduced_dims(source, argument(node, "dim", 1) if "dim" in str(node.target) else None)
    if not dims or 0 in spec(source).shape:
        return None
    return _reduction(node, "sum", dims, argument(node, "keepdim", 2, False))


@lowers("aten.mean.dim", "aten.mean.default")
def _mean(node: fx.Node) -> list[Rule] | None:
    source = arguments(node)[0]
    if not isinstance(source, fx.Node):
        return None
    dims = reduced_dims(source, argument(node, "dim", 1) if "dim" in str(node.target) else None)
    if not dims or not spec(node).dtype.is_floating_point or 0 in spec(source).shape:
        return None
    divisor = math.prod(spec(source).shape[d] for d in dims)
    return _reduction(node, "sum", dims, argument(node, "keepdim", 2, False), divisor)


@lowers("aten.amax.default", "aten.amin.default")
def _extremum(node: fx.Node) -> list[Rule] | None:
    source = arguments(node)[0]
    if not isinstance(source, fx.Node):
        return None
    dims = reduced_dims(source, argument(node, "dim", 1, ()))
    if not dims or spec(node).dtype is torch.bool:
        return None
    return _reduction(node, "max" if "amax" in str(node.target) else "min", dims, argument(node, "keepdim", 2, False))


@lowers("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim")
def _vector_norm(node: fx.Node) -> Rule | None:
    """sum(|x|^p)^(1/p) of each row; the largest or smallest |x| for p = +-inf, how many are not zero for p = 0.

    Of a row of one number it is |x|, as in eager, where its square would overflow or be 0, too.
    """
    source, power = arguments(node)[0], argument(node, "ord", 1, 2)
    if not isinstance(source, fx.Node) or not isinstance(power, (int, float)):
        return None
    shape, own = spec(source).shape, spec(node)
    dims = reduced_dims(source, argument(node, "dim", 2))
    if not dims or 0 in shape or not own.dtype.is_floating_point:
        return None
    compute = wide(own.dtype)
    is_single = is_of_one(source, dims)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        x = b.cast(v[0], compute)
        if power == 1 or (is_single and power != 0):
            total = b.reduce("sum", b.compute("abs", x))
        elif power == 2:
            total = b.compute("sqrt", b.reduce("sum", b.compute("mul", x, x)))
        elif power == 0:
            total = b.reduce("sum", b.cast(b.compare("ne", x, b.constant(0, compute)), compute))
        elif math.isinf(power):
            total = b.reduce("max" if power > 0 else "min", b.compute("abs", x))
        else:
            powers = b.compute("pow", b.compute("abs", x), b.constant(power, compute))
            total = b.compute("pow", b.reduce("sum", powers), b.constant(1 / power, compute))
        return [b.cast(total, own.dtype)]

    kept = kept_dims(len(shape), dims, argument(node, "keepdim", 3, False))
    outputs = (Output(kept, own.dtype),)
    return Rule(shape, (Operand(source, whole(len(shape))),), outputs, formula, dims, side_by_side=True)


@lowers("aten.var_mean.correction", "aten.var.correction", "aten.std.correction")
def _variance(node: fx.Node) -> Rule | None:
    """The mean of squared distances from the mean, or its root: two passes, no cancellation."""
    source = arguments(node)[0]
    if not isinstance(source, fx.Node):
        return None
    source_spec = spec(source)
    dims = reduced_dims(source, argument(node, "dim", 1))
    correction = argument(node, "correction", 9, 1)
    correction = 1 if correction is None else correction
    count = math.prod(source_spec.shape[d] for d in dims)
    if not dims or count - correction <= 0 or not source_spec.dtype.is_floating_point:
        return None
    kept = kept_dims(len(source_spec.shape), dims, argument(node, "keepdim", 9, False))
    results, is_root = 2 if "var_mean" in str(node.target) else 1, "std" in str(node.target)
    if is_root and len(dims) == len(source_spec.shape) and count > LONGEST_SIDE_BY_SIDE:
        return None  # one row, which no two threads share

    def formula(b: Builder, v: Values) -> Sequence[int]:
        mean, total, _ = row_moments(b, b.cast(v[0], wide(source_spec.dtype)), count)
        variance = b.compute("div", total, b.constant(count - correction, b.dtype(total)))
        variance = b.compute("sqrt", variance) if is_root else variance
        return [b.cast(value, source_spec.dtype) for value in (variance, mean)][:results]

    outputs = (Output(kept, source_spec.dtype),) * results
    operands = (Operand(source, whole(len(source_spec.shape))),)
    return Rule(source_spec.shape, operands, outputs, formula, dims, side_by_side=True)


def row_moments(b: Builder, x: int, count: int) -> tuple[int, int, int]:
    """Of a row: the mean, the sum of squared distances from it, and x - mean.

    The mean is rounded, so the distances do not add up to zero: what they do add up to corrects all three (Chan, Golub,
    LeVeque, "Algorithms for computing the sample variance", The American Statistician 37, 1983). It matters where the
    mean is large against the deviation.
    """
    mean = row_mean(b, x, count)
    distance = b.compute("sub", x, mean)
    correction = row_mean(b, distance, count)
    total = b.reduce("sum", b.compute("mul", distance, distance))
    square_correction = b.compute("mul", b.compute("mul", correction, correction), b.constant(count, b.dtype(x)))
    return (
        b.compute("add", mean, correction),
        b.compute("sub", total, square_correction),
        b.compute("sub", distance, correction),
    )


def row_mean(b: Builder, value: int, count: int) -> int:
    total = b.reduce("sum", value)
    return b.compute("div", total, b.constant(count, b.dtype(total)))


@lowers("aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default")
def _softmax(node: fx.Node) -> Rule | None:
    """Shifted by the row's maximum, so that no exponential overflows."""
    source = arguments(node)[0]
    if not isinstance(source, fx.Node):
        return None
    shape, own = spec(source).shape, spec(node)
    if not shape:
        return None
    dim = argument(node, "dim", 1) % len(shape)
    logarithmic = "log" in str(node.target)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        x = b.cast(v[0], wide(own.dtype))
        shifted = b.compute("sub", x, b.reduce("max", x))
        power = b.compute("exp", shifted)
        total = b.reduce("sum", power)
        if logarithmic:
            return [b.cast(b.compute("sub", shifted, b.compute("log", total)), own.dtype)]
        probability = b.compute("div", power, total)
        if "safe" in str(node.target):
            # A row of which nothing is left by a mask has no shares, rather than NaN.
            nothing = b.compare("eq", b.reduce("max", x), b.constant(-math.inf, b.dtype(x)))
            probability = b.compute("where", nothing, b.constant(0, b.dtype(x)), probability)
        return [b.cast(probability, own.dtype)]

    dims = whole(len(shape))
    return Rule(shape, (Operand(source, dims),), (Output(dims, own.dtype),), formula, (dim,), side_by_side=True)


@lowers("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
def _softmax_backward(node: fx.Node) -> Rule | None:
    """y * (g - sum(g * y)) of a softmax, g - exp(y) * sum(g) of its logarithm."""
    gradient, result = arguments(node)[:2]
    if not (isinstance(gradient, fx.Node) and isinstance(result, fx.Node)):
        return None
    shape, own = spec(result).shape, spec(node)
    if not shape or spec(gradient).shape != shape:
        return None
    dim = argument(node, "dim", 2) % len(shape)
    logarithmic = "log" in str(node.target)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        g, y = (b.cast(value, wide(spec(result).dtype)) for value in v)
        if logarithmic:
            out = b.compute("sub", g, b.compute("mul", b.compute("exp", y), b.reduce("sum", g)))
        else:
            product = b.compute("mul", g, y)
            out = b.compute("sub", product, b.compute("mul", y, b.reduce("sum", product)))
        return [b.cast(out, own.dtype)]

    dims = whole(len(shape))
    operands = (Operand(gradient, dims), Operand(result, dims))
    return Rule(shape, operands, (Output(dims, own.dtype),), formula, (dim,), side_by_side=True)
