"""Draws inside kernels: the same numbers as `ops.random.philox` gives, computed where they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    spec,
    whole,
)
from aottrain.ir.kernels.affine import Affine, offset_of
from aottrain.ops.random.philox import SIGNIFICAND_BITS


@lowers("aottrain.philox_uniform.default", "aottrain.philox_normal.default")
def _draw(node: fx.Node) -> Rule | None:
    """Element e of the draw: word e % 4 of block e // 4 as a number in [0, 1) of 24 bits, or of as many as the result's
    type holds; or of two such numbers two normal ones, rounded to that type."""
    state, draw = arguments(node)[:2]
    own = spec(node)
    is_normal = "normal" in str(node.target)
    lowered = own.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not lowered or not isinstance(state, fx.Node) or math.prod(own.shape) >= 1 << 31:
        return None
    steps = [math.prod(own.shape[d + 1 :]) for d in range(len(own.shape))]

    def formula(b: Builder, v: Values) -> Sequence[int]:
        seed, offset = (b.load(v[0], (Affine((), i),)) for i in (0, 1))
        number = b.compute("add", offset, b.constant(draw, torch.int64))
        element = b.at(offset_of(b.index, steps))
        op = "philox_normal" if is_normal else "philox"
        drawn = b.compute(op, seed, number, element, dtype=torch.float32)
        if not is_normal and own.dtype != torch.float32:
            fine, coarse = (b.constant(2.0 ** (sign * SIGNIFICAND_BITS[own.dtype]), torch.float32) for sign in (1, -1))
            drawn = b.compute("mul", b.compute("floor", b.compute("mul", drawn, fine)), coarse)
        return [b.cast(drawn, own.dtype)]

    return Rule(own.shape, (Operand(state, free=True),), (Output(whole(len(own.shape)), own.dtype),), formula)


@lowers("aten.arange.start_step", "aten.arange.default", "aten.arange.start")
def _arange(node: fx.Node) -> Rule | None:
    """Whole numbers, one step apart from each other."""
    name = str(node.target)
    if "default" in name:
        start, step = 0, 1
    else:
        start = argument(node, "start", 0, 0)
        step = argument(node, "step", 2, 1) if "start_step" in name else 1
    own = spec(node)
    if own.dtype.is_floating_point or not isinstance(start, int) or not isinstance(step, int):
        return None

    def formula(b: Builder, v: Values) -> Sequence[int]:
        scaled = b.compute("mul", b.position(0), b.constant(step, torch.int64))
        return [b.cast(b.compute("add", scaled, b.constant(start, torch.int64)), own.dtype)]

    return Rule(own.shape, (), (Output((0,), own.dtype),), formula)


@lowers("aten.eye.default", "aten.eye.m")
def _eye(node: fx.Node) -> Rule | None:
    """One where row and column are of one number."""
    own = spec(node)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        return [b.cast(b.compare("eq", b.position(0), b.position(1)), own.dtype)]

    return Rule(own.shape, (), (Output((0, 1), own.dtype),), formula)
