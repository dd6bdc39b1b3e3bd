"""The parts of batch and group normalisation that `ops.norms` defines.

Sums over a channel are those of a row where a channel's elements lie together, and of a column in channels_last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import fx

from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.rules import (
    Operand,
    Output,
    Rule,
    Values,
    arguments,
    lowers,
    spec,
    whole,
    wide,
)
from aottrain.ir.graph import value_of
from aottrain.ops.norms import channel_dims


def _operands(*values: object) -> tuple[Operand, ...]:
    """Whole tensors, and numbers for each channel; None is left out."""
    nodes = [value for value in values if isinstance(value, fx.Node)]
    shapes = [spec(node).shape for node in nodes]
    return tuple(
        Operand(node, (1,) if len(shape) == 1 else whole(len(shape))) for node, shape in zip(nodes, shapes, strict=True)
    )


def _normal(b: Builder, x: int, mean: int, rstd: int) -> int:
    return b.compute("mul", b.compute("sub", b.cast(x, b.dtype(mean)), mean), rstd)


Formula = Callable[[Builder, Values], Sequence[int]]


def _sums_over(
    dims: tuple[int, ...], kept: tuple[int, ...], operands: tuple[Operand, ...], formula: Formula
) -> list[Rule]:
    """Sums over these dimensions of both values that the formula gives, as rows' and as columns'. The first operand has
    the domain's shape, the last one the statistics' type."""
    shape, dtype = spec(operands[0].node).shape, spec(operands[-1].node).dtype

    def row(b: Builder, v: Values) -> Sequence[int]:
        return [b.reduce("sum", value) for value in formula(b, v)]

    sums, columns = (Output(kept, dtype),) * 2, (Output(kept, dtype, "sum"),) * 2
    return [Rule(shape, operands, sums, row, dims), Rule(shape, operands, columns, formula)]


def _channel_sums(x: fx.Node, operands: tuple[Operand, ...], formula: Formula) -> list[Rule]:
    return _sums_over(tuple(channel_dims(len(spec(x).shape))), (1,), operands, formula)


@lowers("aottrain.batch_spread.default")
def _spread(node: fx.Node) -> list[Rule] | None:
    x, mean = arguments(node)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        distance = b.compute("sub", b.cast(v[0], b.dtype(v[1])), v[1])
        return [distance, b.compute("mul", distance, distance)]

    return _channel_sums(x, _operands(x, mean), formula)


@lowers("aottrain.batch_statistics.default")
def _statistics(node: fx.Node) -> Rule:
    *sources, count, momentum, eps = arguments(node)
    results = value_of(node)
    compute = results[0].dtype

    def formula(b: Builder, v: Values) -> Sequence[int]:
        mean, distance_sum, square_sum, *running = (b.cast(value, compute) for value in v)
        number = b.constant(count, compute)
        correction = b.compute("div", distance_sum, number)
        exact_mean = b.compute("add", mean, correction)
        total = b.compute("sub", square_sum, b.compute("mul", distance_sum, correction))
        variance = b.compute("div", total, number)
        rstd = b.compute("rsqrt", b.compute("add", variance, b.constant(eps, compute)))
        batch_statistics = exact_mean, b.compute("div", total, b.constant(count - 1, compute))
        keep, take = b.constant(1 - momentum, compute), b.constant(momentum, compute)
        new_running = [
            b.compute("add", b.compute("mul", take, value), b.compute("mul", keep, old))
            for value, old in zip(batch_statistics, running, strict=True)
        ]
        return [
            b.cast(value, result.dtype) for value, result in zip((exact_mean, rstd, *new_running), results, strict=True)
        ]

    operands = tuple(Operand(source, (0,)) for source in sources)
    return Rule(spec(sources[0]).shape, operands, tuple(Output((0,), result.dtype) for result in results), formula)


@lowers("aottrain.batch_normalize.default")
def _normalize(node: fx.Node) -> Rule:
    x, mean, rstd, weight, bias = arguments(node)
    own = spec(node)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        rest = list(v[3:])
        out = _normal(b, v[0], v[1], v[2])
        if weight is not None:
            out = b.compute("mul", out, b.cast(rest.pop(0), b.dtype(out)))
        if bias is not None:
            out = b.compute("add", out, b.cast(rest.pop(0), b.dtype(out)))
        return [b.cast(out, own.dtype)]

    everything = whole(len(own.shape))
    return Rule(own.shape, _operands(x, mean, rstd, weight, bias), (Output(everything, own.dtype),), formula)


@lowers("aottrain.batch_norm_sums.default")
def _sums(node: fx.Node) -> list[Rule]:
    gradient, x, mean, rstd = arguments(node)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        g = b.cast(v[1], b.dtype(v[2]))
        return [g, b.compute("mul", g, _normal(b, v[0], v[2], v[3]))]

    # First x, by whose layout it is chosen what is a row: its gradient is made in the same layout.
    return _channel_sums(x, _operands(x, gradient, mean, rstd), formula)


@lowers("aottrain.group_norm_sums.default")
def _group_sums(node: fx.Node) -> list[Rule]:
    return _sums_over((0, 3), (1, 2), *_products_of_groups(node))


@lowers("aottrain.group_norm_example_sums.default")
def _example_sums(node: fx.Node) -> Rule:
    return _sums_of_examples(node)[0]


@lowers("aottrain.group_norm_sums_in_rows.default")
def _sums_in_rows(node: fx.Node) -> list[Rule]:
    """Beside what else is done with the rows of groups; on their own where these have no room for it."""
    return list(reversed(_sums_of_examples(node)))


@lowers("aottrain.channel_sums_in_rows.default")
def _channel_sums_in_rows(node: fx.Node) -> list[Rule]:
    """As `_sums_in_rows`."""
    source, own = arguments(node)[0], spec(node)
    shape = spec(source).shape
    kept, operand = whole(2), Operand(source, whole(len(shape)))

    def formula(b: Builder, v: Values) -> Sequence[int]:
        return [b.cast(v[0], wide(own.dtype))]

    def row(b: Builder, v: Values) -> Sequence[int]:
        return [b.cast(b.reduce("sum", value), own.dtype) for value in formula(b, v)]

    within, sums = Output(kept, own.dtype, within=True), Output(kept, own.dtype)
    return [
        Rule(shape, (operand,), (within,), formula),
        Rule(shape, (operand,), (sums,), row, whole(len(shape))[2:]),
    ]


def _sums_of_examples(node: fx.Node) -> tuple[Rule, Rule]:
    """Both sums one after the other in memory: as rows', and as sums over parts of rows."""
    operands, formula = _products_of_groups(node)
    shape, starts = spec(operands[0].node).shape, (0, spec(node).numel // 2)
    rows = tuple(Output((None, 0, 1, 2), spec(node).dtype, start=start) for start in starts)
    parts = tuple(replace(output, within=True) for output in rows)

    def row(b: Builder, v: Values) -> Sequence[int]:
        return [b.reduce("sum", value) for value in formula(b, v)]

    return Rule(shape, operands, rows, row, (3,)), Rule(shape, operands, parts, formula)


def _products_of_groups(node: fx.Node) -> tuple[tuple[Operand, ...], Formula]:
    """The gradient of normal values, and it times these."""

    def formula(b: Builder, v: Values) -> Sequence[int]:
        g = b.cast(v[0], b.dtype(v[2]))
        return [g, b.compute("mul", g, _normal(b, v[1], v[2], v[3]))]

    values = arguments(node)
    return tuple(_of_groups(value, spec(values[0]).shape) for value in values), formula


@lowers("aottrain.group_norm_input_gradient.default")
def _group_input_gradient(node: fx.Node) -> Rule:
    gradient, x, mean, rstd, weight, total, product = arguments(node)
    shape, dtype = spec(x).shape, spec(node).dtype

    def formula(b: Builder, v: Values) -> Sequence[int]:
        g, number = b.cast(v[0], dtype), b.constant(shape[2] * shape[3], dtype)
        first, second = (b.compute("div", value, number) for value in v[-2:])
        scaled = g if weight is None else b.compute("mul", g, v[4])
        normal = _normal(b, v[1], v[2], v[3])
        rest = b.compute("sub", b.compute("sub", scaled, first), b.compute("mul", normal, second))
        return [b.compute("mul", v[3], rest)]

    given = (value for value in (gradient, x, mean, rstd, weight, total, product) if value is not None)
    return Rule(shape, tuple(_of_groups(value, shape) for value in given), (Output(whole(4), dtype),), formula)


def _of_groups(value: fx.Node, shape: Sequence[int]) -> Operand:
    """Of a value that has this shape, or one element in place of some dimensions."""
    return Operand(value, tuple(d if size > 1 else None for d, size in enumerate(spec(value).shape)))


@lowers("aottrain.batch_norm_input_gradient.default")
def _input_gradient(node: fx.Node) -> Rule:
    gradient, x, mean, rstd, weight, total, product = arguments(node)
    own = spec(node)
    count = math.prod(own.shape) // own.shape[1]

    def formula(b: Builder, v: Values) -> Sequence[int]:
        compute = b.dtype(v[2])
        g, number = b.cast(v[0], compute), b.constant(count, compute)
        first, second = (b.compute("div", value, number) for value in v[-2:])
        normal = _normal(b, v[1], v[2], v[3])
        rest = b.compute("sub", b.compute("sub", g, first), b.compute("mul", normal, second))
        step = v[3] if weight is None else b.compute("mul", v[3], b.cast(v[4], compute))
        return [b.cast(b.compute("mul", step, rest), own.dtype)]

    everything = whole(len(own.shape))
    operands = _operands(gradient, x, mean, rstd, weight, total, product)
    return Rule(own.shape, operands, (Output(everything, own.dtype),), formula)
