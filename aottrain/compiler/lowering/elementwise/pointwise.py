"""Ops whose result at an index needs their operands at that index alone.

Arithmetic is done in the type that eager does it in, operation by operation: a result of low precision is rounded
where eager would store it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.rules import (
    LOW_PRECISION,
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
from aottrain.ir.kernels.numbers import held

Formula = Callable[[Builder, Values], int]
Scalar = float | int | bool


def pointwise(node: fx.Node, tensors: Sequence[fx.Node], formula: Formula) -> Rule:
    """A rule for one result of the node's own shape; `formula` gives it from the tensors' values."""
    own = spec(node)
    operands = tuple(Operand(tensor, aligned(spec(tensor).shape, own.shape)) for tensor in tensors)
    outputs = (Output(whole(len(own.shape)), own.dtype),)

    def emit(b: Builder, values: Values) -> Sequence[int]:
        return [b.cast(formula(b, values), own.dtype)]

    return Rule(own.shape, operands, outputs, emit)


def mixed(
    node: fx.Node,
    sources: Sequence[Any],
    formula: Formula,
    compute: torch.dtype | None = None,
    rounds: bool = False,
    exact: fx.Node | None = None,
) -> Rule | None:
    """Operands are nodes or Python numbers, all brought to `compute` (by default the result's type, widened). rounds:
    whether a number, too, is rounded to the type as `rounded_number` has it; other ops compute with it as it is. exact:
    an operand that is not rounded to it."""
    if any(not isinstance(value, (fx.Node, int, float, bool)) for value in sources):
        return None
    tensors = [value for value in sources if isinstance(value, fx.Node)]
    dtype = compute or spec(node).dtype
    numbers = [
        rounded_number(node, value, dtype) if rounds and not isinstance(value, fx.Node) else value for value in sources
    ]

    def with_numbers(b: Builder, values: Values) -> int:
        tensor_values = iter(values)
        operand_values = [
            _operand(b, next(tensor_values), dtype, value is exact)
            if isinstance(value, fx.Node)
            else b.constant(value, wide(dtype))
            for value in numbers
        ]
        return formula(b, operand_values)

    return pointwise(node, tensors, with_numbers)


def rounded_number(node: fx.Node, value: Scalar, dtype: torch.dtype) -> Scalar:
    """A number beside a tensor, of an op whose kernel for CPUs has it in the tensor's type: 0.1 is bfloat16's. On CUDA
    it stays what float32 has of it, in which most kernels there compute."""
    return in_halves(value, dtype) if spec(node).device.type == "cpu" else value


def in_halves(number: Scalar, own: torch.dtype) -> Scalar:
    """A number rounded to the type of the result, where that is a half."""
    return held(number, own) if own in LOW_PRECISION else number


def factor(node: fx.Node) -> fx.Node | None:
    """The second operand of a product or a quotient where eager computes with it as it is: a tensor without dimensions
    beside halves, on a CPU. 1.1 is then float32's."""
    second = arguments(node)[1]
    if spec(node).dtype not in LOW_PRECISION or spec(node).device.type != "cpu" or not isinstance(second, fx.Node):
        return None
    return None if spec(second).shape or not spec(node).shape else second


def rounded(b: Builder, value: int, dtype: torch.dtype) -> int:
    """Brought to a type as promotion does, then widened for the arithmetic."""
    return b.cast(b.cast(value, dtype), wide(dtype))


def _operand(b: Builder, value: int, dtype: torch.dtype, exact: bool) -> int:
    return b.cast(value, wide(dtype)) if exact else rounded(b, value, dtype)


def promoted(sources: Sequence[Any]) -> torch.dtype:
    """The type in which eager compares these operands."""
    examples = [_example(value) if isinstance(value, fx.Node) else value for value in sources]
    example = examples[0]
    dtype = example.dtype if isinstance(example, torch.Tensor) else torch.result_type(example, example)
    for value in examples[1:]:
        dtype = torch.result_type(example, value)
        example = torch.empty((0,), dtype=dtype)
    return dtype


def _example(node: fx.Node) -> torch.Tensor:
    tensor = spec(node)
    return torch.empty((0,) if tensor.shape else (), dtype=tensor.dtype)


# op: name of the operation in KernelIR. The result has the operand's type; integers are brought to the result's first.
_UNARY = {
    "neg": "neg", "abs": "abs", "exp": "exp", "expm1": "expm1", "log": "log", "log1p": "log1p", "log2": "log2",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sin", "cos": "cos", "tanh": "tanh", "sigmoid": "sigmoid", "erf": "erf",
    "floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "round", "sign": "sign", "reciprocal": "reciprocal",
    "bitwise_not": "not", "asin": "asin", "acos": "acos", "sinh": "sinh", "cosh": "cosh", "sgn": "sign",
    "exp2": "exp2", "log10": "log10", "tan": "tan", "atan": "atan", "erfc": "erfc",
}  # fmt: skip

_BINARY = {
    "mul.Tensor": "mul", "mul.Scalar": "mul", "maximum": "max", "minimum": "min", "atan2": "atan2",
    "bitwise_and.Tensor": "and", "bitwise_or.Tensor": "or", "bitwise_xor.Tensor": "xor",
    "bitwise_and.Scalar": "and", "bitwise_or.Scalar": "or", "bitwise_xor.Scalar": "xor",
}  # fmt: skip

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def _unary(op: str) -> Callable[[fx.Node], Rule | None]:
    def make(node: fx.Node) -> Rule | None:
        if spec(node).dtype is torch.bool and op not in ("not",):
            return None
        return mixed(node, arguments(node)[:1], lambda b, v: b.compute(op, *v))

    return make


def _binary(op: str) -> Callable[[fx.Node], Rule | None]:
    def make(node: fx.Node) -> Rule | None:
        if spec(node).dtype.is_floating_point and op in ("and", "or", "xor"):
            return None  # an error, which the library raises
        if spec(node).dtype is torch.bool and op == "mul":
            return mixed(node, arguments(node)[:2], lambda b, v: b.compute("and", *v))
        exact = factor(node) if op == "mul" else None
        return mixed(node, arguments(node)[:2], lambda b, v: b.compute(op, *v), exact=exact)

    return make


def _comparison(op: str) -> Callable[[fx.Node], Rule | None]:
    def make(node: fx.Node) -> Rule | None:
        operands = arguments(node)[:2]
        return mixed(node, operands, lambda b, v: b.compare(op, *v), promoted(operands), rounds=True)

    return make


for _name, _op in _UNARY.items():
    lowers(f"aten.{_name}.default")(_unary(_op))
for _name, _op in _BINARY.items():
    lowers(f"aten.{_name}" if "." in _name else f"aten.{_name}.default")(_binary(_op))
for _name in _COMPARISONS:
    lowers(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar")(_comparison(_name))


@lowers("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar", "aten.rsub.Scalar")
def _add(node: fx.Node) -> Rule | None:
    """a + alpha * b, a - alpha * b, or b - alpha * a."""
    name = str(node.target)
    op = "add" if "add" in name else "sub"
    alpha = argument(node, "alpha", 2, 1)
    if spec(node).dtype is torch.bool and op == "add" and alpha == 1:
        return mixed(node, arguments(node)[:2], lambda b, v: b.compute("or", *v))
    if spec(node).dtype is torch.bool or not isinstance(alpha, (int, float)):
        return None
    first, second = arguments(node)[:2] if "rsub" not in name else arguments(node)[1::-1]

    factor = rounded_number(node, alpha if op == "add" else -alpha, spec(node).dtype)

    def formula(b: Builder, v: Values) -> int:
        if alpha == 1:
            return b.compute(op, *v)
        return b.compute("fma", b.constant(factor, b.dtype(v[1])), v[1], v[0])

    return mixed(node, (first, second), formula, rounds=True)


@lowers("aten.div.Tensor", "aten.div.Scalar")
def _div(node: fx.Node) -> Rule | None:
    return mixed(node, arguments(node)[:2], lambda b, v: b.compute("div", *v), exact=factor(node))


@lowers("aten.logical_and.default", "aten.logical_or.default", "aten.logical_xor.default", "aten.logical_not.default")
def _logical(node: fx.Node) -> Rule | None:
    op = str(node.target).split("_")[1].split(".")[0]
    tensors = [value for value in arguments(node) if isinstance(value, fx.Node)]
    return pointwise(node, tensors, lambda b, v: b.compute(op, *(_truth(b, value) for value in v)))


def _truth(b: Builder, value: int) -> int:
    if b.dtype(value) is torch.bool:
        return value
    return b.compare("ne", value, b.constant(0, b.dtype(value)))


@lowers("aten.isnan.default")
def _isnan(node: fx.Node) -> Rule | None:
    (source,) = arguments(node)
    return mixed(node, (source,), lambda b, v: b.compare("ne", v[0], v[0]), spec(source).dtype)


@lowers("aten._to_copy.default", "aten.clone.default", "prims.convert_element_type.default")
def _copy(node: fx.Node) -> Rule | None:
    source = arguments(node)[0]
    if not isinstance(source, fx.Node):
        return None
    if spec(source).device != spec(node).device or source.op == "get_attr":
        return None
    return pointwise(node, [source], lambda b, v: v[0])


@lowers("aten.copy.default")
def _copy_into(node: fx.Node) -> Rule | None:
    """The second operand's values in the first one's type, shape and layout."""
    source = arguments(node)[1]
    if not isinstance(source, fx.Node) or spec(source).device != spec(node).device:
        return None
    return pointwise(node, [source], lambda b, v: v[0])


def _filled(value: Callable[[fx.Node], Any]) -> Callable[[fx.Node], Rule | None]:
    def make(node: fx.Node) -> Rule | None:
        number = value(node)
        if not isinstance(number, (bool, int, float)):
            return None
        return pointwise(node, [], lambda b, _: b.constant(number, spec(node).dtype))

    return make


for _name in ("zeros", "zeros_like", "new_zeros"):
    lowers(f"aten.{_name}.default")(_filled(lambda node: 0))
for _name in ("ones", "ones_like", "new_ones"):
    lowers(f"aten.{_name}.default")(_filled(lambda node: 1))
lowers("aten.full.default")(_filled(lambda node: argument(node, "fill_value", 1)))
lowers("aten.full_like.default", "aten.fill.Scalar")(_filled(lambda node: arguments(node)[1]))
lowers("aten.new_full.default")(_filled(lambda node: argument(node, "fill_value", 2)))
lowers("aten.scalar_tensor.default")(_filled(lambda node: arguments(node)[0]))


@lowers("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(node: fx.Node) -> Rule | None:
    return _select(node, *arguments(node)[:3])


@lowers("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(node: fx.Node) -> Rule | None:
    source, mask, value = arguments(node)[:3]
    return _select(node, mask, value, source)


def _select(node: fx.Node, condition: Any, yes: Any, no: Any) -> Rule | None:
    dtype = spec(node).dtype
    if any(not isinstance(value, (fx.Node, int, float, bool)) for value in (yes, no)):
        return None
    tensors = [value for value in (condition, yes, no) if isinstance(value, fx.Node)]

    def formula(b: Builder, v: Values) -> int:
        values = iter(v)
        truth = _truth(b, next(values))
        sides = [
            b.cast(next(values), dtype) if isinstance(side, fx.Node) else _number(b, side, dtype) for side in (yes, no)
        ]
        return b.compute("where", truth, *sides)

    return pointwise(node, tensors, formula)


def _number(b: Builder, value: Scalar, dtype: torch.dtype) -> int:
    """A Python number in a type, rounded to it."""
    return b.cast(b.constant(value, wide(dtype)), dtype)


@lowers("aten.relu.default")
def _relu(node: fx.Node) -> Rule | None:
    return mixed(node, arguments(node)[:1], lambda b, v: at_least(b, v[0], 0))


def at_least(b: Builder, value: int, low: Scalar) -> int:
    """The value where it is not below the bound, so NaN and -0.0 stay."""
    bound = b.constant(low, b.dtype(value))
    return b.compute("where", b.compare("lt", value, bound), bound, value)


def at_most(b: Builder, value: int, high: Scalar) -> int:
    bound = b.constant(high, b.dtype(value))
    return b.compute("where", b.compare("gt", value, bound), bound, value)


@lowers("aten.threshold_backward.default")
def _threshold_backward(node: fx.Node) -> Rule | None:
    """The gradient where the input is above the threshold; where it is not, or is NaN, as eager: x <= t gives 0."""
    gradient, x, threshold = arguments(node)[:3]

    def formula(b: Builder, v: Values) -> int:
        low = b.compare("le", v[1], b.constant(threshold, b.dtype(v[1])))
        return b.compute("where", low, b.constant(0, b.dtype(v[0])), v[0])

    return mixed(node, (gradient, x), formula)


@lowers("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default", "aten.hardtanh.default")
def _clamp(node: fx.Node) -> Rule | None:
    name = str(node.target)
    low = argument(node, "min", 1) if "max" not in name else None
    high = argument(node, "max", 2 if "clamp.default" in name else 1) if "min" not in name else None
    if "hardtanh" in name:
        low, high = argument(node, "min_val", 1, -1), argument(node, "max_val", 2, 1)
    if any(isinstance(bound, fx.Node) or bound != bound for bound in (low, high)):
        return None
    low, high = (None if bound is None else rounded_number(node, bound, spec(node).dtype) for bound in (low, high))

    def formula(b: Builder, v: Values) -> int:
        value = v[0]
        if low is not None:
            value = at_least(b, value, low)
        if high is not None:
            value = at_most(b, value, high)
        return value

    return mixed(node, arguments(node)[:1], formula)


@lowers("aten.addcmul.default", "aten.addcdiv.default")
def _addcmul(node: fx.Node) -> Rule | None:
    op = "mul" if "addcmul" in str(node.target) else "div"
    scale = argument(node, "value", 3, 1)
    if not spec(node).dtype.is_floating_point:
        return None

    def formula(b: Builder, v: Values) -> int:
        left = v[1] if scale == 1 else b.compute("mul", b.constant(scale, b.dtype(v[1])), v[1])
        if op == "mul":
            return b.compute("fma", left, v[2], v[0])
        return b.compute("add", v[0], b.compute(op, left, v[2]))

    return mixed(node, arguments(node)[:3], formula)
