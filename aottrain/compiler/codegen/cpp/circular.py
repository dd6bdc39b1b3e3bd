"""Sines and cosines of large angles: exact for every float, in vectors, chosen per block of elements.

Up to FAR the angle's multiple of pi / 2 is taken off in three parts, which is fast. Beyond it the angle x = m * 2^k, m
of 24 bits, is reduced by a table of 2^k * 2 / pi modulo 4 (the idea of Payne and Hanek, "Radian reduction for
trigonometric functions", SIGNUM 18, 1983): right for all floats at five times the cost. So a loop that takes the sine
of what may be large looks first whether any of it is.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from fractions import Fraction

import torch

from aottrain.ir.kernels.kernel import DRAWS, Compute, KernelIR, Level, operands

# Up to here three parts of pi / 2 leave an error of less than two units in the last place.
FAR = 300000.0
# 2 / pi with 288 bits after the point.
_TWO_OVER_PI = Fraction(0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561B7246E3A, 1 << 288)
_MOST_SHIFT = 105
# Ops whose results are never far from zero.
_BOUNDED = ("sin", "cos", "tanh", "sigmoid", "erf", "sign", *DRAWS)


def turns_table() -> str:
    """For each k two doubles: 2^k * 2 / pi modulo 4, to 29 bits (so that 24 bits times it is exact), and the rest."""
    numbers: list[str] = []
    for k in range(_MOST_SHIFT + 1):
        turns = _TWO_OVER_PI * 2**k % 4
        step = Fraction(2) ** (turns.numerator.bit_length() - turns.denominator.bit_length() - 27)
        high = round(turns / step) * step
        numbers += [float(high).hex(), float(turns - high).hex()]
    return f"static const double TURNS[{len(numbers)}] = {{{', '.join(numbers)}}};\n"


def with_far_angles(
    kernel: KernelIR, value_levels: Sequence[Level], values: Sequence[int], held: Container[int], lines: list[str]
) -> list[str]:
    """A rendered loop over elements, for near angles if all are near, else for any angle.

    values: what the loop computes, or reads back where an earlier pass has it in `held`. The loop as it is where it
    takes no sine or cosine of what may be large.
    """
    angles = _angles(kernel, value_levels, [value for value in values if value not in held])
    if not angles:
        return lines
    needed, stack = set[int](), list(angles)
    while stack:
        value = stack.pop()
        if value not in needed:
            needed.add(value)
            stack += [v for v in operands(kernel.body[value]) if v in values and value not in held]
    loop = next(line for line in lines if line.lstrip().startswith("for ("))
    matches = ((re.match(r" *const \w+ [ev](\d+) = ", line), line) for line in lines)
    definitions = [line for match, line in matches if match and int(match[1]) in needed]
    indent = loop[: len(loop) - len(loop.lstrip())]
    test = " | ".join(f"!(__builtin_fabsf(v{value}) < {FAR:.1f}f)" for value in angles)
    look = [f"{indent}int far = 0;", f"{indent}#pragma omp simd reduction(|:far)", loop]
    look += [*definitions, f"{indent}  far |= {test};", f"{indent}}}"]
    exact = [re.sub(r"\b(sin|cos)_\(", r"far_\1_(", line) for line in lines]
    return [f"{indent}{{", *look, f"{indent}if (far) {{", *exact, f"{indent}}} else {{", *lines, f"{indent}}}}}"]


def _angles(kernel: KernelIR, value_levels: Sequence[Level], values: Sequence[int]) -> list[int]:
    """What sines and cosines are taken of, where it may be large."""
    angles: set[int] = set()
    for value in values:
        instruction = kernel.body[value]
        if isinstance(instruction, Compute) and instruction.op in ("sin", "cos"):
            angle = instruction.args[0]
            single = instruction.dtype is not torch.float64
            if single and value_levels[angle] is Level.ELEMENT and not _is_bounded(kernel, angle):
                angles.add(angle)
    return sorted(angles)


def _is_bounded(kernel: KernelIR, value: int) -> bool:
    instruction = kernel.body[value]
    if isinstance(instruction, Compute) and instruction.op in ("cast", "neg"):
        return _is_bounded(kernel, instruction.args[0])
    return isinstance(instruction, Compute) and instruction.op in _BOUNDED
