"""Layer, RMS, batch and group norms, forward and backward: each backward gives all its gradients in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.reductions import row_mean, row_moments
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


def _nodes(*values: Any) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


@lowers("aten.native_layer_norm.default")
def _layer_norm(node: fx.Node) -> Rule | None:
    """(x - mean) * rstd * weight + bias over the last dimensions; also mean and rstd."""
    x, normalized, weight, bias, eps = arguments(node)[:5]
    if not isinstance(x, fx.Node):
        return None
    shape = spec(x).shape
    dims = tuple(range(len(shape) - len(normalized), len(shape)))
    count = math.prod(shape[d] for d in dims)
    results = value_of(node)
    kept = tuple(None if d in dims else d for d in range(len(shape)))

    def formula(b: Builder, v: Values) -> Sequence[int]:
        values = iter(v)
        value = b.cast(next(values), wide(spec(x).dtype))
        mean, _, rstd, distance = _moments(b, value, count, eps)
        out = b.compute("mul", distance, rstd)
        if weight is not None:
            out = b.compute("mul", out, b.cast(next(values), b.dtype(out)))
        if bias is not None:
            out = b.compute("add", out, b.cast(next(values), b.dtype(out)))
        return [b.cast(out, results[0].dtype), b.cast(mean, results[1].dtype), b.cast(rstd, results[2].dtype)]

    operands = (Operand(x, whole(len(shape))), *(Operand(p, dims) for p in _nodes(weight, bias)))
    outputs = (
        Output(whole(len(shape)), results[0].dtype), Output(kept, results[1].dtype), Output(kept, results[2].dtype),
    )  # fmt: skip
    return Rule(shape, operands, outputs, formula, dims)


def _moments(b: Builder, x: int, count: int, eps: float) -> tuple[int, int, int, int]:
    """Mean, variance, its reciprocal root and x - mean, of a row, in two passes."""
    mean, total, distance = row_moments(b, x, count)
    variance = b.compute("div", total, b.constant(count, b.dtype(x)))
    return mean, variance, b.compute("rsqrt", b.compute("add", variance, b.constant(eps, b.dtype(x)))), distance


def _input_gradient(b: Builder, scaled: int, normal: int, rstd: int, count: int) -> int:
    """rstd * (scaled - mean(scaled) - normal * mean(scaled * normal)), means over the row."""
    first = row_mean(b, scaled, count)
    second = row_mean(b, b.compute("mul", scaled, normal), count)
    return b.compute("mul", rstd, b.compute("sub", b.compute("sub", scaled, first), b.compute("mul", normal, second)))


@lowers("aten.native_layer_norm_backward.default")
def _layer_norm_backward(node: fx.Node) -> Rule | None:
    gradient, x, normalized, mean, rstd, weight, bias = arguments(node)[:7]
    if not (isinstance(gradient, fx.Node) and isinstance(x, fx.Node)):
        return None
    shape = spec(x).shape
    dims = tuple(range(len(shape) - len(normalized), len(shape)))
    count = math.prod(shape[d] for d in dims)
    results = list(value_of(node))
    mask = _result_mask(results)
    everything = whole(len(shape))
    kept = tuple(None if d in dims else d for d in range(len(shape)))
    if not (isinstance(mean, fx.Node) and isinstance(rstd, fx.Node)):
        return None
    operands = (
        Operand(gradient, everything), Operand(x, everything), Operand(mean, kept), Operand(rstd, kept),
        *(Operand(p, dims) for p in _nodes(weight)),
    )  # fmt: skip

    def formula(b: Builder, v: Values) -> Sequence[int]:
        compute = wide(spec(x).dtype)
        g, value, center, scale, *rest = (b.cast(item, compute) for item in v)
        normal = b.compute("mul", b.compute("sub", value, center), scale)
        scaled = b.compute("mul", g, rest[0]) if rest else g
        out = []
        if mask[0]:
            out.append(b.cast(_input_gradient(b, scaled, normal, scale, count), results[0].dtype))
        if mask[1]:
            out.append(b.compute("mul", g, normal))
        if mask[2]:
            out.append(g)
        return out

    return Rule(shape, operands, _norm_outputs(results, mask, everything, dims), formula, dims)


def _result_mask(results: Sequence[Any]) -> list[bool]:
    """The results that there are. Some ops give a tensor where their mask asks for none: nothing reads that one."""
    return [result is not None for result in results]


def _norm_outputs(
    results: Sequence[Any], mask: Any, everything: tuple[int, ...], dims: tuple[int, ...]
) -> tuple[Output, ...]:
    """Of the results that the mask asks for: the input's gradient, the weight's, the bias's."""
    kinds = ((everything, None), (dims, "sum"), (dims, "sum"))[: len(results)]
    return tuple(
        Output(output_dims, result.dtype, column)
        for (output_dims, column), result, flag in zip(kinds, results, mask, strict=True)
        if flag
    )


@lowers("aten._fused_rms_norm.default")
def _rms_norm(node: fx.Node) -> Rule | None:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019); also the reciprocal root."""
    x, normalized, weight, eps = arguments(node)[:4]
    if not isinstance(x, fx.Node):
        return None
    shape = spec(x).shape
    dims = tuple(range(len(shape) - len(normalized), len(shape)))
    count = math.prod(shape[d] for d in dims)
    results = value_of(node)
    kept = tuple(None if d in dims else d for d in range(len(shape)))
    compute = wide(spec(x).dtype)
    small = torch.finfo(compute).eps if eps is None else eps

    def formula(b: Builder, v: Values) -> Sequence[int]:
        value = b.cast(v[0], compute)
        square = row_mean(b, b.compute("mul", value, value), count)
        rstd = b.compute("rsqrt", b.compute("add", square, b.constant(small, compute)))
        out = b.compute("mul", value, rstd)
        if len(v) > 1:
            out = b.compute("mul", out, b.cast(v[1], compute))
        return [b.cast(out, results[0].dtype), b.cast(rstd, results[1].dtype)]

    operands = (Operand(x, whole(len(shape))), *(Operand(p, dims) for p in _nodes(weight)))
    return Rule(
        shape, operands, (Output(whole(len(shape)), results[0].dtype), Output(kept, results[1].dtype)), formula, dims
    )


@lowers("aten._fused_rms_norm_backward.default")
def _rms_norm_backward(node: fx.Node) -> Rule | None:
    gradient, x, normalized, rstd, weight = arguments(node)[:5]
    if not (isinstance(gradient, fx.Node) and isinstance(x, fx.Node) and isinstance(rstd, fx.Node)):
        return None
    shape = spec(x).shape
    dims = tuple(range(len(shape) - len(normalized), len(shape)))
    count = math.prod(shape[d] for d in dims)
    results = list(value_of(node))
    mask = _result_mask(results)
    everything = whole(len(shape))
    kept = tuple(None if d in dims else d for d in range(len(shape)))

    def formula(b: Builder, v: Values) -> Sequence[int]:
        g, value, scale, *rest = (b.cast(item, wide(spec(x).dtype)) for item in v)
        normal = b.compute("mul", value, scale)
        scaled = b.compute("mul", g, rest[0]) if rest else g
        out = []
        if mask[0]:
            second = row_mean(b, b.compute("mul", scaled, normal), count)
            difference = b.compute("sub", scaled, b.compute("mul", normal, second))
            out.append(b.cast(b.compute("mul", scale, difference), results[0].dtype))
        if mask[1]:
            out.append(b.compute("mul", g, normal))
        return out

    operands = (
        Operand(gradient, everything), Operand(x, everything), Operand(rstd, kept),
        *(Operand(p, dims) for p in _nodes(weight)),
    )  # fmt: skip
    return Rule(shape, operands, _norm_outputs(results, mask, everything, dims), formula, dims)


@lowers("aten._native_batch_norm_legit_functional.default")
def _batch_norm(node: fx.Node) -> Rule | None:
    """Statistics over all dimensions but the channel's; also they, and the new running statistics."""
    x, weight, bias, running_mean, running_var, training, momentum, eps = arguments(node)[:8]
    if not isinstance(x, fx.Node):
        return None
    shape, compute = spec(x).shape, wide(spec(x).dtype)
    if not training or len(shape) < 2 or running_mean is None or running_var is None:
        return None
    dims = tuple(d for d in range(len(shape)) if d != 1)
    count = math.prod(shape[d] for d in dims)
    if count < 2:
        return None
    results = value_of(node)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        values = iter([b.cast(value, compute) for value in v])
        value = next(values)
        mean, variance, rstd, distance = _moments(b, value, count, eps)
        out = b.compute("mul", distance, rstd)
        if weight is not None:
            out = b.compute("mul", out, next(values))
        if bias is not None:
            out = b.compute("add", out, next(values))
        keep, take = b.constant(1 - momentum, compute), b.constant(momentum, compute)
        unbiased = b.compute("mul", variance, b.constant(count / (count - 1), compute))
        new_running = [
            b.compute("add", b.compute("mul", take, fresh), b.compute("mul", keep, next(values)))
            for fresh in (mean, unbiased)
        ]
        return [
            b.cast(item, result.dtype) for item, result in zip((out, mean, rstd, *new_running), results, strict=True)
        ]

    operands = (
        Operand(x, whole(len(shape))),
        *(Operand(p, (1,)) for p in _nodes(weight, bias, running_mean, running_var)),
    )
    outputs = (
        Output(whole(len(shape)), results[0].dtype),
        *(Output((1,), result.dtype) for result in results[1:]),
    )
    return Rule(shape, operands, outputs, formula, dims)


@lowers("aten.native_batch_norm_backward.default")
def _batch_norm_backward(node: fx.Node) -> Rule | None:
    gradient, x, weight, _, _, save_mean, save_rstd, training = arguments(node)[:8]
    if not training or not isinstance(x, fx.Node) or not isinstance(gradient, fx.Node):
        return None
    shape, compute = spec(x).shape, wide(spec(x).dtype)
    everything, dims = whole(len(shape)), tuple(d for d in range(len(shape)) if d != 1)
    count = math.prod(shape[d] for d in dims)
    results = list(value_of(node))
    mask = _result_mask(results)
    if not (isinstance(save_mean, fx.Node) and isinstance(save_rstd, fx.Node)):
        return None

    def formula(b: Builder, v: Values) -> Sequence[int]:
        g, value, center, scale, *rest = (b.cast(item, compute) for item in v)
        normal = b.compute("mul", b.compute("sub", value, center), scale)
        total, product = b.reduce("sum", g), b.reduce("sum", b.compute("mul", g, normal))
        first, second = (b.compute("div", sum_, b.constant(count, compute)) for sum_ in (total, product))
        step = b.compute("mul", scale, rest[0]) if rest else scale
        difference = b.compute("sub", b.compute("sub", g, first), b.compute("mul", normal, second))
        gradients = zip((b.compute("mul", step, difference), product, total), results, mask, strict=True)
        return [b.cast(item, result.dtype) for item, result, flag in gradients if flag]

    operands = (
        Operand(gradient, everything), Operand(x, everything), Operand(save_mean, (1,)), Operand(save_rstd, (1,)),
        *(Operand(p, (1,)) for p in _nodes(weight)),
    )  # fmt: skip
    wheres = (everything, (1,), (1,))
    outputs = tuple(
        Output(where, result.dtype) for where, result, flag in zip(wheres, results, mask, strict=True) if flag
    )
    return Rule(shape, operands, outputs, formula, dims)
