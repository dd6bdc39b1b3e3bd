"""Negative log-likelihood, the last part of a cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from aottrain.compiler.lowering.rules import Builder, Operand, Output, Rule, Values, arguments, lowers, spec, wide
from aottrain.ir.affine import ZERO
from aottrain.ir.graph import value_of

_NONE, _MEAN = 0, 1


def _is_plain(log_probabilities: object, weight: object) -> bool:
    return isinstance(log_probabilities, fx.Node) and len(spec(log_probabilities).shape) == 2 and weight is None


@lowers("aten.nll_loss_forward.default")
def _nll_loss(node: fx.Node) -> Rule | None:
    """-sum of log_probabilities[row, target[row]] over rows whose target is not ignored; divided by their number."""
    log_probabilities, target, weight, reduction, ignore = arguments(node)[:5]
    if not _is_plain(log_probabilities, weight) or reduction == _NONE:
        return None
    rows, classes = spec(log_probabilities).shape
    results = value_of(node)
    compute = wide(results[0].dtype)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        counted = b.compare("ne", v[1], b.constant(ignore, torch.int64))
        picked = b.compute("where", counted, v[1], b.constant(0, torch.int64))
        value = b.load(v[0], (b.index[0], ZERO), [(1, b.checked(picked, classes))])
        loss = b.compute("neg", b.cast(value, compute))
        total = b.reduce("sum", b.compute("where", counted, loss, b.constant(0, compute)))
        number = b.reduce("sum", b.cast(counted, compute))
        out = b.compute("div", total, number) if reduction == _MEAN else total
        return [b.cast(out, results[0].dtype), b.cast(number, results[1].dtype)]

    operands = (Operand(log_probabilities, free=True), Operand(target, (None if rows == 1 else 0,)))
    return Rule((rows,), operands, (Output((), results[0].dtype), Output((), results[1].dtype)), formula, (0,))


@lowers("aten.nll_loss_backward.default")
def _nll_loss_backward(node: fx.Node) -> Rule | None:
    """-gradient at the target's place, zero elsewhere; divided by the number of rows that count."""
    gradient, log_probabilities, target, weight, reduction, ignore, total = arguments(node)[:7]
    if not _is_plain(log_probabilities, weight):
        return None
    own = spec(node)
    compute = wide(own.dtype)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        goal = b.cast(v[1], torch.int64)
        step = b.compute("neg", b.cast(v[0], compute))
        if reduction == _MEAN:
            step = b.compute("div", step, b.cast(v[2], compute))
        counted = b.compare("ne", goal, b.constant(ignore, torch.int64))
        here = b.compute("and", b.compare("eq", b.position(1), goal), counted)
        return [b.cast(b.compute("where", here, step, b.constant(0, compute)), own.dtype)]

    rows = None if own.shape[0] == 1 else 0
    operands = [Operand(gradient, (rows,) if reduction == _NONE else ()), Operand(target, (rows,))]
    if reduction == _MEAN:
        operands.append(Operand(total, ()))
    outputs = (Output((None if own.shape[0] == 1 else 0, None if own.shape[1] == 1 else 1), own.dtype),)
    return Rule(own.shape, tuple(operands), outputs, formula)
