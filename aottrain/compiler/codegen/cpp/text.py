"""C++ for single instructions: types, literals, arithmetic, rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import (
    DRAWS,
    Address,
    Compute,
    Constant,
    Instruction,
    KernelIR,
    Position,
    Reduce,
    is_natural,
)
from aottrain.ir.kernels.numbers import BY_WAY_OF, held
from aottrain.ir.sizes.polynomials import PREFIX

STORED = {
    torch.float32: "float", torch.float64: "double", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip
NARROW = (torch.bfloat16, torch.float16)  # computed in float32, and rounded to what the type holds
COMPUTED = {**STORED, **dict.fromkeys(NARROW, "float")}

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
_LIBM = ("tan", "atan", "atan2", "erfc", "asin", "acos", "sinh", "cosh", "fmod")
# What they give is one of their operands, but for its sign.
SELECTING = ("where", "max", "min", "neg", "abs")
_OWN = ("exp", "expm1", "log", "log1p", "tanh", "erf", "sin", "cos", "log2", "log10", "exp2", "pow")


def arithmetic(
    instruction: Compute, kinds: Sequence[torch.dtype], in_loop: bool = True, known_before: bool = False
) -> str:
    """in_loop: whether it is one of many in a row, where `cpp.circular` chooses how angles are reduced. known_before:
    whether its first operand is the same for all of these: g++ chooses by such a condition element by element."""
    args = [f"v{v}" for v in instruction.args]
    op, kind = instruction.op, COMPUTED[kinds[-1]]
    if op == "cast":
        return _cast(args[0], kinds[0], instruction.dtype)
    if op == "where":
        return f"blend_({', '.join(args)})" if known_before else f"{args[0]} ? {args[1]} : {args[2]}"
    if op in _INFIX:
        return _infix(op, args, kind, instruction.dtype)
    if op in ("max", "min"):
        return (
            f"{op}_({args[0]}, {args[1]})"
            if kind in ("float", "double", "i64", "i32")
            else (f"{args[0]} {'>' if op == 'max' else '<'} {args[1]} ? {args[0]} : {args[1]}")
        )
    if op == "neg":
        return f"({kind})-{args[0]}"
    if op == "not":
        return f"!{args[0]}" if kind == "bool" else f"({kind})~{args[0]}"
    if op in DRAWS:
        return f"{op}_((u64){args[0]}, (u64){args[1]}, (u64){args[2]})"
    if op in ("sin", "cos") and kind == "float" and not in_loop:
        return f"far_{op}_({args[0]})"
    return _function(op, args, kind)


def _function(op: str, args: Sequence[str], kind: str) -> str:
    single = kind == "float"
    suffix = "f" if single else ""
    arguments = ", ".join(args)
    if op == "fmod" and kind not in ("float", "double"):
        return f"({kind})({args[0]} % {args[1]})"
    if op == "fma":
        return f"fma_({arguments})" if kind in ("float", "double") else f"({kind})({args[0]} * {args[1]} + {args[2]})"
    if op == "power":
        return f"power_({arguments})"
    if op in ("sigmoid", "sign"):
        return f"{op}_({arguments})" if kind in ("float", "double") else f"({kind})sign_((i64){arguments})"
    if op in _OWN:
        return f"{op}_({arguments})" if single else f"{op}({arguments})"
    if op in _LIBM:
        return f"{op}{suffix}({arguments})"
    one = "1.0f" if single else "1.0"
    if op == "rsqrt":
        return f"{one} / __builtin_sqrt{suffix}({arguments})"
    if op == "reciprocal":
        return f"{one} / {arguments}"
    if op == "abs":
        if kind in ("float", "double"):
            return f"__builtin_fabs{suffix}({arguments})"
        return f"({kind})({arguments} < 0 ? -{arguments} : {arguments})"
    if op in ("sqrt", "floor", "ceil", "trunc"):
        return f"__builtin_{op}{suffix}({arguments})" if kind in ("float", "double") else arguments
    if op == "round":
        return f"__builtin_rint{suffix}({arguments})" if kind in ("float", "double") else arguments
    raise KeyError(f"no C++ for {op}")


def _infix(op: str, args: Sequence[str], kind: str, dtype: torch.dtype) -> str:
    text = f"{args[0]} {_INFIX[op]} {args[1]}"
    if dtype is torch.bool or kind in ("float", "double", "i64"):
        return text
    return f"({kind})({text})"


def _cast(text: str, source: torch.dtype, target: torch.dtype) -> str:
    if target is torch.bool:
        return f"{text} != 0"
    kind = COMPUTED[target]
    if source is torch.bool and kind in ("float", "double"):
        return f"{text} ? {literal(1.0, target)} : {literal(0.0, target)}"  # g++ vectorises no cast of a truth value
    way = COMPUTED[BY_WAY_OF.get(target, target)]
    if way in ("i64", "i32") and COMPUTED[source] in ("float", "double"):
        whole = f"whole_<{way}>({text})"
        return whole if kind == way else f"({kind}){whole}"
    return text if kind == COMPUTED[source] else f"({kind}){text}"


def rounded(dtype: torch.dtype, text: str) -> str:
    """A result of low precision has the value that its type can hold."""
    return f"round_{STORED[dtype]}({text})" if dtype in NARROW else text


def holds(instruction: Instruction, dtype: torch.dtype) -> bool:
    """Whether every value that it gives is one of this low precision already, so that rounding would change nothing."""
    if instruction.dtype is dtype:
        return True
    return isinstance(instruction, Constant) and held(instruction.value, dtype) == instruction.value


def loaded(dtype: torch.dtype, pointer: str, position: str) -> str:
    """What is in memory, as the type that it is computed in."""
    if dtype is torch.bool:
        return f"((const u8*){pointer})[{position}] != 0"  # of truth values in memory g++ makes no vectors
    text = f"{pointer}[{position}]"
    return f"widen({text})" if dtype in NARROW else text


def to_stored(dtype: torch.dtype, text: str, value: Instruction | None = None) -> str:
    """value: what has computed it, where that may have rounded it."""
    if dtype not in NARROW:
        return text
    return f"{'upper' if value is not None and holds(value, dtype) else 'to'}_{STORED[dtype]}({text})"


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A number that the type holds, as one of the type that this is computed in."""
    if dtype is torch.bool:
        return "true" if value else "false"
    if not dtype.is_floating_point:
        return "(-9223372036854775807LL - 1)" if value == -(2**63) else f"({COMPUTED[dtype]}){int(value)}LL"
    suffix = "f" if COMPUTED[dtype] == "float" else ""
    number = held(value, dtype)
    if math.isnan(number):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(number):
        return f"{'-' if number < 0 else ''}__builtin_inf{suffix}()"
    return f"{number!r}{suffix}"


def identity(op: str, dtype: torch.dtype) -> str:
    if op in ("sum", "prod"):
        return literal(0 if op == "sum" else 1, dtype)
    if dtype.is_floating_point:
        return literal(-math.inf if op == "max" else math.inf, dtype)
    limits = torch.iinfo(dtype)
    return literal(limits.min if op == "max" else limits.max, dtype)


def combined(op: str, name: str, value: str) -> str:
    if op == "sum":
        return f"{name} += {value};"
    if op == "prod":
        return f"{name} *= {value};"
    return f"{name} = {value} {'>' if op == 'max' else '<'} {name} ? {value} : {name};"


def folded(op: str, name: str, value: str) -> str:
    """As `_combined`, in a loop over names: NaN wins."""
    return f"{name} = {op}_({value}, {name});" if op in ("max", "min") else combined(op, name, value)


def tracks_nan(instruction: Reduce) -> bool:
    return instruction.op in ("max", "min") and instruction.dtype.is_floating_point


def arguments(sizes: Sequence[str], number: int) -> list[str]:
    """Lines that read these sizes from the kernel's argument of that number."""
    return [f"const i64 {PREFIX}{name} = ((const i64*)p[{number}])[{k}];" for k, name in enumerate(sizes)]


def affine_text(offset: Affine) -> str:
    parts = [f"i{loop}" if c == 1 else f"{c} * i{loop}" for loop, c in offset.terms]
    if offset.constant or not parts:
        parts.append(f"{offset.constant}")
    return " + ".join(parts)


def row_position(kernel: KernelIR, base: str | None = None) -> str:
    """The running number of an element in its row, from `base`."""
    step, parts = 1, []
    for loop in reversed(range(kernel.num_outer, len(kernel.ranges))):
        parts.append(f"i{loop}" if step == 1 else f"{step} * i{loop}")
        step *= kernel.ranges[loop]
    text = " + ".join(reversed(parts)) or "0"
    return f"{text} - {base}" if base else text


def decoded(number: str, names: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """The index of each loop, the innermost first, from the running number of an iteration."""
    lines, step = list[str](), 1
    for loop in reversed(range(len(sizes))):
        part = number if step == 1 else f"{number} / {step}"
        lines.append(f"const i64 {names[loop]} = {part}" + (f" % {sizes[loop]};" if loop else ";"))
        step *= sizes[loop]
    return lines


def run_of_draws(kernel: KernelIR, value: int, begin: str | None, count: str) -> str:
    """The call but for its last argument that makes so many draws along the innermost loop, from `begin` on."""
    instruction = kernel.body[value]
    assert isinstance(instruction, Compute)
    seed, position, element = instruction.args
    place = kernel.body[element]
    assert isinstance(place, Position)
    last = len(kernel.ranges) - 1
    rest = Affine.of({loop: c for loop, c in place.offset.terms if loop != last}, place.offset.constant)
    first = affine_text(rest) + (f" + {begin}" if begin else "")
    return f"{instruction.op}_row((u64)v{seed}, (u64)v{position}, (u64)({first}), {count}"


def address_text(kernel: KernelIR, address: Address) -> str:
    """In elements, where the values that it is made of are known."""
    parts = [affine_text(address.offset)] if address.offset.terms or address.offset.constant else []
    for value, stride, size in address.indirect:
        wrapped = f"v{value}" if is_natural(kernel, value) else f"(v{value} < 0 ? v{value} + {size} : v{value})"
        parts.append(wrapped if stride == 1 else f"{wrapped} * {stride}")
    return " + ".join(parts) or "0"
