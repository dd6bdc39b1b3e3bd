"""Triton for single instructions: types, literals, arithmetic, rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from aottrain.ir.kernels.kernel import Compute
from aottrain.ir.kernels.numbers import BY_WAY_OF, held
from aottrain.ir.sizes.polynomials import is_open

STORED = {
    torch.float32: "tl.float32", torch.float64: "tl.float64",
    torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16",
    torch.int64: "tl.int64", torch.int32: "tl.int32", torch.int16: "tl.int16", torch.int8: "tl.int8",
    torch.uint8: "tl.uint8", torch.bool: "tl.int1",
}  # fmt: skip
COMPUTED = {**STORED, torch.bfloat16: "tl.float32", torch.float16: "tl.float32"}

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
# Functions of aottrain.ops.triton.functions.
_FUNCTIONS = {
    "div", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan",
    "tanh", "atan", "atan2", "erf", "erfc", "pow", "sigmoid", "asin", "acos", "sinh", "cosh", "asinh", "acosh",
    "atanh", "fmod", "fma",
}  # fmt: skip
_ROUNDINGS = {"floor": "tl.floor", "ceil": "tl.ceil", "trunc": "fn.trunc", "round": "fn.round_even"}


def arithmetic(instruction: Compute, kinds: Sequence[torch.dtype]) -> str:
    """An expression of the arguments' names; kinds: their types."""
    args = [f"v{v}" for v in instruction.args]
    op, dtype = instruction.op, kinds[-1]
    if op == "cast":
        return _cast(args[0], kinds[0], instruction.dtype)
    if op == "where":
        return f"tl.where({args[0]}, {args[1]}, {args[2]})"
    if op == "div" and not dtype.is_floating_point:
        return f"{args[0]} // {args[1]}"  # towards zero, as in C
    if op in _INFIX:
        return f"{args[0]} {_INFIX[op]} {args[1]}"
    if op in ("max", "min"):
        return folded(op, args[0], args[1], dtype)
    if op == "neg":
        return f"-{args[0]}"
    if op == "not":
        if dtype is torch.uint8:  # ~ is ^ -1, which is no number of this type: Triton 3.6 interprets none
            return f"{args[0]} ^ {literal(255, dtype)}"
        return f"{args[0]} == 0" if dtype is torch.bool else f"~{args[0]}"
    if op == "abs":
        return f"tl.abs({args[0]})"
    if op in _ROUNDINGS:
        return f"{_ROUNDINGS[op]}({args[0]})" if dtype.is_floating_point else args[0]
    if op == "reciprocal":
        return f"fn.div({literal(1, dtype)}, {args[0]})"
    if op == "sign":
        return f"fn.sign({args[0]})"
    op = "pow" if op == "power" else op
    if op in _FUNCTIONS:
        return f"fn.{op}({', '.join(args)})"
    raise KeyError(f"no Triton for {op}")


def _cast(text: str, source: torch.dtype, target: torch.dtype) -> str:
    if target is torch.bool:
        return f"{text} != 0"
    if target in BY_WAY_OF and source.is_floating_point:
        text = f"{text}.to({COMPUTED[BY_WAY_OF[target]]})"
    return text if COMPUTED[target] == COMPUTED[source] else f"{text}.to({COMPUTED[target]})"


def rounded(dtype: torch.dtype, text: str) -> str:
    """A result of low precision has the value that its type can hold."""
    if dtype is torch.bfloat16:
        return f"fn.to_bfloat16({text}).to(tl.float32)"
    return f"({text}).to(tl.float16).to(tl.float32)" if dtype is torch.float16 else text


def stored(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """A value in the type of the buffer that it is stored in."""
    if STORED[target] == COMPUTED[source]:
        return text
    if target is torch.bfloat16 and COMPUTED[source] == "tl.float32":
        return f"fn.to_bfloat16({text})"
    return f"{text} != 0" if target is torch.bool else f"({text}).to({STORED[target]})"


def number(value: float | int | bool, dtype: torch.dtype) -> str:
    """As Python text, rounded to the type."""
    if dtype is torch.bool:
        return str(bool(value))
    if not dtype.is_floating_point:
        # A negative number beside an unsigned value wraps, as in eager; Triton refuses to.
        return str(int(value) if dtype.is_signed else int(value) % (torch.iinfo(dtype).max + 1))
    real = held(value, dtype)
    return repr(real) if math.isfinite(real) else f'float("{real}")'


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A scalar of the type in which arithmetic of this type is done; a size that a call has its own of, too."""
    if is_open(value):
        return f"{value}.to({COMPUTED[dtype]})"
    return f"tl.full((), {number(value, dtype)}, {COMPUTED[dtype]})"


def filling(value: float | int | bool, dtype: torch.dtype) -> str:
    """What a load gives where it reads nothing. Triton has float32 of a Python number, so that another one is made in
    the type itself."""
    exact = dtype is not torch.float64 or held(value, torch.float32) == value
    return number(value, dtype) if exact else literal(value, dtype)


def identity(op: str, dtype: torch.dtype) -> str:
    """What a reduction starts from, as Python text."""
    if op in ("sum", "prod"):
        return number(0 if op == "sum" else 1, dtype)
    if dtype.is_floating_point:
        return number(-math.inf if op == "max" else math.inf, dtype)
    limits = torch.iinfo(dtype)
    return str(limits.min if op == "max" else limits.max)


def folded(op: str, total: str, value: str, dtype: torch.dtype) -> str:
    """Two partial results as one; NaN wins."""
    if op in ("sum", "prod"):
        return f"{total} {'+' if op == 'sum' else '*'} {value}"
    if dtype.is_floating_point:
        return f"fn.{op}imum({total}, {value})"
    return f"tl.{op}imum({total}, {value})"


def reduced(op: str, value: str, axis: int) -> str:
    """All elements along an axis as one."""
    return f"tl.sum({value}, {axis})" if op == "sum" else f"fn.reduce_{op}({value}, {axis})"


def option(name: str, text: str) -> str:
    """A keyword argument, where there is one."""
    return f", {name}={text}" if text else ""
