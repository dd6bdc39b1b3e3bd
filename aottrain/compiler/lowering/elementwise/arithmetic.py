"""Division with rounding, remainders, powers, interpolation, bounds that are tensors, tests for infinity."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.elementwise.pointwise import factor, in_halves, mixed, rounded
from aottrain.compiler.lowering.rules import (
    Rule,
    Values,
    argument,
    arguments,
    lowers,
    spec,
    wide,
)
from aottrain.ir.kernels.numbers import fits


def _divides_safely(node: fx.Node, divisor: Any) -> bool:
    """Integers trap where a divisor is 0, or -1 with the smallest number: only constant divisors are used."""
    if spec(node).dtype.is_floating_point:
        return True
    whole = isinstance(divisor, int) and not isinstance(divisor, bool)
    return whole and divisor not in (0, -1) and fits(divisor, spec(node).dtype)  # 256 is 0 for uint8


@lowers("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.fmod.Tensor", "aten.fmod.Scalar")
def _remainder(node: fx.Node) -> Rule | None:
    """fmod has the dividend's sign, remainder the divisor's."""
    dividend, divisor = arguments(node)[:2]
    if spec(node).dtype is torch.bool or not _divides_safely(node, divisor):
        return None

    def formula(b: Builder, v: Values) -> int:
        remainder = b.compute("fmod", *v)
        return remainder if "fmod" in str(node.target) else _with_sign_of(b, remainder, v[1])

    return mixed(node, (dividend, divisor), formula, rounds=True)


def _with_sign_of(b: Builder, remainder: int, divisor: int) -> int:
    zero = b.constant(0, b.dtype(remainder))
    signs_differ = b.compute("xor", b.compare("lt", remainder, zero), b.compare("lt", divisor, zero))
    is_shifted = b.compute("and", b.compare("ne", remainder, zero), signs_differ)
    return b.compute("where", is_shifted, b.compute("add", remainder, divisor), remainder)


_XLOGY = ("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other", "special_xlog1py.default",
          "special_xlog1py.self_scalar", "special_xlog1py.other_scalar")  # fmt: skip


@lowers(*(f"aten.{name}" for name in _XLOGY))
def _times_logarithm(node: fx.Node) -> Rule | None:
    """x * log(y), or x * log(1 + y): 0 where x is 0, whatever the logarithm is, but NaN where y is."""
    function = "log1p" if "log1p" in str(node.target) else "log"
    own = spec(node).dtype
    if not own.is_floating_point:
        return None

    def formula(b: Builder, v: Values) -> int:
        x, y = v
        zero, logarithm = b.constant(0, b.dtype(x)), b.compute(function, y)
        if spec(node).device.type == "cpu":  # whose kernel rounds it
            logarithm = b.cast(b.cast(logarithm, own), b.dtype(x))
        product = b.compute("mul", x, logarithm)
        product = b.compute("where", b.compare("eq", x, zero), zero, product)
        return b.compute("where", b.compare("ne", y, y), y, product)

    return mixed(node, arguments(node)[:2], formula, rounds=True)


@lowers("aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.floor_divide.default")
def _rounded_division(node: fx.Node) -> Rule | None:
    dividend, divisor = arguments(node)[:2]
    mode = "floor" if "floor" in str(node.target) else argument(node, "rounding_mode", 2)
    dtype = spec(node).dtype
    if mode is None or dtype is torch.bool or not _divides_safely(node, divisor):
        return None

    # Eager rounds each step of it for tensors of halves: 5.99 / 2 is 3 then. Beside one number it computes in float32.
    exact = factor(node)
    stored = dtype if isinstance(divisor, fx.Node) and exact is None else wide(dtype)

    def formula(b: Builder, v: Values) -> int:
        if not dtype.is_floating_point:
            quotient = b.compute("div", *v)
            return quotient if mode == "trunc" else _floored(b, quotient, *v)
        if mode == "floor":
            return _float_floored(b, v[0], v[1], stored)
        return b.compute("trunc", _step(b, "div", v[0], v[1], stored))

    return mixed(node, (dividend, divisor), formula, exact=exact)


def _step(b: Builder, op: str, x: int, y: int, stored: torch.dtype) -> int:
    """x op y, rounded to the type in which it is stored."""
    return rounded(b, b.compute(op, x, y), stored)


def _floored(b: Builder, quotient: int, x: int, y: int) -> int:
    """One less than the truncated quotient where that was rounded up."""
    remainder, zero = b.compute("fmod", x, y), b.constant(0, b.dtype(x))
    signs_differ = b.compute("xor", b.compare("lt", remainder, zero), b.compare("lt", y, zero))
    was_rounded_up = b.compute("and", b.compare("ne", remainder, zero), signs_differ)
    return b.compute("where", was_rounded_up, b.compute("sub", quotient, b.constant(1, b.dtype(x))), quotient)


def _float_floored(b: Builder, x: int, y: int, stored: torch.dtype) -> int:
    """Through the exact remainder, so that the quotient's rounding does not show; x / y where y is 0. stored: as
    `_step` has it.

    The steps of Python's own floor division of floats, which is what eager follows.
    """
    dtype = b.dtype(x)
    zero, one, half = (b.constant(number, dtype) for number in (0, 1, 0.5))
    remainder, ratio = b.compute("fmod", x, y), b.compute("div", x, y)
    quotient = _step(b, "div", _step(b, "sub", x, remainder, stored), y, stored)
    signs_differ = b.compute("xor", b.compare("lt", remainder, zero), b.compare("lt", y, zero))
    is_shifted = b.compute("and", b.compare("ne", remainder, zero), signs_differ)
    quotient = b.compute("where", is_shifted, _step(b, "sub", quotient, one, stored), quotient)
    floor = b.compute("floor", quotient)
    high = b.compare("gt", b.compute("sub", quotient, floor), half)
    floor = b.compute("where", high, b.compute("add", floor, one), floor)
    below = b.compare("lt", ratio, zero)
    signed_zero = b.compute("where", below, b.constant(-0.0, dtype), b.compute("mul", ratio, zero))
    floor = b.compute("where", b.compare("ne", quotient, zero), floor, signed_zero)
    return b.compute("where", b.compare("eq", y, zero), ratio, floor)


@lowers("aten.lerp.Scalar", "aten.lerp.Tensor")
def _lerp(node: fx.Node) -> Rule | None:
    """From the end that is nearer, so that weights 0 and 1 give the ends."""

    def formula(b: Builder, v: Values) -> int:
        start, end, weight = v
        dtype = b.dtype(start)
        difference = b.compute("sub", end, start)
        is_near_start = b.compare("lt", b.compute("abs", weight), b.constant(0.5, dtype))
        forward = b.compute("fma", weight, difference, start)
        backward = b.compute("fma", difference, b.compute("sub", weight, b.constant(1, dtype)), end)
        return b.compute("where", is_near_start, forward, backward)

    return mixed(node, arguments(node)[:3], formula)


@lowers("aten.clamp.Tensor", "aten.clamp_min.Tensor", "aten.clamp_max.Tensor")
def _clamp(node: fx.Node) -> Rule | None:
    """NaN wins wherever it is."""
    name = str(node.target)
    low = argument(node, "min", 1) if "max" not in name else None
    high = argument(node, "max", 2 if "clamp.T" in name else 1) if "min" not in name else None
    if spec(node).dtype is torch.bool:
        return None

    def formula(b: Builder, v: Values) -> int:
        value, *bounds = v
        for beyond, limit in (("lt", low), ("gt", high)):
            if limit is not None:
                bound = bounds.pop(0)
                exceeds = b.compute("or", b.compare(beyond, value, bound), b.compare("ne", bound, bound))
                value = b.compute("where", exceeds, bound, value)
        return value

    return mixed(node, [value for value in (arguments(node)[0], low, high) if value is not None], formula)


@lowers("aten.isinf.default", "aten.isposinf.default", "aten.isneginf.default")
def _isinf(node: fx.Node) -> Rule | None:
    (source,) = arguments(node)[:1]
    name = str(node.target)
    if not spec(source).dtype.is_floating_point:
        return None

    def formula(b: Builder, v: Values) -> int:
        dtype = b.dtype(v[0])
        value = v[0] if "pos" in name or "neg" in name else b.compute("abs", v[0])
        return b.compare("eq", value, b.constant(-math.inf if "neg" in name else math.inf, dtype))

    return mixed(node, (source,), formula, spec(source).dtype)


@lowers("aten.fill.Tensor")
def _fill(node: fx.Node) -> Rule | None:
    value = arguments(node)[1]
    return mixed(node, (value,), lambda b, v: v[0])


@lowers("aten.nan_to_num.default")
def _nan_to_num(node: fx.Node) -> Rule | None:
    dtype = spec(node).dtype
    if not dtype.is_floating_point:
        return None
    limit = torch.finfo(dtype).max
    nan, high, low = (argument(node, name, i, None) for i, name in ((1, "nan"), (2, "posinf"), (3, "neginf")))

    def formula(b: Builder, v: Values) -> int:
        (x,) = v
        kind = b.dtype(x)
        for edge, replacement, default in ((math.inf, high, limit), (-math.inf, low, -limit)):
            number = b.constant(default if replacement is None else replacement, kind)
            x = b.compute("where", b.compare("eq", v[0], b.constant(edge, kind)), number, x)
        return b.compute("where", b.compare("ne", v[0], v[0]), b.constant(nan or 0.0, kind), x)

    return mixed(node, arguments(node)[:1], formula)


@lowers("aten.pow.Tensor_Scalar")
def _pow(node: fx.Node) -> Rule | None:
    """Small powers as eager computes them, the others by the library's pow."""
    power = arguments(node)[1]
    own = spec(node).dtype
    if not isinstance(power, (int, float)) or own is torch.bool or not (own.is_floating_point or power in (1, 2, 3)):
        return None
    power = in_halves(power, own)
    on_cpu = spec(node).device.type == "cpu"
    stored = own if own is torch.bfloat16 and on_cpu else wide(own)  # eager's vectors round each product

    def formula(b: Builder, v: Values) -> int:
        (x,) = v
        if power == 1:
            return x
        if power == 2:
            return b.compute("mul", x, x)
        if power == 3:
            return b.compute("mul", _step(b, "mul", x, x, stored), x)
        if power in (0.5, -0.5) and own is not torch.float16:
            return b.compute("sqrt" if power > 0 else "rsqrt", x)
        if power == -1:
            return b.compute("reciprocal", x)
        if power == -2:
            return b.compute("reciprocal", _step(b, "mul", x, x, stored))
        # Eager keeps the exponent in double, where it does not compute in vectors.
        op = "pow" if b.dtype(x) is torch.float64 else "power"
        return b.cast(b.compute(op, b.cast(x, torch.float64), b.constant(power, torch.float64)), b.dtype(x))

    return mixed(node, arguments(node)[:1], formula)


@lowers("aten.square.default")
def _square(node: fx.Node) -> Rule | None:
    return mixed(node, arguments(node)[:1], lambda b, v: b.compute("mul", v[0], v[0]))


@lowers("aten.pow.Scalar")
def _pow_of_number(node: fx.Node) -> Rule | None:
    base, power = arguments(node)[:2]
    own = spec(node).dtype
    if not own.is_floating_point or not isinstance(base, (int, float)):
        return None
    base = in_halves(base, own)
    return mixed(node, [power], lambda b, v: b.compute("pow", b.constant(base, b.dtype(v[0])), v[0]))


@lowers("aten.pow.Tensor_Tensor")
def _pow_tensor(node: fx.Node) -> Rule | None:
    if not spec(node).dtype.is_floating_point:
        return None
    return mixed(node, arguments(node)[:2], lambda b, v: b.compute("pow", *v))
