"""Reductions that say where or whether: max and min with indices, any and all; products and log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import fx

from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.reductions import kept_dims, reduced_dims
from aottrain.compiler.lowering.rules import (
    Operand,
    Output,
    Rule,
    Values,
    argument,
    arguments,
    lowers,
    spec,
    whole,
    wide,
)
from aottrain.ir.graph import value_of
from aottrain.ir.kernels.affine import offset_of

Formula = Callable[[Builder, Values], Sequence[int]]


def _row_rule(
    node: fx.Node, dims: tuple[int, ...], keepdim: bool, outputs: Sequence[torch.dtype], formula: Formula
) -> Rule | None:
    (source,) = arguments(node)[:1]
    shape = spec(source).shape
    if 0 in shape or (shape and not dims):
        return None
    kept = kept_dims(len(shape), dims, keepdim)
    row_outputs = tuple(Output(kept, dtype) for dtype in outputs)
    return Rule(shape, (Operand(source, whole(len(shape))),), row_outputs, formula, dims)


@lowers("aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default")
def _with_index(node: fx.Node) -> Rule | None:
    """The extreme value, and the first place where it is; NaN is the most extreme."""
    (source,) = arguments(node)[:1]
    shape, dtype = spec(source).shape, spec(source).dtype
    op = "max" if "max" in str(node.target) else "min"
    dim = argument(node, "dim", 1)
    index_only = "arg" in str(node.target)
    dims = reduced_dims(source, dim)
    if dtype is torch.bool or not shape:
        return None
    order = [math.prod(shape[d + 1 :]) if dim is None else 1 for d in range(len(shape))]

    def formula(b: Builder, v: Values) -> Sequence[int]:
        best = b.reduce(op, v[0])
        is_extreme = b.compare("eq", v[0], best)
        if dtype.is_floating_point:
            is_extreme = b.compute("or", is_extreme, b.compare("ne", v[0], v[0]))
        position = b.at(offset_of([b.index[d] for d in dims], [order[d] for d in dims]))
        past_end = b.constant(2**62, torch.int64)
        first = b.reduce("min", b.compute("where", is_extreme, position, past_end))
        return [first] if index_only else [best, first]

    outputs = [torch.int64] if index_only else [item.dtype for item in value_of(node)]
    return _row_rule(node, dims, argument(node, "keepdim", 2, False), outputs, formula)


@lowers("aten.max.default", "aten.min.default")
def _extremum(node: fx.Node) -> Rule | None:
    (source,) = arguments(node)
    op = "max" if "max" in str(node.target) else "min"
    if spec(source).dtype is torch.bool:
        return None
    dims = reduced_dims(source, None)
    return _row_rule(node, dims, False, [spec(node).dtype], lambda b, v: [b.reduce(op, v[0])])


@lowers("aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim", "aten.all.dims")
def _truth(node: fx.Node) -> Rule | None:
    (source,) = arguments(node)[:1]
    op = "max" if "any" in str(node.target) else "min"
    dim = None if "default" in str(node.target) else argument(node, "dim", 1)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        true = v[0] if b.dtype(v[0]) is torch.bool else b.compare("ne", v[0], b.constant(0, b.dtype(v[0])))
        total = b.reduce(op, b.cast(true, torch.int32))
        return [b.cast(b.cast(total, torch.bool), spec(node).dtype)]

    dims = reduced_dims(source, dim)
    return _row_rule(node, dims, argument(node, "keepdim", 2, False), [spec(node).dtype], formula)


@lowers("aten.prod.default", "aten.prod.dim_int")
def _product(node: fx.Node) -> Rule | None:
    (source,) = arguments(node)[:1]
    dtype = spec(node).dtype
    dims = reduced_dims(source, argument(node, "dim", 1) if "dim" in str(node.target) else None)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        return [b.cast(b.reduce("prod", b.cast(v[0], wide(dtype))), dtype)]

    return _row_rule(node, dims, argument(node, "keepdim", 2, False), [dtype], formula)


@lowers("aten.logsumexp.default")
def _logsumexp(node: fx.Node) -> Rule | None:
    """Shifted by the largest, where that is finite."""
    (source,) = arguments(node)[:1]
    dtype = spec(node).dtype
    if not spec(source).dtype.is_floating_point:
        return None

    def formula(b: Builder, v: Values) -> Sequence[int]:
        x = b.cast(v[0], wide(dtype))
        most = b.reduce("max", x)
        endless = b.compare("eq", b.compute("abs", most), b.constant(math.inf, b.dtype(x)))
        shift = b.compute("where", endless, b.constant(0, b.dtype(x)), most)
        total = b.reduce("sum", b.compute("exp", b.compute("sub", x, shift)))
        return [b.cast(b.compute("add", b.compute("log", total), shift), dtype)]

    dims = reduced_dims(source, argument(node, "dim", 1))
    return _row_rule(node, dims, argument(node, "keepdim", 2, False), [dtype], formula)
