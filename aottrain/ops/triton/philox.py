"""Philox in Triton kernels: the same numbers as `ops.random.philox` gives, bit for bit; of normal ones the
interpreter rounds logarithms and angles otherwise."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice

from aottrain.ops import philox_constants

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
# A kernel reads a global only as a constant of its compilation.
_MULTIPLIER_0, _MULTIPLIER_1 = (tl.constexpr(number) for number in philox_constants.MULTIPLIERS)
_KEY_STEP_0, _KEY_STEP_1 = (tl.constexpr(number) for number in philox_constants.KEY_STEPS)
_NUM_ROUNDS = tl.constexpr(philox_constants.NUM_ROUNDS)
_SHIFT = tl.constexpr(32 - philox_constants.FLOAT_BITS)
_UNIT = tl.constexpr(2.0**-philox_constants.FLOAT_BITS)
_TURN = tl.constexpr(2.0 * math.pi)


@triton.jit
def philox_words(seed, number, block):
    """The four words of a block of a draw: Philox4x32-10, as ops.random.philox defines it. All given as int64."""
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2, c3 = number.to(tl.uint32), (number >> 32).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    first, second = tl.full((), _MULTIPLIER_0, tl.uint32), tl.full((), _MULTIPLIER_1, tl.uint32)
    for _ in tl.static_range(_NUM_ROUNDS):
        high0, high1 = tl.umulhi(c0, first), tl.umulhi(c2, second)
        low0, low1 = c0 * first, c2 * second
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + tl.full((), _KEY_STEP_0, tl.uint32), k1 + tl.full((), _KEY_STEP_1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def uniform(word):
    """24 bits of a word as a number in [0, 1)."""
    return (word >> _SHIFT).to(tl.float32) * _UNIT


@triton.jit
def philox(seed, number, element):
    """Element e of a draw: word e % 4 of block e // 4."""
    w0, w1, w2, w3 = philox_words(seed, number, element >> 2)
    lane = element & 3
    return uniform(tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3))))


@triton.jit
def philox_run(seed, number, block):
    """The same for runs of four elements, the last dimension four times that of `block`: a block is computed once."""
    w0, w1, w2, w3 = philox_words(seed, number, block)
    return uniform(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def _box_muller(first, second):
    """Two normal numbers of two uniform ones, by the calls that `ops.random.philox` makes of CUDA's library."""
    if INTERPRETED:
        radius = tl.sqrt_rn(-2.0 * tl.log(1.0 - first))
        angle = second * _TURN
        return radius * tl.cos(angle), radius * tl.sin(angle)
    else:
        radius = tl.sqrt_rn(-2.0 * libdevice.log(1.0 - first))
        angle = second * _TURN
        return radius * libdevice.cos(angle), radius * libdevice.sin(angle)


@triton.jit
def philox_normal(seed, number, element):
    """Element e of a normal draw: words 0 and 1 of block e // 4 make two elements, words 2 and 3 the next two."""
    w0, w1, w2, w3 = philox_words(seed, number, element >> 2)
    is_upper = (element & 2) != 0
    even, odd = _box_muller(uniform(tl.where(is_upper, w2, w0)), uniform(tl.where(is_upper, w3, w1)))
    return tl.where((element & 1) == 0, even, odd)


@triton.jit
def philox_normal_run(seed, number, block):
    """The same for runs of four elements, as `philox_run`."""
    w0, w1, w2, w3 = philox_words(seed, number, block)
    even, odd = _box_muller(uniform(w0), uniform(w1))
    upper_even, upper_odd = _box_muller(uniform(w2), uniform(w3))
    return tl.interleave(tl.interleave(even, upper_even), tl.interleave(odd, upper_odd))
