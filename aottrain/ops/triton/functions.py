"""What generated Triton kernels call: functions that equal eager's on CUDA, or their formulas under the interpreter.

On a device each is the CUDA math library's, as in eager, with exact division and roots. Triton's interpreter knows no
library; there a function that it lacks is written from exp, log, sin and cos, float32 in float64, so that the formula's
own rounding is far below that of the type. `INTERPRETED` is a constant of the compilation: the other branch vanishes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from aottrain.ops.triton.philox import INTERPRETED
from aottrain.ops.triton.philox import philox as philox  # generated kernels find all functions here
from aottrain.ops.triton.philox import philox_normal as philox_normal
from aottrain.ops.triton.philox import philox_normal_run as philox_normal_run
from aottrain.ops.triton.philox import philox_run as philox_run


@triton.jit
def check_index(inside):
    """All is true, or the program fails: on a device by an assertion, as in eager, which a later call reports."""
    if INTERPRETED:
        tl.static_assert(tl.min(inside.to(tl.int32)) == 1, "index out of range")  # there it is looked at as it runs
    else:
        tl.device_assert(inside, "index out of range")


@triton.jit
def truth(x):
    """A comparison of scalars. (The interpreter gives it the type of what is compared when it becomes a block.)"""
    return tl.full((), 1, tl.int1) & x if INTERPRETED else x


@triton.jit
def to_bfloat16(x):
    """From float32, to the nearest, ties to even. (The interpreter would cut the bits off.)"""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x != x, x, near.to(tl.float32, bitcast=True)).to(tl.bfloat16)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def div(x, y):
    """Rounded to nearest."""
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def sqrt(x):
    """Rounded to nearest."""
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def rsqrt(x):
    return tl.rsqrt(x) if INTERPRETED else libdevice.rsqrt(x)


@triton.jit
def exp(x):
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@triton.jit
def exp2(x):
    return tl.exp2(x) if INTERPRETED else libdevice.exp2(x)


@triton.jit
def log(x):
    return tl.log(x) if INTERPRETED else libdevice.log(x)


@triton.jit
def log2(x):
    return tl.log2(x) if INTERPRETED else libdevice.log2(x)


@triton.jit
def sin(x):
    return tl.sin(x) if INTERPRETED else libdevice.sin(x)


@triton.jit
def cos(x):
    return tl.cos(x) if INTERPRETED else libdevice.cos(x)


@triton.jit
def erf(x):
    return tl.erf(x) if INTERPRETED else libdevice.erf(x)


@triton.jit
def log10(x):
    if INTERPRETED:
        return (tl.log(x.to(tl.float64)) * 0.4342944819032518).to(x.dtype)
    else:
        return libdevice.log10(x)


@triton.jit
def expm1(x):
    """A short series near zero, where exp(x) - 1 cancels."""
    if INTERPRETED:
        t = x.to(tl.float64)
        series = t * (1 + t * (0.5 + t * (1 / 6 + t * (1 / 24 + t / 120))))
        return tl.where(tl.abs(t) < 0.001, series, tl.exp(t) - 1).to(x.dtype)
    else:
        return libdevice.expm1(x)


@triton.jit
def log1p(x):
    """log(u) x / (u - 1) with u = 1 + x: the rounding of u cancels (Goldberg 1991, theorem 4)."""
    if INTERPRETED:
        t = x.to(tl.float64)
        u = 1 + t
        exact = (u == 1) | (t == float("inf"))
        return tl.where(exact, t, tl.log(u) * t / tl.where(exact, 1.0, u - 1)).to(x.dtype)
    else:
        return libdevice.log1p(x)


@triton.jit
def tanh(x):
    """(1 - e) / (1 + e) with e = exp(-2 |x|), and a short series near zero; no overflow, NaN stays."""
    if INTERPRETED:
        t = x.to(tl.float64)
        square = t * t
        series = t * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
        power = tl.exp(-2 * tl.abs(t))
        large = (1 - power) / (1 + power)
        return tl.where(tl.abs(t) < 0.002, series, tl.where(t < 0, -large, large)).to(x.dtype)
    else:
        return libdevice.tanh(x)


@triton.jit
def tan(x):
    if INTERPRETED:
        t = x.to(tl.float64)
        return (tl.sin(t) / tl.cos(t)).to(x.dtype)
    else:
        return libdevice.tan(x)


@triton.jit
def _atan_double(x):
    """Four times atan(x) = 2 atan(x / (1 + sqrt(1 + x^2))), then its series."""
    t = tl.where(x > 1e18, 1e18, tl.where(x < -1e18, -1e18, x))
    for _ in tl.static_range(4):
        t = t / (1 + tl.sqrt(1 + t * t))
    s = t * t
    series = 1 - s * (1 / 3 - s * (1 / 5 - s * (1 / 7 - s * (1 / 9 - s * (1 / 11 - s * (1 / 13 - s / 15))))))
    return 16 * t * series


@triton.jit
def atan(x):
    return _atan_double(x.to(tl.float64)).to(x.dtype) if INTERPRETED else libdevice.atan(x)


@triton.jit
def _is_negative(x):
    """Of float64, by the sign's bit: so is -0.0."""
    return x.to(tl.int64, bitcast=True) < 0


@triton.jit
def atan2(y, x):
    """The angle in the right half plane, mirrored for negative x."""
    if INTERPRETED:
        y, x = tl.broadcast(y, x)
        b, a = y.to(tl.float64), x.to(tl.float64)
        high, low = tl.abs(b), tl.abs(a)
        both = (high == float("inf")) & (low == float("inf"))
        high, low = tl.where(both, 1.0, high), tl.where(both, 1.0, low)
        none = (high == 0) & (low == 0)
        angle = _atan_double(high / tl.where(none, 1.0, low))
        angle = tl.where(_is_negative(a), 3.141592653589793 - angle, angle)
        angle = tl.where(_is_negative(b), -angle, angle)
        return tl.where((y != y) | (x != x), float("nan"), angle).to(y.dtype)
    else:
        return libdevice.atan2(y, x)


@triton.jit
def asin(x):
    if INTERPRETED:
        t = x.to(tl.float64)
        return (2 * _atan_double(t / (1 + tl.sqrt(1 - t * t)))).to(x.dtype)
    else:
        return libdevice.asin(x)


@triton.jit
def acos(x):
    if INTERPRETED:
        t = x.to(tl.float64)
        return (2 * _atan_double(tl.sqrt(1 - t) / tl.sqrt(1 + t))).to(x.dtype)
    else:
        return libdevice.acos(x)


@triton.jit
def sinh(x):
    """By exp(x / 2), which overflows later than exp(x); a series near zero."""
    if INTERPRETED:
        t = x.to(tl.float64)
        s, root = t * t, tl.exp(tl.abs(t) * 0.5)
        series = t * (1 + s / 6 * (1 + s / 20 * (1 + s / 42 * (1 + s / 72))))
        large = 0.5 * root * root - 0.5 / root / root
        return tl.where(tl.abs(t) < 0.3, series, tl.where(t < 0, -large, large)).to(x.dtype)
    else:
        return libdevice.sinh(x)


@triton.jit
def cosh(x):
    if INTERPRETED:
        root = tl.exp(tl.abs(x.to(tl.float64)) * 0.5)
        return (0.5 * root * root + 0.5 / root / root).to(x.dtype)
    else:
        return libdevice.cosh(x)


@triton.jit
def asinh(x):
    """sign(x) log(t + sqrt(t^2 + 1)) with t = |x|, written for log1p; log(2 t) where t^2 might overflow."""
    if INTERPRETED:
        t = tl.abs(x.to(tl.float64))
        near = tl.where(t > 1e9, 1.0, t)
        size = tl.where(
            t > 1e9, tl.log(t) + 0.6931471805599453, log1p(near + near * near / (1 + tl.sqrt(1 + near * near)))
        )
        return tl.where((t != t) | (x == 0), x.to(tl.float64), tl.where(x < 0, -size, size)).to(x.dtype)
    else:
        return libdevice.asinh(x)


@triton.jit
def acosh(x):
    """log(x + sqrt(x^2 - 1)), written for log1p of the distance from 1."""
    if INTERPRETED:
        t = x.to(tl.float64)
        d = tl.where(t > 1e9, 1.0, t - 1)
        size = tl.where(t > 1e9, tl.log(t) + 0.6931471805599453, log1p(d + tl.sqrt(d * (2 + d))))
        return tl.where(t < 1, float("nan"), size).to(x.dtype)
    else:
        return libdevice.acosh(x)


@triton.jit
def atanh(x):
    if INTERPRETED:
        t = tl.abs(x.to(tl.float64))
        size = 0.5 * log1p(2 * t / (1 - t))
        return tl.where(x == 0, x.to(tl.float64), tl.where(x < 0, -size, size)).to(x.dtype)
    else:
        return libdevice.atanh(x)


@triton.jit
def fmod(x, y):
    """The remainder of a division rounded towards zero: it has the sign of x."""
    if not x.dtype.is_floating():
        return x % y
    elif INTERPRETED:
        return (x.to(tl.float64) % y.to(tl.float64)).to(x.dtype)
    else:
        return libdevice.fmod(x, y)


@triton.jit
def fma(x, y, z):
    """x y + z, of floats rounded once: in float64 the product of two float32 is exact."""
    if not x.dtype.is_floating():
        return x * y + z
    elif INTERPRETED:
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(x.dtype)
    else:
        return tl.fma(x, y, z)


@triton.jit
def erfc(x):
    """1 - erf(x); beyond 2 the continued fraction exp(-x^2) / sqrt(pi) / (x + (1/2) / (x + 1 / (x + (3/2) / ...)))."""
    if INTERPRETED:
        t = x.to(tl.float64)
        far = tl.where(t > 2, t, 2.0)
        below = far
        for k in tl.static_range(60):
            below = far + (60 - k) * 0.5 / below
        tail = tl.exp(-far * far) * 0.5641895835477563 / below
        return tl.where(t > 2, tail, 1 - tl.erf(t)).to(x.dtype)
    else:
        return libdevice.erfc(x)


@triton.jit
def pow(x, y):
    """2^(y log2 |x|); negative for a negative base and an odd exponent, NaN for one that is no whole number."""
    if INTERPRETED:
        x, y = tl.broadcast(x, y)
        a, b = tl.abs(x.to(tl.float64)), y.to(tl.float64)
        size = tl.exp2(b * tl.log2(a))
        one = (b == 0) | (x == 1) | ((a == 1) & (tl.abs(b) == float("inf")))
        size = tl.where(one, 1.0, size)
        whole = tl.floor(b) == b
        odd = whole & (tl.floor(b * 0.5) * 2 != b)
        negative = _is_negative(x.to(tl.float64))
        signed = tl.where(negative & odd, -size, size)
        fails = (x < 0) & (a != float("inf")) & (whole == 0) & (one == 0)
        return tl.where(fails, float("nan"), signed).to(x.dtype)
    else:
        return libdevice.pow(x, y)


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x)) if INTERPRETED else libdevice.trunc(x)


@triton.jit
def round_even(x):
    """To the nearest whole number, ties to the even one; a zero keeps its sign."""
    if INTERPRETED:
        low = tl.floor(x)
        rest = x - low
        up = (rest > 0.5) | ((rest == 0.5) & (tl.floor(low * 0.5) * 2 != low))
        near = tl.where(up, low + 1, low)
        return tl.where(near == 0, x * 0, near)
    else:
        return libdevice.rint(x)


@triton.jit
def sign(x):
    """-1, 0 or 1; 0 for NaN, as eager."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def sigmoid(x):
    one = tl.full((), 1, x.dtype)
    return div(one, one + exp(-x))


@triton.jit
def maximum(x, y):
    """NaN wins."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):
    """NaN wins."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def multiply(x, y):
    return x * y


@triton.jit
def reduce_prod(x, axis: tl.constexpr):
    return tl.reduce(x, axis, multiply)


@triton.jit
def reduce_max(x, axis: tl.constexpr):
    """NaN wins. The interpreter combines by a function of its user element by element, so there NaN is looked for."""
    if not x.dtype.is_floating():
        return tl.max(x, axis)
    elif INTERPRETED:
        missing = tl.max((x != x).to(tl.int32), axis) > 0
        return tl.where(missing, float("nan"), tl.max(tl.where(x != x, float("-inf"), x), axis))
    else:
        return tl.reduce(x, axis, maximum)


@triton.jit
def reduce_min(x, axis: tl.constexpr):
    """As reduce_max."""
    if not x.dtype.is_floating():
        return tl.min(x, axis)
    elif INTERPRETED:
        missing = tl.max((x != x).to(tl.int32), axis) > 0
        return tl.where(missing, float("nan"), tl.min(tl.where(x != x, float("inf"), x), axis))
    else:
        return tl.reduce(x, axis, minimum)
