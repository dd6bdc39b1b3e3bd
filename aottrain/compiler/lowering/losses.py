"""Losses: negative log-likelihood (the last part of a cross-entropy), squares and their kin, binary cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.elementwise.pointwise import mixed
from aottrain.compiler.lowering.reductions import reduce_all
from aottrain.compiler.lowering.rules import (
    Operand,
    Output,
    Rule,
    Values,
    aligned,
    argument,
    arguments,
    broadcast,
    lowers,
    moved,
    spec,
    whole,
    wide,
)
from aottrain.ir.graph import value_of
from aottrain.ir.kernels.affine import ZERO
from aottrain.ops.losses.nll import MEAN, NONE


def _counted(b: Builder, target_class: int, ignore: int, classes: int) -> tuple[int, int]:
    """Whether a target counts, and its class: checked, and the first one where it does not."""
    counted = b.compare("ne", target_class, b.constant(ignore, torch.int64))
    picked = b.compute("where", counted, target_class, b.constant(0, torch.int64))
    return counted, b.checked(picked, classes, from_end=False)


def _class_dim(scores: object) -> int | None:
    """Of log-probabilities: of images the second dimension, else the last; None where there is no row for each."""
    rank = len(spec(scores).shape) if isinstance(scores, fx.Node) else 0
    return 1 if rank in (2, 4) else None


@lowers("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def _nll_loss(node: fx.Node) -> Rule | None:
    """Of each target that is not ignored -weight[target] * log_probabilities[target]; their sum, or that over the sum
    of the weights. Without weights each is 1. Each loss by itself is left to the libraries: it costs a few loads, and
    then the log-probabilities are kept rather than computed again."""
    log_probabilities, target, weight, reduction, ignore = arguments(node)[:5]
    if _class_dim(log_probabilities) is None or reduction == NONE:
        return None
    classes, shape = spec(log_probabilities).shape[1], spec(target).shape
    results = value_of(node)
    compute = wide(results[0].dtype)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        counted, picked = _counted(b, b.cast(v[1], torch.int64), ignore, classes)
        value = b.load(v[0], (b.index[0], ZERO, *b.index[1:]), [(1, picked)])
        loss, share = b.compute("neg", b.cast(value, compute)), None
        if weight is not None:
            share = b.cast(b.load(v[2], (ZERO,), [(0, picked)]), compute)
            loss = b.compute("mul", loss, share)
        zero = b.constant(0, compute)
        total = b.reduce("sum", b.compute("where", counted, loss, zero))
        counts = b.cast(counted, compute) if share is None else b.compute("where", counted, share, zero)
        number = b.reduce("sum", counts)
        out = b.compute("div", total, number) if reduction == MEAN else total
        return [b.cast(out, results[0].dtype), b.cast(number, results[1].dtype)]

    def count(b: Builder, v: Values) -> Sequence[int]:
        counted, picked = _counted(b, b.cast(v[0], torch.int64), ignore, classes)
        counted = b.compute("and", counted, b.compare("ge", picked, b.constant(0, torch.int64)))  # checked
        number = b.cast(b.reduce("sum", b.cast(counted, compute)), results[1].dtype)
        return [number, number]

    outputs = tuple(Output((), result.dtype) for result in results)
    by_row = Operand(target, aligned(shape, shape))
    # A backward asks for the number of rows alone.
    if weight is None and node.users and all(user.args[1] == 1 for user in node.users):
        return Rule(shape, (by_row,), outputs, count, whole(len(shape)))
    operands = [Operand(log_probabilities, free=True), by_row]
    operands += [] if weight is None else [Operand(weight, free=True)]
    return Rule(shape, tuple(operands), outputs, formula, whole(len(shape)))


@lowers("aottrain.nll_rows.default")
def _nll_rows(node: fx.Node) -> list[Rule]:
    """From memory one element of each row is read; where a kernel has the rows at hand, it is the one that is taken of
    all: their greatest, if the others count as -inf."""
    log_probabilities, target, ignore = arguments(node)
    shape, rows, own = spec(log_probabilities).shape, spec(target).shape, spec(node).dtype
    of_domain = aligned(shape, shape)
    kept, by_row = of_domain[:1] + of_domain[2:], aligned(rows, rows)

    def loss(b: Builder, target_class: int, pick: Callable[[int], int]) -> Sequence[int]:
        counted, picked = _counted(b, target_class, ignore, shape[1])
        value = b.compute("neg", b.cast(pick(picked), own))
        return [b.compute("where", counted, value, b.constant(0, own))]

    def looked_up(b: Builder, v: Values) -> Sequence[int]:
        return loss(b, v[1], lambda picked: b.load(v[0], (b.index[0], ZERO, *b.index[1:]), [(1, picked)]))

    def of_row(b: Builder, v: Values) -> Sequence[int]:
        def pick(picked: int) -> int:
            is_it = b.compare("eq", b.position(1), picked)
            return b.reduce("max", b.compute("where", is_it, b.cast(v[0], own), b.constant(-math.inf, own)))

        return loss(b, v[1], pick)

    read = moved(log_probabilities, (by_row[0], None, *by_row[1:]))
    at_hand = Operand(log_probabilities, of_domain, at_hand=True)
    return [
        Rule(rows, (read, Operand(target, by_row)), (Output(by_row, own),), looked_up),
        Rule(shape, (at_hand, Operand(target, kept)), (Output(kept, own),), of_row, (1,)),
    ]


@lowers("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def _nll_loss_backward(node: fx.Node) -> Rule | None:
    """-weight * gradient at the target's place, zero elsewhere; divided by the sum of the weights that count."""
    gradient, log_probabilities, target, weight, reduction, ignore, total = arguments(node)[:7]
    if _class_dim(log_probabilities) is None:
        return None
    own = spec(node)
    compute, everything = wide(own.dtype), aligned(own.shape, own.shape)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        values = iter(v)
        step, target_class = b.compute("neg", b.cast(next(values), compute)), b.cast(next(values), torch.int64)
        if weight is not None:
            step = b.compute("mul", step, b.cast(next(values), compute))
        if reduction == MEAN:
            step = b.compute("div", step, b.cast(next(values), compute))
        counted = b.compare("ne", target_class, b.constant(ignore, torch.int64))
        is_target = b.compute("and", b.compare("eq", b.position(1), target_class), counted)
        return [b.cast(b.compute("where", is_target, step, b.constant(0, compute)), own.dtype)]

    kept = everything[:1] + everything[2:]
    operands = [Operand(gradient, kept if reduction == NONE else ()), Operand(target, kept)]
    operands += [] if weight is None else [Operand(weight, everything[1:2])]
    operands += [Operand(total, ())] if reduction == MEAN else []
    return Rule(own.shape, tuple(operands), (Output(everything, own.dtype),), formula)


Formula = Callable[[Builder, Values], int]


def _reduced(node: fx.Node, operands: Sequence[Any], reduction: int, formula: Formula) -> list[Rule] | Rule | None:
    """Each element's loss, their mean, or their sum."""
    if not all(isinstance(value, fx.Node) for value in operands) or spec(node).dtype is torch.bool:
        return None
    if reduction == NONE:
        return mixed(node, operands, formula)
    shapes = [spec(value).shape for value in operands]
    if broadcast(shapes) != shapes[0]:
        return None
    return reduce_all(node, operands, formula, mean=reduction == MEAN)


def _gradient(node: fx.Node, operands: Sequence[Any], reduction: int, formula: Formula) -> Rule | None:
    """operands: the gradient first; divided by the number of elements of a mean."""
    count = math.prod(spec(node).shape) if reduction == MEAN else 1

    def scaled(b: Builder, v: Values) -> int:
        share = b.constant(1 / max(count, 1), b.dtype(v[0]))
        return b.compute("mul", formula(b, v), share) if reduction == MEAN else formula(b, v)

    return mixed(node, operands, scaled)


def _halved_square(b: Builder, size: int, over: float) -> int:
    half = b.compute("mul", b.constant(0.5, b.dtype(size)), b.compute("mul", size, size))
    return b.compute("div", half, b.constant(over, b.dtype(size)))


@lowers("aten.mse_loss.default")
def _mse(node: fx.Node) -> list[Rule] | Rule | None:
    def formula(b: Builder, v: Values) -> int:
        difference = b.compute("sub", *v)
        return b.compute("mul", difference, difference)

    return _reduced(node, arguments(node)[:2], argument(node, "reduction", 2, MEAN), formula)


@lowers("aten.mse_loss_backward.default")
def _mse_backward(node: fx.Node) -> Rule | None:
    def formula(b: Builder, v: Values) -> int:
        double = b.compute("mul", b.constant(2, b.dtype(v[0])), b.compute("sub", v[1], v[2]))
        return b.compute("mul", double, v[0])

    return _gradient(node, arguments(node)[:3], arguments(node)[3], formula)


@lowers("aten.smooth_l1_loss.default", "aten.huber_loss.default")
def _smooth(node: fx.Node) -> list[Rule] | Rule | None:
    """Half the square near 0, the absolute value beyond; a Huber loss is that times its border (Huber, 1964)."""
    huber = "huber" in str(node.target)
    border = argument(node, "delta" if huber else "beta", 3, 1.0)
    if border <= 0:
        return None

    def formula(b: Builder, v: Values) -> int:
        size = b.compute("abs", b.compute("sub", *v))
        dtype, edge = b.dtype(size), b.constant(border, b.dtype(size))
        far = b.compute("sub", size, b.constant(0.5 * border, dtype))
        far = b.compute("mul", edge, far) if huber else far
        near = _halved_square(b, size, 1.0 if huber else border)
        return b.compute("where", b.compare("le" if huber else "lt", size, edge), near, far)

    return _reduced(node, arguments(node)[:2], argument(node, "reduction", 2, MEAN), formula)


@lowers("aten.smooth_l1_loss_backward.default", "aten.huber_loss_backward.default")
def _smooth_backward(node: fx.Node) -> Rule | None:
    huber = "huber" in str(node.target)
    gradient, x, target, reduction, border = arguments(node)[:5]
    if border <= 0:
        return None

    def formula(b: Builder, v: Values) -> int:
        g, difference = v[0], b.compute("sub", v[1], v[2])
        edge = b.constant(border, b.dtype(g))
        low = b.compare("le", difference, b.compute("neg", edge))
        high = b.compare("ge", difference, edge)
        near = b.compute("mul", difference, g) if huber else b.compute("div", b.compute("mul", difference, g), edge)
        far = b.compute("mul", edge, g) if huber else g
        return b.compute("where", low, b.compute("neg", far), b.compute("where", high, far, near))

    return _gradient(node, (gradient, x, target), reduction, formula)


@lowers("aten.binary_cross_entropy.default")
def _binary(node: fx.Node) -> list[Rule] | Rule | None:
    """Each logarithm is at least -100, as in eager; probabilities and targets lie between 0 and 1, or it raises."""
    probability, target, weight = (argument(node, name, i) for i, name in enumerate(("self", "target", "weight")))
    if weight is not None:
        return None

    def formula(b: Builder, v: Values) -> int:
        p, t = v
        dtype = b.dtype(p)
        one, least = b.constant(1, dtype), b.constant(-100, dtype)
        zero = b.constant(0, dtype)
        sides = [test for value in (p, t) for test in (b.compare("ge", value, zero), b.compare("le", value, one))]
        for test in sides[1:]:
            sides[0] = b.compute("and", sides[0], test)
        yes = b.compute("max", b.compute("log", p), least)
        no = b.compute("max", b.compute("log1p", b.compute("neg", p)), least)
        loss = b.compute("sub", b.compute("mul", b.compute("sub", t, one), no), b.compute("mul", t, yes))
        return b.require(sides[0], loss)

    return _reduced(node, (probability, target), argument(node, "reduction", 3, MEAN), formula)


@lowers("aten.binary_cross_entropy_backward.default")
def _binary_backward(node: fx.Node) -> Rule | None:
    gradient, probability, target = arguments(node)[:3]
    if argument(node, "weight", 3) is not None:
        return None

    def formula(b: Builder, v: Values) -> int:
        g, p, t = v
        dtype = b.dtype(p)
        variance = b.compute("mul", b.compute("sub", b.constant(1, dtype), p), p)
        variance = b.compute("max", variance, b.constant(1e-12, dtype))
        return b.compute("div", b.compute("mul", g, b.compute("sub", p, t)), variance)

    return _gradient(node, (gradient, probability, target), argument(node, "reduction", 4, MEAN), formula)


@lowers("aten.binary_cross_entropy_with_logits.default")
def _binary_logits(node: fx.Node) -> list[Rule] | Rule | None:
    """(1 - t) * x - (1 + (p - 1) * t) * log(sigmoid(x)), without overflow. p: what a positive counts."""
    x, target = arguments(node)[:2]
    weight, positive = (argument(node, name, i) for i, name in ((2, "weight"), (3, "pos_weight")))

    def formula(b: Builder, v: Values) -> int:
        (logit, t), others = v[:2], iter(v[2:])
        dtype = b.dtype(logit)
        one, zero = b.constant(1, dtype), b.constant(0, dtype)
        share = next(others) if weight is not None else None
        log1p_power = b.compute("log1p", b.compute("exp", b.compute("neg", b.compute("abs", logit))))
        log_sigmoid = b.compute("sub", b.compute("min", logit, zero), log1p_power)
        if positive is not None:
            more = b.compute("mul", b.compute("sub", next(others), one), t)
            log_sigmoid = b.compute("mul", b.compute("add", more, one), log_sigmoid)
        loss = b.compute("sub", b.compute("mul", b.compute("sub", one, t), logit), log_sigmoid)
        return loss if share is None else b.compute("mul", loss, share)

    operands = [each for each in (x, target, weight, positive) if each is not None]
    if len({spec(each).dtype for each in operands if isinstance(each, fx.Node)}) > 1:
        return None  # each step rounds to the type of its own operands, and integers are refused
    return _reduced(node, operands, argument(node, "reduction", 4, MEAN), formula)
