"""Calls of every lowered op: odd sizes, layouts, dtypes, and values at the ends of their range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.compiler.lowering.lowering_runs import Case

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1.5, math.nan, math.inf, -math.inf, 1e-40, -1e-45, 3e38, -3e38, 1e-8, 88.8)
_SPECIAL_INTEGERS = (0, 1, -1, 2, 3, -7, 127, 128, 255, -128, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63))


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, special: bool = True) -> Tensor:
    """Values that depend on the arguments alone; where there is room, special ones at pseudorandom places."""
    generator = torch.Generator().manual_seed(seed * 1000 + len(shape))
    count = math.prod(shape)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        values = torch.randint(-100, 100, (count,), generator=generator).to(dtype)
        edges = [v for v in _SPECIAL_INTEGERS if limits.min <= v <= limits.max]
    else:
        values = (torch.randn(count, generator=generator, dtype=torch.float64) * 3).to(dtype)
        edges = list(SPECIAL)
    if special and count >= 2 * len(edges):
        places = torch.randperm(count, generator=generator)[: len(edges)]
        values[places] = torch.tensor(edges, dtype=torch.float64 if dtype.is_floating_point else torch.int64).to(dtype)
    return values.view(shape)


def transposed(value: Tensor) -> Tensor:
    return value.transpose(0, -1).contiguous().transpose(0, -1) if value.dim() > 1 else value


def sliced(value: Tensor) -> Tensor:
    """In the middle of a larger buffer, with gaps in every dimension."""
    room = torch.zeros([2 * size + 3 for size in value.shape], dtype=value.dtype)
    part = room[tuple(slice(1, 2 * size + 1, 2) for size in value.shape)]
    return part.copy_(value)


def expanded(value: Tensor) -> Tensor:
    return value[:1].expand(value.shape) if value.dim() and value.shape[0] else value


def channels_last(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def plain(value: Tensor) -> Tensor:
    return value


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (plain, transposed, sliced, expanded, channels_last)
SIZES: tuple[tuple[int, ...], ...] = ((1,), (63,), (4097,), (70001,), (), (0,), (3, 0, 2))
SHAPES: tuple[tuple[int, ...], ...] = ((7, 9), (3, 5, 7), (2, 3, 4, 5))

Make = Callable[[tuple[int, ...], torch.dtype, Callable[[Tensor], Tensor]], tuple[Any, ...]]


def _tensors(count: int, *rest: Any) -> Make:
    def make(shape: tuple[int, ...], dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        return (*(layout(numbers(shape, dtype, seed)) for seed in range(count)), *rest)

    return make


def _elu_backward(from_result: bool) -> Make:
    def make(shape: tuple[int, ...], dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        # Eager's vectors and its single numbers disagree on the gradient at NaN.
        gradient, known = (layout(numbers(shape, dtype, seed, special=seed == 0)) for seed in (0, 1))
        return gradient, 1.67, 1.05, 0.8, from_result, known

    return make


def _hardtanh_backward(shape: tuple[int, ...], dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> Any:
    # At NaN in float64 eager's vectors give 0, and its single numbers, or those of memory with gaps, the gradient.
    special = dtype != torch.float64
    return *(layout(numbers(shape, dtype, seed, special=special or seed == 0)) for seed in (0, 1)), -1, 1.5


def _modes(count: int, mode: str | None) -> Make:
    """With the keyword rounding_mode, and -3 for the second operand where one tensor is asked for."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        given = [layout(numbers(shape, dtype, seed)) for seed in range(count)]
        return (*given, *([-3] if count == 1 else []), {"rounding_mode": mode})

    return make


def _after(number: float) -> Make:
    """(number, tensor)."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        return number, layout(numbers(shape, dtype))

    return make


def _ordinary(count: int) -> Make:
    def make(shape: tuple[int, ...], dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        return tuple(layout(numbers(shape, dtype, seed, special=False)) for seed in range(count))

    return make


def _log_sigmoid_backward(shape: tuple[int, ...], dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> Any:
    """With what eager's forward keeps for it."""
    gradient, x = (layout(numbers(shape, dtype, seed, special=False)) for seed in (0, 1))
    return gradient, x, (-x.abs()).exp() if dtype.is_floating_point else x


def _masked(*rest: Any) -> Make:
    """(mask, tensors or numbers), in the order of `rest`: 0 is a mask, 1 and 2 are tensors."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        made = (numbers(shape, torch.bool, 5), numbers(shape, dtype, 1), numbers(shape, dtype, 2))
        return tuple(layout(made[int(item[1])]) if isinstance(item, str) else item for item in rest)

    return make


# What is left of a sum near its zero has no digit right, in eager either: errors are counted in those of the largest.
CANCELLING = (aten.mish_backward.default,)

# What a formula adds up, where the sum may be near zero: each part is rounded before, by whoever computes it. (1 + erf
# is 1e-8 at the far left of gelu, where erf itself is rounded as -1 is.)
CANCELLED: dict[Any, Callable[..., Tensor]] = {
    aten.gelu.default: lambda x: x.abs() / 2,
    aten.gelu_backward.default: lambda gradient, x: gradient.abs(),
    aten.silu_backward.default: lambda gradient, x: gradient.abs() * x.sigmoid(),
    aten.tanh_backward.default: lambda gradient, y: gradient.abs(),
    aten.lerp.Scalar: lambda start, end: start.abs() + end.abs(),
    aten.lerp.Tensor: lambda start, end, weight: (start.abs() + end.abs()) * (1 + weight.abs()),
    aten.addcmul.default: lambda x, a, b, value=1: (value * a * b).abs(),
    aten.addcdiv.default: lambda x, a, b, value=1: (value * a / b).abs(),
}

UNARY = (
    "neg", "abs", "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh",
    "sigmoid", "erf", "erfc", "floor", "ceil", "trunc", "round", "sign", "reciprocal", "exp2", "atan", "square", "relu",
    "isnan", "silu", "gelu", "bitwise_not", "logical_not", "clone", "leaky_relu", "hardtanh", "zeros_like", "ones_like",
    "_to_copy", "asin", "acos", "sinh", "cosh", "sgn", "isinf", "isposinf", "isneginf",
    "elu", "softplus", "hardswish", "hardsigmoid", "mish",
)  # fmt: skip

# op: argument makers, each tried with sizes, layouts and dtypes that eager takes.
POINTWISE: dict[str, tuple[Make, ...]] = {
    **{f"{name}.default": (_tensors(1),) for name in UNARY},
    **{
        f"{name}.{kind}": (_tensors(2) if kind == "Tensor" else _tensors(1, 3), _tensors(1, -2))
        for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")
        for kind in ("Tensor", "Scalar")
    },
    **{f"{name}.Tensor": (_tensors(2),) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    **{f"{name}.Scalar": (_tensors(1, 5),) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    **{f"{name}.default": (_tensors(2),) for name in ("maximum", "minimum", "atan2", "logical_and", "logical_or",
       "logical_xor", "sigmoid_backward", "tanh_backward", "silu_backward", "gelu_backward", "copy")},
    **{f"{name}.default": (_tensors(3), _tensors(3, {"value": 2})) for name in ("addcmul", "addcdiv")},
    "nan_to_num.default": (_tensors(1), _tensors(1, 0.5, 2.0, -3.0)),
    **{
        f"{name}.{kind}": (_tensors(2),) if kind == "Tensor" else (_tensors(1, 3), _tensors(1, -2.5))
        for name in ("remainder", "fmod")
        for kind in ("Tensor", "Scalar")
    },
    **{f"{name}.default": (_tensors(2),) for name in ("hardswish_backward", "hardsigmoid_backward")},
    "mish_backward.default": (_ordinary(2),),
    "elu.default": (_tensors(1), _tensors(1, 1.67, 1.05, 0.8)),
    "elu_backward.default": tuple(_elu_backward(from_result) for from_result in (False, True)),
    "softplus_backward.default": (_tensors(2, 1, 20), _tensors(2, 1.5, 3)),
    "hardtanh_backward.default": (_hardtanh_backward,),
    "_prelu_kernel.default": (_tensors(2),),
    "_prelu_kernel_backward.default": (_ordinary(3),),
    "log_sigmoid_forward.default": (_ordinary(1),),
    "log_sigmoid_backward.default": (_log_sigmoid_backward,),
    "floor_divide.default": (_tensors(2), _tensors(1, -3)),
    "div.Tensor_mode": tuple(_modes(2, mode) for mode in ("floor", "trunc", None)),
    "div.Scalar_mode": tuple(_modes(1, mode) for mode in ("floor", "trunc")),
    "lerp.Scalar": (_tensors(2, 0.3), _tensors(2, 0.9)),
    "lerp.Tensor": (_tensors(3),),
    "clamp.Tensor": (_tensors(3), _tensors(2, None)),
    "clamp_min.Tensor": (_tensors(2),),
    "clamp_max.Tensor": (_tensors(2),),
    "fill.Tensor": (_tensors(1, torch.tensor(2.5)),),
    "rsub.Scalar": (_tensors(1, 2.5), _tensors(1, 3, 2)),
    "pow.Tensor_Scalar": tuple(_tensors(1, p) for p in (0, 1, 2, 3, 4, 0.5, -0.5, -1, -2, 1.7)),
    "pow.Tensor_Tensor": (_tensors(2),),
    "xlogy.Tensor": (_tensors(2),),
    "xlogy.Scalar_Self": tuple(_after(number) for number in (0, 2.5)),
    "xlogy.Scalar_Other": (_tensors(1, 3), _tensors(1, math.nan)),
    "special_xlog1py.default": (_tensors(2),),
    "special_xlog1py.self_scalar": (_after(-1.5),),
    "special_xlog1py.other_scalar": (_tensors(1, 0.5),),
    "pow.Scalar": tuple(_after(base) for base in (2, 1, 0.3, -1.5, 0)),
    "clamp.default": (_tensors(1, -1, 2), _tensors(1, None, 0), _tensors(1, 0.5)),
    "clamp_min.default": (_tensors(1, 0),),
    "clamp_max.default": (_tensors(1, 1),),
    "threshold_backward.default": (_tensors(2, 0),),
    "leaky_relu_backward.default": (_tensors(2, 0.1, False),),
    "where.self": (_masked("t0", "t1", "t2"),),
    "where.ScalarOther": (_masked("t0", "t1", 2),),
    "where.ScalarSelf": (_masked("t0", -1.5, "t1"),),
    "where.Scalar": (_masked("t0", -1.5, 2),),
    "masked_fill.Scalar": (_masked("t1", "t0", -math.inf), _masked("t1", "t0", 3)),
    "masked_fill.Tensor": (_masked("t1", "t0", torch.tensor(1.5)), _masked("t1", "t0", torch.tensor(3))),
    "fill.Scalar": (_tensors(1, 3),),
    "full_like.default": (_tensors(1, 2.5),),
}  # fmt: skip


def overload(name: str) -> Any:
    namespace, packet, kind = name.split(".") if name.count(".") == 2 else ("aten", *name.split("."))
    return getattr(getattr(getattr(torch.ops, namespace), packet), kind)


def pointwise_cases(names: Any = None, whole: bool = False) -> Iterator[Case]:
    """Of each op float32 and an integer type, and another of either kind in turn; a further size and a layout in turn.

    whole: every size in float32; in every dtype a layout and a shape in turn, so that each meets each somewhere.
    """
    turn = 0
    for name, makers in POINTWISE.items():
        if names is not None and name not in names:
            continue
        op = overload(name)
        for make in makers:
            turn += 1
            some = FLOATS[1 + turn % 3], torch.int64, (*INTEGERS[1:], torch.bool)[turn % 3]
            for size in SIZES if whole else (SIZES[1], SIZES[turn % len(SIZES)]):
                yield from _case(op, make, size, torch.float32, plain)
            for dtype in DTYPES if whole else some:
                yield from _case(op, make, (63,), dtype, plain)
            for dtype in DTYPES if whole else (FLOATS[turn // 4 % 4],):
                turn += whole
                yield from _case(op, make, SHAPES[turn % 3], dtype, LAYOUTS[1 + turn % 4])
            if whole:
                yield from _case(op, make, (2, 3, 4, 5), torch.float32, channels_last)


def covering(cases: Iterable[Case]) -> Iterator[Case]:
    """Of each op's calls those that have something new: types, a shape, a layout, an option; not every combination."""
    seen: set[Any] = set()
    for case in cases:
        found = set(_features(case))
        if not found <= seen:
            seen |= found
            yield case


def _features(case: Case) -> Iterator[tuple[Any, ...]]:
    tensors = case.tensors
    yield case.op, "types", *(value.dtype for value in tensors), case.kwargs.get("dtype")
    yield case.op, "specials", all(bool(value.isfinite().all()) for value in tensors)
    for value in tensors[:1]:
        order = sorted(range(value.dim()), key=lambda d: (-value.stride(d), d))
        dense = value.permute(order).is_contiguous()
        yield case.op, "shape", *value.shape
        yield case.op, "layout", *order, dense, 0 in value.stride()
    yield case.op, "given", len(case.args), *case.kwargs
    for key, value in (*enumerate(case.args), *case.kwargs.items()):
        yield case.op, key, "a tensor" if isinstance(value, Tensor) else str(value)


def _case(
    op: Any, make: Make, shape: tuple[int, ...], dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> Iterator[Case]:
    args = make(shape, dtype, layout)
    kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
    args = args[:-1] if kwargs else args
    try:
        op(*args, **kwargs)
    except RuntimeError:
        return  # eager has no such kernel
    rest = ", ".join(str(value) for value in args if not isinstance(value, Tensor))
    what = f"{str(dtype)[6:]}{list(shape)} {layout.__name__} {rest}"
    cancelled = CANCELLED.get(op)
    if "value" in kwargs:
        cancelled = partial(CANCELLED[op], value=kwargs["value"])
    yield Case(op, args, kwargs, what, pointwise=op not in CANCELLING, cancelled=cancelled)


def case(name: str, *args: Any, **kwargs: Any) -> Iterator[Case]:
    try:
        overload(name)(*args, **kwargs)
    except RuntimeError:
        return  # eager has no such kernel
    rest = ", ".join(
        f"{str(value.dtype)[6:]}{list(value.shape)}{list(value.stride())}" if isinstance(value, Tensor) else str(value)
        for value in args
    )
    yield Case(overload(name), args, kwargs, rest, pointwise=False)


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0, special: bool = False) -> Tensor:
    return numbers(shape, dtype, seed, special)
