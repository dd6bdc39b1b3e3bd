"""Activation functions and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.elementwise.pointwise import at_least, at_most, mixed
from aottrain.compiler.lowering.rules import (
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
from aottrain.ir.graph import value_of
from aottrain.ir.kernels.numbers import held

_SQRT_HALF, _SQRT_2_OVER_PI, _TWO_OVER_SQRT_PI = math.sqrt(0.5), math.sqrt(2 / math.pi), 2 / math.sqrt(math.pi)
_CUBIC = 0.044715
_SIXTH = 0.16666667163372040  # 1 / 6 in float32, which eager takes for doubles too


@lowers("aten.gelu.default")
def _gelu(node: fx.Node) -> Rule | None:
    """x * P(X <= x), the normal distribution's function, exact or by tanh (Hendrycks and Gimpel, 2016)."""
    by_tanh = argument(node, "approximate", 1, "none") == "tanh"

    def formula(b: Builder, v: Values) -> int:
        (x,) = v
        dtype = b.dtype(x)
        half, one = b.constant(0.5, dtype), b.constant(1, dtype)
        scaled = _tanh_argument(b, x) if by_tanh else b.compute("mul", x, b.constant(_SQRT_HALF, dtype))
        erf = b.compute("tanh" if by_tanh else "erf", scaled)
        return b.compute("mul", b.compute("mul", half, x), b.compute("add", one, erf))

    return mixed(node, arguments(node)[:1], formula)


def _tanh_argument(b: Builder, x: int) -> int:
    dtype = b.dtype(x)
    cube = b.compute("mul", b.compute("mul", x, x), x)
    sum_ = b.compute("add", x, b.compute("mul", b.constant(_CUBIC, dtype), cube))
    return b.compute("mul", b.constant(_SQRT_2_OVER_PI, dtype), sum_)


@lowers("aten.gelu_backward.default")
def _gelu_backward(node: fx.Node) -> Rule | None:
    by_tanh = argument(node, "approximate", 2, "none") == "tanh"

    def formula(b: Builder, v: Values) -> int:
        gradient, x = v
        dtype = b.dtype(x)
        half, one = b.constant(0.5, dtype), b.constant(1, dtype)
        if by_tanh:
            tanh = b.compute("tanh", _tanh_argument(b, x))
            left = b.compute("mul", half, b.compute("add", one, tanh))
            slope = b.compute("sub", one, b.compute("mul", tanh, tanh))
            square = b.compute("mul", x, x)
            square_term = b.compute("add", one, b.compute("mul", b.constant(3 * _CUBIC, dtype), square))
            slope_of_argument = b.compute("mul", b.constant(_SQRT_2_OVER_PI, dtype), square_term)
            right = b.compute("mul", b.compute("mul", b.compute("mul", half, x), slope), slope_of_argument)
            return b.compute("mul", gradient, b.compute("add", left, right))
        erf = b.compute("erf", b.compute("mul", x, b.constant(_SQRT_HALF, dtype)))
        cdf = b.compute("mul", half, b.compute("add", one, erf))
        square = b.compute("mul", b.compute("mul", x, x), b.constant(-0.5, dtype))
        density = b.compute("mul", b.compute("exp", square), b.constant(_TWO_OVER_SQRT_PI * _SQRT_HALF * 0.5, dtype))
        return b.compute("mul", gradient, b.compute("fma", x, density, cdf))

    return mixed(node, arguments(node)[:2], formula)


@lowers("aten.silu.default")
def _silu(node: fx.Node) -> Rule | None:
    """x / (1 + exp(-x)), eager's order of operations."""

    def formula(b: Builder, v: Values) -> int:
        (x,) = v
        return b.compute("div", x, b.compute("add", b.constant(1, b.dtype(x)), b.compute("exp", b.compute("neg", x))))

    return mixed(node, arguments(node)[:1], formula)


@lowers("aten.silu_backward.default")
def _silu_backward(node: fx.Node) -> Rule | None:
    def formula(b: Builder, v: Values) -> int:
        gradient, x = v
        one = b.constant(1, b.dtype(x))
        sigmoid = b.compute("div", one, b.compute("add", one, b.compute("exp", b.compute("neg", x))))
        rest = b.compute("fma", x, b.compute("sub", one, sigmoid), one)
        return b.compute("mul", b.compute("mul", gradient, sigmoid), rest)

    return mixed(node, arguments(node)[:2], formula)


@lowers("aten.sigmoid_backward.default", "aten.tanh_backward.default")
def _bounded_backward(node: fx.Node) -> Rule | None:
    """From the result y: g * (1 - y) * y of a sigmoid, g * (1 - y^2) of a tanh."""
    sigmoid = "sigmoid" in str(node.target)

    def formula(b: Builder, v: Values) -> int:
        gradient, y = v
        one = b.constant(1, b.dtype(y))
        if sigmoid:
            return b.compute("mul", b.compute("mul", gradient, b.compute("sub", one, y)), y)
        return b.compute("mul", gradient, b.compute("fma", b.compute("neg", y), y, one))

    return mixed(node, arguments(node)[:2], formula)


@lowers("aten.leaky_relu.default")
def _leaky_relu(node: fx.Node) -> Rule | None:
    slope = argument(node, "negative_slope", 1, 0.01)

    def formula(b: Builder, v: Values) -> int:
        (x,) = v
        positive = b.compare("gt", x, b.constant(0, b.dtype(x)))
        return b.compute("where", positive, x, b.compute("mul", x, b.constant(slope, b.dtype(x))))

    return mixed(node, arguments(node)[:1], formula) if _is_float(node) else None


@lowers("aten.leaky_relu_backward.default")
def _leaky_relu_backward(node: fx.Node) -> Rule | None:
    gradient, x, slope = arguments(node)[:3]

    def formula(b: Builder, v: Values) -> int:
        positive = b.compare("gt", v[1], b.constant(0, b.dtype(v[1])))
        return b.compute("where", positive, v[0], b.compute("mul", v[0], b.constant(slope, b.dtype(v[0]))))

    return mixed(node, (gradient, x), formula) if _is_float(node) else None


def _is_float(node: fx.Node) -> bool:
    return spec(node).dtype.is_floating_point


def _product(a: float, b: float, dtype: torch.dtype) -> float:
    """Of two numbers in the type of the arithmetic, which each is rounded to first."""
    return held(a, dtype) * held(b, dtype)


@lowers("aten.elu.default")
def _elu(node: fx.Node) -> Rule | None:
    """scale * x above 0, scale * alpha * (exp(input_scale * x) - 1) below."""
    alpha, scale, inner = (argument(node, name, i, 1) for i, name in ((1, "alpha"), (2, "scale"), (3, "input_scale")))

    def formula(b: Builder, v: Values) -> int:
        (x,) = v
        dtype = b.dtype(x)
        expm1 = b.compute("expm1", b.compute("mul", x, b.constant(inner, dtype)))
        low = b.compute("mul", expm1, b.constant(_product(alpha, scale, dtype), dtype))
        high = b.compute("mul", x, b.constant(scale, dtype))
        return b.compute("where", b.compare("lt", x, b.constant(0, dtype)), low, high)

    return mixed(node, arguments(node)[:1], formula)


@lowers("aten.elu_backward.default")
def _elu_backward(node: fx.Node) -> Rule | None:
    """From the input, or from the result of an op in place."""
    gradient, alpha, scale, inner, from_result, saved = arguments(node)[:6]

    def formula(b: Builder, v: Values) -> int:
        g, y = v
        dtype = b.dtype(y)
        if from_result:
            slope = b.compute("add", y, b.constant(_product(alpha, scale, dtype), dtype))
        else:
            power = b.compute("exp", b.compute("mul", y, b.constant(inner, dtype)))
            slope = b.compute("mul", power, b.constant(_product(alpha, scale, dtype), dtype))
        low = b.compute("mul", g, b.compute("mul", slope, b.constant(inner, dtype)))
        high = b.compute("mul", g, b.constant(scale, dtype))
        # A NaN stays one, as in eager's vectors; its single numbers, the last of a tensor, let the gradient pass.
        return b.compute("where", b.compare("gt", y, b.constant(0, dtype)), high, low)

    return mixed(node, (gradient, saved), formula)


@lowers("aten.softplus.default")
def _softplus(node: fx.Node) -> Rule | None:
    """log(1 + exp(beta * x)) / beta, and x where beta * x is above the threshold."""
    beta, threshold = argument(node, "beta", 1, 1), argument(node, "threshold", 2, 20)

    def formula(b: Builder, v: Values) -> int:
        (x,) = v
        dtype = b.dtype(x)
        scaled = b.compute("mul", x, b.constant(beta, dtype))
        soft = b.compute("div", b.compute("log1p", b.compute("exp", scaled)), b.constant(beta, dtype))
        return b.compute("where", b.compare("gt", scaled, b.constant(threshold, dtype)), x, soft)

    return mixed(node, arguments(node)[:1], formula)


@lowers("aten.softplus_backward.default")
def _softplus_backward(node: fx.Node) -> Rule | None:
    gradient, x, beta, threshold = arguments(node)[:4]

    def formula(b: Builder, v: Values) -> int:
        dtype = b.dtype(v[1])
        scaled = b.compute("mul", v[1], b.constant(beta, dtype))
        power = b.compute("exp", scaled)
        soft = b.compute("div", b.compute("mul", v[0], power), b.compute("add", power, b.constant(1, dtype)))
        return b.compute("where", b.compare("gt", scaled, b.constant(threshold, dtype)), v[0], soft)

    return mixed(node, (gradient, x), formula)


@lowers("aten.hardswish.default", "aten.hardsigmoid.default")
def _hard(node: fx.Node) -> Rule | None:
    """min(max(x + 3, 0), 6) / 6, times x for a hardswish."""
    swish = "swish" in str(node.target)

    def formula(b: Builder, v: Values) -> int:
        (x,) = v
        dtype = b.dtype(x)
        ramp = at_most(b, at_least(b, b.compute("add", x, b.constant(3, dtype)), 0), 6)
        return b.compute("div", b.compute("mul", x, ramp) if swish else ramp, b.constant(6, dtype))

    return mixed(node, arguments(node)[:1], formula)


@lowers("aten.hardswish_backward.default")
def _hardswish_backward(node: fx.Node) -> Rule | None:
    def formula(b: Builder, v: Values) -> int:
        g, x = v
        dtype = b.dtype(x)
        slope = b.compute("add", b.compute("div", x, b.constant(3, dtype)), b.constant(0.5, dtype))
        middle = b.compute("where", b.compare("ge", x, b.constant(3, dtype)), g, b.compute("mul", g, slope))
        return b.compute("where", b.compare("le", x, b.constant(-3, dtype)), b.constant(0, dtype), middle)

    return mixed(node, arguments(node)[:2], formula)


@lowers("aten.hardsigmoid_backward.default", "aten.hardtanh_backward.default")
def _between_backward(node: fx.Node) -> Rule | None:
    """The gradient, times a sixth for a hardsigmoid, strictly between the bounds, 0 elsewhere."""
    sigmoid = "sigmoid" in str(node.target)
    low, high = (-3, 3) if sigmoid else arguments(node)[2:4]

    def formula(b: Builder, v: Values) -> int:
        g, x = v
        dtype = b.dtype(x)
        above, below = b.compare("gt", x, b.constant(low, dtype)), b.compare("lt", x, b.constant(high, dtype))
        slope = b.compute("mul", g, b.constant(_SIXTH, dtype)) if sigmoid else g
        return b.compute("where", b.compute("and", above, below), slope, b.constant(0, dtype))

    return mixed(node, arguments(node)[:2], formula)


@lowers("aten.mish.default")
def _mish(node: fx.Node) -> Rule | None:
    """x * tanh(log(1 + exp(x))) (Misra, 2019)."""

    def formula(b: Builder, v: Values) -> int:
        (x,) = v
        return b.compute("mul", x, b.compute("tanh", b.compute("log1p", b.compute("exp", x))))

    return mixed(node, arguments(node)[:1], formula)


@lowers("aten.mish_backward.default")
def _mish_backward(node: fx.Node) -> Rule | None:
    def formula(b: Builder, v: Values) -> int:
        g, x = v
        one = b.constant(1, b.dtype(x))
        tanh = b.compute("tanh", b.compute("log1p", b.compute("exp", x)))
        rest = b.compute("mul", x, b.compute("sigmoid", x))
        slope = b.compute("fma", rest, b.compute("fma", b.compute("neg", tanh), tanh, one), tanh)
        return b.compute("mul", g, slope)

    return mixed(node, arguments(node)[:2], formula)


@lowers("aten._prelu_kernel.default")
def _prelu(node: fx.Node) -> Rule | None:
    def formula(b: Builder, v: Values) -> int:
        x, slope = v
        positive = b.compare("gt", x, b.constant(0, b.dtype(x)))
        return b.compute("where", positive, x, b.compute("mul", slope, x))

    return mixed(node, arguments(node)[:2], formula)


@lowers("aten._prelu_kernel_backward.default")
def _prelu_backward(node: fx.Node) -> Rule | None:
    """Of the input, and of each element's slope."""
    gradient, x, slope = arguments(node)[:3]
    shape, dtype = spec(x).shape, spec(x).dtype

    def formula(b: Builder, v: Values) -> Sequence[int]:
        g, x, slope = (b.cast(value, wide(dtype)) for value in v)
        zero = b.constant(0, wide(dtype))
        positive = b.compare("gt", x, zero)
        gradients = (
            b.compute("where", positive, g, b.compute("mul", slope, g)),
            b.compute("where", positive, zero, b.compute("mul", x, g)),
        )
        return [b.cast(value, dtype) for value in gradients]

    if any(spec(value).dtype is not dtype for value in (gradient, slope)):
        return None
    operands = tuple(Operand(value, aligned(spec(value).shape, shape)) for value in (gradient, x, slope))
    return Rule(shape, operands, (Output(whole(len(shape)), dtype),) * 2, formula)


@lowers("aten.log_sigmoid_forward.default")
def _log_sigmoid(node: fx.Node) -> Rule | None:
    """min(x, 0) - log(1 + exp(-|x|)); and exp(-|x|), for the backward."""
    (x,) = arguments(node)
    shape, dtype = spec(x).shape, spec(x).dtype

    def formula(b: Builder, v: Values) -> Sequence[int]:
        value = b.cast(v[0], wide(dtype))
        power = b.compute("exp", b.compute("neg", b.compute("abs", value)))
        least = b.compute("min", value, b.constant(0, wide(dtype)))
        return [b.cast(b.compute("sub", least, b.compute("log1p", power)), dtype), b.cast(power, dtype)]

    outputs = Output(whole(len(shape)), dtype), Output(whole(len(shape)), dtype)
    buffer = value_of(node)[1]
    return Rule(shape, (Operand(x, whole(len(shape))),), outputs, formula) if buffer.shape == shape else None


@lowers("aten.log_sigmoid_backward.default")
def _log_sigmoid_backward(node: fx.Node) -> Rule | None:
    """By exp(-|x|), which the forward gives as well; not on CUDA, where that result has no elements."""
    gradient, source, power = arguments(node)[:3]
    has_power = value_of(power).numel() == value_of(source).numel()

    def formula(b: Builder, v: Values) -> int:
        g, x = v[:2]
        power = v[2] if has_power else b.compute("exp", b.compute("neg", b.compute("abs", x)))
        one = b.constant(1, b.dtype(x))
        sigmoid = b.compute("div", power, b.compute("add", one, power))
        negative = b.compare("lt", x, b.constant(0, b.dtype(x)))
        return b.compute("mul", g, b.compute("where", negative, b.compute("sub", one, sigmoid), sigmoid))

    return mixed(node, (gradient, source, power) if has_power else (gradient, source), formula)
