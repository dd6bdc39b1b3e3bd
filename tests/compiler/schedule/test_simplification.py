"""Instructions that are left out of a kernel: its results are the same to the last bit."""

from __future__ import annotations

import pytest
import torch

from aottrain.compiler.codegen.evaluation import evaluate
from aottrain.compiler.schedule.simplification import simplified
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import Address, Compute, Constant, KernelIR, Load, Store

F32, BOOL = torch.float32, torch.bool
HALVES = (torch.bfloat16, torch.float16)
COMPARISONS = ("le", "lt", "gt", "ge")
HERE = Address(Affine(((0, 1),)))


def kernel_of(*body):
    """One that begins with a number of float32 in each of its elements, and writes the last value of its body."""
    body = (Load(0, HERE, F32), *body)
    return KernelIR("kernel", (NUMBERS.numel(),), 0, (), body, (Store(1, HERE, len(body) - 1),), ())


def cast(value, dtype):
    return Compute("cast", (value,), dtype)


def edges():
    """Numbers of all sizes, and those around the places at which roundings change."""
    drawn = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([1e-45, 2**-134, 2**-133, 2**-25, 2**-24, 1e-3, 1, 6, 65504, 65520, 3.38e38, 3.4e38])
    near = sizes.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    halfway = torch.linspace(-8, 8, 4097)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    found = torch.cat((drawn, near.view(F32).flatten(), halfway, special))
    return torch.cat((found, -found))


NUMBERS = edges()


def results(kernel):
    written = kernel.body[kernel.stores[0].value].dtype
    out = torch.empty(NUMBERS.shape, dtype=written)
    evaluate(kernel, [NUMBERS, out])
    if written.is_floating_point:
        out = out.masked_fill(out.isnan(), torch.nan)  # one of them is as good as another
    return out.view({2: torch.int16, 4: torch.int32, 1: torch.uint8}[written.itemsize])


def roundings(kernel):
    return sum(each.dtype in HALVES for each in kernel.body)


def check(kernel, num_roundings):
    less = simplified(kernel)
    torch.testing.assert_close(results(less), results(kernel), rtol=0, atol=0)
    assert roundings(less) == num_roundings, less.body
    return less


def round_to(half):
    """Of the number that a kernel begins with, its values 1 and 2: rounded, and as float32 again."""
    return cast(0, half), cast(1, F32)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("op", COMPARISONS)
@pytest.mark.parametrize("number", [0.0, 6.0, -3.0, 0.1, 0.49999999999, 65504.0, 70000.0, 1e-40, torch.inf, -torch.inf])
def test_what_is_compared_with_a_number_is_not_rounded(half, op, number):
    check(kernel_of(*round_to(half), Constant(number, F32), Compute(op, (2, 3), BOOL)), 0)


@pytest.mark.parametrize("half", HALVES)
def test_a_comparison_with_no_number_and_one_for_equality_are_left(half):
    for op, number in (("le", torch.nan), ("eq", 6.0), ("ne", 0.0)):
        check(kernel_of(*round_to(half), Constant(number, F32), Compute(op, (2, 3), BOOL)), 1)


@pytest.mark.parametrize("half", HALVES)
def test_what_is_read_besides_is_rounded(half):
    """Then a comparison of it costs no rounding of its own."""
    mask = *round_to(half), Constant(0.0, F32), Compute("le", (2, 3), BOOL)
    check(kernel_of(*mask, Compute("where", (4, 3, 2), F32)), 1)
    check(kernel_of(*mask, Compute("where", (4, 3, 0), F32)), 0)


@pytest.mark.parametrize("half", HALVES)
def test_what_a_type_holds_is_not_rounded_again(half):
    """A choice of rounded numbers, their opposites and sizes."""
    chosen = *round_to(half), Constant(0.0, F32), Compute("lt", (0, 3), BOOL), Compute("where", (4, 3, 2), F32)
    check(kernel_of(*chosen, cast(5, half), cast(6, F32), Compute("exp", (7,), F32)), 1)
    for op in ("neg", "abs"):
        check(kernel_of(*round_to(half), Compute(op, (2,), F32), cast(3, half), cast(4, F32)), 1)
    for op in ("exp", "sqrt"):
        check(kernel_of(*round_to(half), Compute(op, (2,), F32), cast(3, half), cast(4, F32)), 2)


def test_a_number_that_a_type_does_not_hold_is_rounded():
    for number, num_roundings in ((0.5, 1), (0.1, 2), (-0.0, 1)):
        body = *round_to(torch.bfloat16), Constant(0.0, F32), Compute("lt", (2, 3), BOOL), Constant(number, F32)
        body = *body, Compute("where", (4, 5, 2), F32), cast(6, torch.bfloat16), cast(7, F32)
        check(kernel_of(*body), num_roundings)


def test_another_type_rounds():
    to_bfloat16 = *round_to(torch.bfloat16), cast(2, torch.float16), cast(3, F32)
    check(kernel_of(*to_bfloat16), 2)
    check(kernel_of(*to_bfloat16, Constant(0.0, F32), Compute("le", (4, 5), BOOL)), 1)


@pytest.mark.parametrize("op", COMPARISONS)
@pytest.mark.parametrize("bound, number, is_same", [(0.0, 0.0, True), (0.0, 6.0, True), (1.0, 0.0, False)])
def test_where_a_bound_says_nothing_a_value_is_compared_itself(op, bound, number, is_same):
    """A relu's mask is its operand's."""
    low = Constant(bound, F32), Compute("lt", (0, 1), BOOL), Compute("where", (2, 1, 0), F32)
    less = check(kernel_of(*low, Constant(number, F32), Compute(op, (3, 4), BOOL)), 0)
    assert all(each.dtype is BOOL for each in less.body[2:]) == (is_same and op in ("le", "gt"))


def test_what_no_result_needs_is_left_out():
    less = simplified(kernel_of(Compute("exp", (0,), F32), Compute("neg", (0,), F32)))
    assert [getattr(each, "op", "load") for each in less.body] == ["load", "neg"]
