"""Activation functions and their gradients."""

from __future__ import annotations

import math

from torch import fx

from aottrain.compiler.lowering.pointwise import mixed
from aottrain.compiler.lowering.rules import Builder, Rule, Values, argument, arguments, lowers, spec

_SQRT_HALF, _SQRT_2_OVER_PI, _TWO_OVER_SQRT_PI = math.sqrt(0.5), math.sqrt(2 / math.pi), 2 / math.sqrt(math.pi)
_CUBIC = 0.044715


@lowers("aten.gelu.default")
def _gelu(node: fx.Node) -> Rule | None:
    """x * P(X <= x), the normal distribution's function, exact or by tanh (Hendrycks and Gimpel, 2016)."""
    smooth = argument(node, "approximate", 1, "none") == "tanh"

    def formula(b: Builder, v: Values) -> int:
        (x,) = v
        dtype = b.dtype(x)
        half, one = b.constant(0.5, dtype), b.constant(1, dtype)
        inner = _tanh_argument(b, x) if smooth else b.compute("mul", x, b.constant(_SQRT_HALF, dtype))
        bent = b.compute("tanh" if smooth else "erf", inner)
        return b.compute("mul", b.compute("mul", half, x), b.compute("add", one, bent))

    return mixed(node, arguments(node)[:1], formula)


def _tanh_argument(b: Builder, x: int) -> int:
    dtype = b.dtype(x)
    cube = b.compute("mul", b.compute("mul", x, x), x)
    sum_ = b.compute("add", x, b.compute("mul", b.constant(_CUBIC, dtype), cube))
    return b.compute("mul", b.constant(_SQRT_2_OVER_PI, dtype), sum_)


@lowers("aten.gelu_backward.default")
def _gelu_backward(node: fx.Node) -> Rule | None:
    smooth = argument(node, "approximate", 2, "none") == "tanh"

    def formula(b: Builder, v: Values) -> int:
        gradient, x = v
        dtype = b.dtype(x)
        half, one = b.constant(0.5, dtype), b.constant(1, dtype)
        if smooth:
            bent = b.compute("tanh", _tanh_argument(b, x))
            left = b.compute("mul", half, b.compute("add", one, bent))
            slope = b.compute("sub", one, b.compute("mul", bent, bent))
            square = b.compute("mul", x, x)
            grown = b.compute("add", one, b.compute("mul", b.constant(3 * _CUBIC, dtype), square))
            inner = b.compute("mul", b.constant(_SQRT_2_OVER_PI, dtype), grown)
            right = b.compute("mul", b.compute("mul", b.compute("mul", half, x), slope), inner)
            return b.compute("mul", gradient, b.compute("add", left, right))
        bent = b.compute("erf", b.compute("mul", x, b.constant(_SQRT_HALF, dtype)))
        share = b.compute("mul", half, b.compute("add", one, bent))
        square = b.compute("mul", b.compute("mul", x, x), b.constant(-0.5, dtype))
        density = b.compute("mul", b.compute("exp", square), b.constant(_TWO_OVER_SQRT_PI * _SQRT_HALF * 0.5, dtype))
        return b.compute("mul", gradient, b.compute("fma", x, density, share))

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
        share = b.compute("div", one, b.compute("add", one, b.compute("exp", b.compute("neg", x))))
        rest = b.compute("fma", x, b.compute("sub", one, share), one)
        return b.compute("mul", b.compute("mul", gradient, share), rest)

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
