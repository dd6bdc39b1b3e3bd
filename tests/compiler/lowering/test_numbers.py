"""Numbers that a program writes down, beside tensors of each type, against eager bit for bit.

A CPU's kernels round most of them to the tensor's type, where that is a half, and compute with others as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.toolchain.native import find_compiler
from tests.compiler.lowering.lowering_runs import Case, eager, evaluated, link, plan, run

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32, torch.float64)
NUMBERS = (0.1, -0.3, 0.7, 1 / 3, 2.7, 1e-8, 1e-41, 1e-46, 3, -2, 70000.0, 1e39, math.inf, -math.inf, math.nan)

ANY_BOUNDS = torch.__version__ >= "2.12"  # before, fakes took no upper bound below the lower one

# Of tensors x and y, a mask and a number.
FILLED: dict[str, Callable[..., tuple[Any, ...]]] = {
    "full": lambda x, y, m, s: (aten.full.default, ([9], s), {"dtype": x.dtype}),
    "scalar_tensor": lambda x, y, m, s: (aten.scalar_tensor.default, (s,), {"dtype": x.dtype}),
    "full_like": lambda x, y, m, s: (aten.full_like.default, (x, s)),
    "new_full": lambda x, y, m, s: (aten.new_full.default, (x, [9], s)),
    "fill": lambda x, y, m, s: (aten.fill.Scalar, (x, s)),
    "masked_fill": lambda x, y, m, s: (aten.masked_fill.Scalar, (x, m, s)),
    "where": lambda x, y, m, s: (aten.where.ScalarOther, (m, x, s)),
    "where self": lambda x, y, m, s: (aten.where.ScalarSelf, (m, s, x)),
    "pad": lambda x, y, m, s: (aten.constant_pad_nd.default, (x, [2, 3], s)),
    "scatter": lambda x, y, m, s: (aten.scatter.value, (x.view(8, -1), 1, torch.ones(8, 1, dtype=torch.int64), s)),
    "nan_to_num": lambda x, y, m, s: (aten.nan_to_num.default, (x, s, s, -0.3)),
}
COMPARED: dict[str, Callable[..., tuple[Any, ...]]] = {
    "eq": lambda x, y, m, s: (aten.eq.Scalar, (x, s)),
    "ne": lambda x, y, m, s: (aten.ne.Scalar, (x, s)),
    "lt": lambda x, y, m, s: (aten.lt.Scalar, (x, s)),
    "le": lambda x, y, m, s: (aten.le.Scalar, (x, s)),
    "gt": lambda x, y, m, s: (aten.gt.Scalar, (x, s)),
    "ge": lambda x, y, m, s: (aten.ge.Scalar, (x, s)),
}
COMPUTED: dict[str, Callable[..., tuple[Any, ...]]] = {
    "add": lambda x, y, m, s: (aten.add.Tensor, (x, s)),
    "sub": lambda x, y, m, s: (aten.sub.Tensor, (x, s)),
    "rsub": lambda x, y, m, s: (aten.rsub.Scalar, (x, s)),
    "alpha": lambda x, y, m, s: (aten.add.Tensor, (x, y), {"alpha": s}),
    "mul": lambda x, y, m, s: (aten.mul.Tensor, (x, s)),
    "div": lambda x, y, m, s: (aten.div.Tensor, (x, s)),
    "clamp": lambda x, y, m, s: (aten.clamp.default, (x, s, 1.7)),
    "clamp_max": lambda x, y, m, s: (aten.clamp_max.default, (x, s)),
    "hardtanh": lambda x, y, m, s: (aten.hardtanh.default, (x, -0.3, s if ANY_BOUNDS else max(-0.3, s))),
    "leaky_relu": lambda x, y, m, s: (aten.leaky_relu.default, (x, s)),
    "threshold": lambda x, y, m, s: (aten.threshold_backward.default, (y, x, s)),
    "addcmul": lambda x, y, m, s: (aten.addcmul.default, (x, y, x), {"value": s}),
    "lerp": lambda x, y, m, s: (aten.lerp.Scalar, (x, y, s)),
}
REMAINDERS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "remainder": lambda x, y, m, s: (aten.remainder.Scalar, (x, s)),
    "fmod": lambda x, y, m, s: (aten.fmod.Scalar, (x, s)),
    "divided": lambda x, y, m, s: (aten.div.Tensor_mode, (x, s), {"rounding_mode": "floor"}),
}
DIVISIONS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "truncated": lambda x, y, m, s: (aten.div.Tensor_mode, (x, y), {"rounding_mode": "trunc"}),
    "floored": lambda x, y, m, s: (aten.div.Tensor_mode, (x, y), {"rounding_mode": "floor"}),
    "floor_divide": lambda x, y, m, s: (aten.floor_divide.default, (x, y)),
    "number over": lambda x, y, m, s: (aten.div.Tensor_mode, (torch.tensor(s), y), {"rounding_mode": "trunc"}),
    "power": lambda x, y, m, s: (aten.pow.Tensor_Scalar, (x, s)),
}
# The number as a tensor without dimensions, which is wider than a half.
WIDER: dict[str, Callable[..., tuple[Any, ...]]] = {
    f"{name} {dtype}": lambda x, y, m, s, op=op, dtype=dtype, more=more: (op, (x, torch.tensor(s, dtype=dtype)), more)
    for dtype in (torch.float32, torch.float64)
    for name, op, more in (
        ("mul", aten.mul.Tensor, {}),
        ("div", aten.div.Tensor, {}),
        ("add", aten.add.Tensor, {}),
        ("sub", aten.sub.Tensor, {}),
        ("maximum", aten.maximum.default, {}),
        ("truncated", aten.div.Tensor_mode, {"rounding_mode": "trunc"}),
        ("floored", aten.div.Tensor_mode, {"rounding_mode": "floor"}),
        ("floor_divide", aten.floor_divide.default, {}),
    )
}
LOGARITHMS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "xlogy": lambda x, y, m, s: (aten.xlogy.Scalar_Other, (x, s)),
    "xlogy self": lambda x, y, m, s: (aten.xlogy.Scalar_Self, (s, x)),
    "xlog1py": lambda x, y, m, s: (aten.special_xlog1py.other_scalar, (x, s)),
    "pow": lambda x, y, m, s: (aten.pow.Scalar, (s, x)),
}


def tensor(dtype: torch.dtype, seed: int, number: float) -> torch.Tensor:
    """As many elements as vectors are full of: eager rounds those after the last vector otherwise. The number and
    those about as large are among them."""
    values = torch.randn(256, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    values[: len(NUMBERS)] = torch.tensor(NUMBERS, dtype=torch.float64)
    near = torch.tensor([number, -number, number * 1.01, number * 0.99, 0.0, -0.0], dtype=torch.float64)
    values[50:56] = near.nan_to_num(1.0)
    return values.to(dtype)


def cases(ops: dict[str, Callable[..., tuple[Any, ...]]], dtype: torch.dtype) -> Iterator[Case]:
    for name, make in ops.items():
        for number in NUMBERS:
            op, args, *rest = make(
                tensor(dtype, 0, number), tensor(dtype, 1, number), tensor(dtype, 2, 1.0) > 0, number
            )
            yield Case(op, args, *rest, what=f"{name} of {number} in {dtype}")


@pytest.mark.parametrize(
    ("ops", "dtype"),
    [(ops, dtype) for ops in (FILLED, COMPARED, COMPUTED) for dtype in FLOATS]
    + [(ops, dtype) for ops in (REMAINDERS, LOGARITHMS, DIVISIONS, WIDER) for dtype in HALVES],
    ids=lambda given: str(given) if isinstance(given, torch.dtype) else next(iter(given)),
)
def test_bits_are_those_of_eager(ops, dtype):
    """What eager refuses is left to it."""
    planned = [plan(case, number) for number, case in enumerate(cases(ops, dtype))]
    lowered = [one for one in planned if one.lowered]
    assert {one.case.op for one in lowered} == {one.case.op for one in planned}
    launches = link(lowered)
    wrong = [text for one in lowered for text in _wrong(one.case, run(one, launches))]
    if dtype is not torch.float64:  # of which `evaluate` rounds a fused product and sum twice
        wrong += [text for one in lowered for text in _wrong(one.case, run(one, evaluated(one)))]
    assert not wrong, "\n".join(wrong)


def _wrong(case: Case, got: list[torch.Tensor]) -> Iterator[str]:
    for mine, wanted in zip(got, eager(case), strict=True):
        assert mine.dtype is wanted.dtype
        same = (mine == wanted) | (mine != mine) & (wanted != wanted)
        if wanted.is_floating_point():
            same &= (mine.signbit() == wanted.signbit()) | wanted.isnan()
        if not bool(same.all()):
            place = tuple((~same).nonzero()[0].tolist())
            yield f"{case.what}: {int((~same).sum())} differ; {wanted[place].item()} became {mine[place].item()}"


def casts(x: torch.Tensor) -> list[torch.Tensor]:
    """A number in the type, seen in wider types."""
    wide = [
        torch.full_like(x, 0.1).double(),
        torch.full_like(x, 0.9999).float().to(torch.int32),
        torch.full_like(x, 1e-46).double() > 0,
        torch.full_like(x, 1e-8).float() * 1e8,
        torch.full_like(x, 0.1).half().double(),
        torch.full_like(x, 0.1).bfloat16().float().double(),
        x.new_full((4, 4), 1 / 3).double(),
        x.clone().fill_(0.1).double() * 3,
        F.pad(x, (0, 1), value=0.1)[:, 1:].double() * 3,
        torch.where(x > 0, 0.1, x).double(),
    ]
    return [value + x.double() * 0 if value.is_floating_point() else value for value in wide]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_number_is_rounded_to_the_type_that_it_fills(dtype):
    x = torch.tensor([[1.0, -2.0, 0.25, 3.0]] * 4).to(dtype)
    for got, wanted in zip(aottrain.compile(casts, kernel="cpp", capture="trace")(x), casts(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_of_a_product_of_numbers_both_are_rounded_first():
    x = torch.full((64,), -math.inf)
    planned = [plan(Case(aten.elu.default, (x, alpha, 0.3)), k) for k, alpha in enumerate((0.1, 0.7, 1 / 3, 2.7))]
    launches = link(planned)
    for one in planned:
        assert torch.equal(run(one, launches)[0], eager(one.case)[0])


@pytest.mark.parametrize("divisor", [256, 512, 255, 1 << 40])
def test_a_divisor_that_is_another_number_in_the_type_is_left_to_eager(divisor):
    """256 is 0 in eight bits, and 255 is -1."""
    for op in (aten.remainder.Scalar, aten.fmod.Scalar, aten.floor_divide.default):
        assert not plan(Case(op, (torch.ones(4, dtype=torch.int8), divisor)), 0).lowered


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor"])
def test_bits_of_floats_are_left_to_the_library(name):
    """A number that is no integer makes floats of integers, and those have no bits: eager raises."""
    overload = getattr(aten, name)
    x = torch.arange(4)
    assert not plan(Case(overload.Scalar, (x, 2.5)), 0).lowered
    assert not plan(Case(overload.Tensor, (x, x.float())), 0).lowered
    assert plan(Case(overload.Scalar, (x, 2)), 0).lowered
