"""Kernels written by hand, rendered to Triton and run, against `evaluate`. Run by test_triton.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from aottrain.compiler.codegen.evaluation import evaluate
from aottrain.compiler.codegen.triton.programs import with_draws
from aottrain.compiler.codegen.triton.render import render_triton
from aottrain.ir.kernels.affine import ZERO, Affine
from aottrain.ir.kernels.kernel import (
    Address,
    Column,
    Compute,
    Constant,
    KernelIR,
    Load,
    Parameter,
    Position,
    Reduce,
    Store,
)
from aottrain.ir.kernels.verify import verify_kernel
from aottrain.ops.random.philox import philox_words
from aottrain.runtime.cuda.triton_launch import triton_launch
from tests.numerics.tolerance import RTOL_ATOL, sum_error
from tests.sampling import crossed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F32, F64, BF16, F16, I64, BOOL = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, -0.3, 1e-20, -1e-8, 3e-4, 30.0, -30.0, 100.0, math.inf, -math.inf]


def at(*steps: int, start: int = 0) -> Affine:
    """Step of each loop."""
    return Affine.of(dict(enumerate(steps)), start)


def check(kernel: KernelIR, *given: torch.Tensor, exact: bool = False) -> list[torch.Tensor]:
    """Run both on the same memory; compare what is written. Returns it."""
    verify_kernel(kernel)
    inputs = iter(given)
    wanted = [
        torch.full((p.span,), 7, device=DEVICE).to(p.dtype) if p.written else next(inputs).to(DEVICE)
        for p in kernel.parameters
    ]
    got = [buffer.clone() for buffer in wanted]
    evaluate(kernel, wanted)
    with_draws(triton_launch(render_triton(kernel)), kernel)(got)
    reduces = any(isinstance(instruction, Reduce) for instruction in kernel.body)
    num_terms = max(kernel.num_rows if kernel.columns else 1, kernel.row_size if reduces else 1)
    for parameter, a, b in zip(kernel.parameters, got, wanted, strict=True):
        if parameter.dtype.is_floating_point and not exact:
            # Sums of many terms cancel: what their order may lose is in units of the terms, not of the result.
            rtol, atol = RTOL_ATOL[b.dtype]
            scale = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() else 1.0
            atol = max(atol, sum_error(num_terms, torch.float32) * scale)
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True, msg=said_of(parameter))
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=said_of(parameter))
    return [buffer for buffer, parameter in zip(got, kernel.parameters, strict=True) if parameter.written]


def said_of(parameter: Parameter) -> Callable[[str], str]:
    return lambda text: f"{parameter.name}: {text}"


def several(ops: Sequence[str], count: int, dtype: torch.dtype, arity: int = 1, results: Any = None) -> KernelIR:
    """Each op's result of the same operands. results: their types, where they are not the operands'."""
    address = Address(at(1))
    results = results or [dtype] * len(ops)
    loads = [Load(i, address, dtype) for i in range(arity)]
    inputs = [Parameter(f"x{i}", dtype, False, count) for i in range(arity)]
    pairs = list(zip(ops, results, strict=True))
    made = [Compute(op, tuple(range(arity)), result) for op, result in pairs]
    outputs = [Parameter(f"{op}_{i}", result, True, count) for i, (op, result) in enumerate(pairs)]
    stores = tuple(Store(arity + i, address, arity + i) for i in range(len(ops)))
    return KernelIR("kernel_0", (count,), 0, (*inputs, *outputs), (*loads, *made), stores, ())


def pointwise(op: str, count: int, dtype: torch.dtype, arity: int = 1, result: torch.dtype | None = None) -> KernelIR:
    return several([op], count, dtype, arity, [result or dtype])


UNARY = (
    "neg", "abs", "exp", "expm1", "exp2", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "tanh", "atan", "asin",
    "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "floor", "ceil", "trunc", "round",
    "sign", "reciprocal",
)  # fmt: skip
ANGLES = ("sin", "cos", "tan")  # of finite numbers


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("ops", [UNARY, ANGLES], ids=["all", "angles"])
def test_functions_of_one_number(ops, dtype):
    special = torch.tensor([*SPECIAL, math.nan], dtype=dtype)
    if ops is ANGLES:
        special = special[special.isfinite()]
    given = torch.cat([special, torch.randn(40, dtype=dtype) * 3, torch.rand(20, dtype=dtype) * 1e-3])
    check(several(ops, len(given), dtype), given)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_functions_of_two_numbers(dtype):
    special = torch.tensor([*SPECIAL, math.nan], dtype=dtype)
    pairs = torch.cartesian_prod(special, special)
    pairs = torch.cat([pairs, torch.randn(60, 2, dtype=dtype) * 2])
    ops = ["add", "sub", "mul", "div", "max", "min", "atan2", "pow", "fmod"]
    check(several(ops, len(pairs), dtype, 2), pairs[:, 0].contiguous(), pairs[:, 1].contiguous())


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
def test_constants_are_rounded_to_their_type(dtype):
    """Those of the program, and what is loaded where nothing is read: both are seen in float64."""
    values = (0.1, -1 / 3, 2.7, 1e-8, 1e-46, 70001.0, 3.4e38, math.inf, -0.0, math.nan)
    loads = [Load(0, Address(at(1)), dtype, guard=1, other=value) for value in values]
    body = [Load(1, Address(at(1)), BOOL), Constant(False, BOOL), *loads]
    body += [Constant(value, dtype) for value in values]
    wide = [Compute("cast", (2 + k,), F64) for k in range(2 * len(values))]
    inputs = [Parameter("x", dtype, False, 20), Parameter("m", BOOL, False, 20)]
    outputs = [Parameter(f"y{k}", F64, True, 20) for k in range(len(wide))]
    stores = tuple(Store(2 + k, Address(at(1)), len(body) + k) for k in range(len(wide)))
    kernel = KernelIR("kernel_0", (20,), 0, (*inputs, *outputs), (*body, *wide), stores, ())
    check(kernel, torch.randn(20).to(dtype), torch.zeros(20, dtype=BOOL), exact=True)


def test_comparisons_with_nan():
    values = torch.tensor([math.nan, -1.0, 0.0, 2.0])
    pairs = torch.cartesian_prod(values, values)
    ops = ["eq", "ne", "lt", "le", "gt", "ge"]
    check(several(ops, 16, F32, 2, [BOOL] * 6), pairs[:, 0].contiguous(), pairs[:, 1].contiguous())


@pytest.mark.parametrize("dtype", [I64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_integers_wrap(dtype):
    limits = torch.iinfo(dtype)
    values = torch.tensor([limits.min, limits.max, 0, 1, 3, limits.max // 2], dtype=dtype)
    pairs = torch.cartesian_prod(values, values)
    ops = ["add", "sub", "mul", "and", "or", "xor", "max", "min", "lt"]
    kernel = several(ops, 36, dtype, 2, [BOOL if op == "lt" else dtype for op in ops])
    check(kernel, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())


@pytest.mark.parametrize("dtype", [I64, torch.int32, torch.int8], ids=str)
def test_integer_division_is_towards_zero(dtype):
    values = torch.tensor([-7, -3, -2, 2, 3, 5, 100], dtype=dtype)
    pairs = torch.cartesian_prod(values, values)
    check(several(["div", "fmod"], 49, dtype, 2), pairs[:, 0].contiguous(), pairs[:, 1].contiguous())


@pytest.mark.parametrize("dtype", [F32, F64, I64], ids=str)
def test_a_product_and_a_sum_rounded_once(dtype):
    given = [(torch.randn(50, dtype=F64) * 1000).to(dtype) for _ in range(3)]
    check(pointwise("fma", 50, dtype, 3), *given, exact=dtype is F32)


def test_booleans():
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    check(several(["and", "or", "xor", "lt", "eq"], 4, BOOL, 2), a, b)
    check(pointwise("not", 4, BOOL), a)


@pytest.mark.parametrize("source", [F32, F64, BF16, F16, I64, torch.uint8, BOOL], ids=str)
def test_casts(source):
    given = torch.tensor([0.0, 1.0, 2.75, 100.4, 3.0, 1.0009765625, 17.0, 63.0]).to(source)
    targets = [F32, F64, BF16, F16, I64, torch.int32, torch.int8, torch.uint8, BOOL]
    check(several(["cast"] * len(targets), 8, source, 1, targets), given, exact=True)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_low_precision_is_rounded_after_every_operation(dtype):
    """A sum that is exact in float32, and a difference that shows whether it was rounded in between; ties to even."""
    x = torch.cat([torch.randn(50), torch.tensor([1.00390625, 1.01171875, math.inf, math.nan])]).to(dtype)
    y = torch.cat([torch.randn(50) * 1e-3, torch.tensor([0.00390625, 0.00390625, 1.0, 1.0])]).to(dtype)
    body = (
        Load(0, Address(at(1)), dtype), Load(1, Address(at(1)), dtype),
        Compute("add", (0, 1), dtype), Compute("sub", (2, 0), dtype),
    )  # fmt: skip
    parameters = (Parameter("x", dtype, False, 54), Parameter("y", dtype, False, 54), Parameter("z", dtype, True, 54))
    check(KernelIR("kernel_0", (54,), 0, parameters, body, (Store(2, Address(at(1)), 3),), ()), x, y, exact=True)


def reduction(op: str, rows: int, size: int, dtype: torch.dtype = F32, compute: torch.dtype | None = None) -> KernelIR:
    """A row's total, what each element is above it, and for each element's place the total over the rows."""
    compute = compute or dtype
    element, row = Address(at(size, 1)), Address(at(1))
    body = (
        Load(0, element, dtype),
        Compute("cast", (0,), compute),
        Reduce(op, 1, compute),
        Compute("sub", (1, 2), compute),
    )
    parameters = (
        Parameter("x", dtype, False, rows * size), Parameter("above", compute, True, rows * size),
        Parameter("total", compute, True, rows), Parameter("column", compute, True, size),
        Parameter("all", compute, True, 1),
    )  # fmt: skip
    stores = (Store(1, element, 3), Store(2, row, 2))
    columns = (Column(op, 3, Address(at(0, 1)), 1, compute), Column(op, 4, Address(ZERO), 1, compute, True))
    return KernelIR("kernel_0", (rows, size), 1, parameters, body, stores, columns)


# Each op in some shapes, and in each shape the sum.
SHAPES = [(rows, size, "sum") for rows, size in ((1, 1), (5, 1), (1, 63), (63, 5), (300, 3), (3, 4097), (2, 17001))]
SHAPES += [(rows, size, op) for rows, size in ((5, 1), (300, 3), (3, 4097)) for op in ("max", "min")]


@pytest.mark.parametrize(("rows", "size", "op"), SHAPES)
def test_reductions_of_all_shapes(rows, size, op):
    given = torch.randn(rows * size)
    check(reduction(op, rows, size), given)


@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins(op):
    given = torch.randn(6, 9)
    given[1, 3], given[4] = math.nan, math.nan
    given[5] = math.inf if op == "max" else -math.inf
    check(reduction(op, 6, 9), given.flatten())


def test_products():
    check(reduction("prod", 3, 5), torch.randn(15))


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_reductions_of_integers_and_doubles(op):
    check(reduction(op, 7, 13, I64), torch.randint(-(2**62), 2**62, (91,)))
    check(reduction(op, 7, 13, F64), torch.randn(91, dtype=F64))


def test_low_precision_is_summed_in_float32():
    given = (torch.randn(3, 2000) + 4).to(BF16)
    check(reduction("sum", 3, 2000, BF16, F32), given.flatten())


def test_sums_are_the_same_every_time():
    kernel, given = reduction("sum", 200, 40), torch.randn(8000)
    first, second = check(kernel, given), check(kernel, given)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_several_passes_over_rows_that_do_not_fit():
    """A softmax of long rows, with the sum over rows of what it gives, divided, in low precision."""
    rows, size = 2, 17001
    element = Address(at(size, 1))
    body = (
        Load(0, element, F32), Reduce("max", 0, F32), Compute("sub", (0, 1), F32), Compute("exp", (2,), F32),
        Reduce("sum", 3, F32), Compute("div", (3, 4), F32),
    )  # fmt: skip
    parameters = (
        Parameter("x", F32, False, rows * size), Parameter("y", F32, True, rows * size),
        Parameter("mean", BF16, True, size),
    )  # fmt: skip
    columns = (Column("sum", 2, Address(at(0, 1)), 5, BF16, False, rows),)
    kernel = KernelIR("kernel_0", (rows, size), 1, parameters, body, (Store(1, element, 5),), columns)
    check(kernel, torch.randn(rows * size))


@pytest.mark.parametrize("divisor", [1, 12])
def test_sums_over_rows_alone(divisor):
    """No reduction along rows: the rows' elements are cut among programs; a value that only the row has is stored."""
    rows, size = 90, 300
    element = Address(at(size, 1))
    body = (Load(0, element, F32), Load(1, Address(at(1)), F32), Compute("mul", (0, 1), F32), Compute("neg", (1,), F32))
    parameters = (
        Parameter("x", F32, False, rows * size), Parameter("w", F32, False, rows),
        Parameter("y", F32, True, rows * size), Parameter("n", F32, True, rows), Parameter("c", F32, True, size),
    )  # fmt: skip
    stores = (Store(2, element, 2), Store(3, Address(at(1)), 3))
    columns = (Column("sum", 4, Address(at(0, 1)), 2, F32, False, divisor),)
    check(
        KernelIR("k", (rows, size), 1, parameters, body, stores, columns), torch.randn(rows * size), torch.randn(rows)
    )


def test_loops_of_many_dimensions():
    """Two loops of rows and two of elements, each read in another order, the sum stored transposed."""
    a, b, c, d = 3, 4, 5, 6
    read = Address(at(5 * 6 * 4, 6, 24, 1))  # (a, c, b, d)
    mean = Address(at(0, 0, 1, 5))
    body = (Load(0, read, F32), Reduce("sum", 0, F32), Compute("sub", (0, 1), F32))
    parameters = (
        Parameter("x", F32, False, a * b * c * d), Parameter("y", F32, True, a * b * c * d),
        Parameter("t", F32, True, a * b), Parameter("s", F32, True, c * d),
    )  # fmt: skip
    stores = (Store(1, Address(at(120, 30, 6, 1)), 2), Store(2, Address(at(1, 3)), 1))
    columns = (Column("sum", 3, mean, 2, F32),)
    check(KernelIR("k", (a, b, c, d), 2, parameters, body, stores, columns), torch.randn(a * b * c * d))


def test_a_sum_over_rows_lies_in_an_order_that_nothing_else_has():
    rows, a, b = 4, 5, 6
    element = Address(at(a * b, b, 1))
    body = (Load(0, element, F32), Compute("neg", (0,), F32))
    parameters = (
        Parameter("x", F32, False, rows * a * b), Parameter("y", F32, True, rows * a * b),
        Parameter("s", F32, True, a * b),
    )  # fmt: skip
    columns = (Column("sum", 2, Address(at(0, 1, a)), 1, F32),)
    kernel = KernelIR("k", (rows, a, b), 1, parameters, body, (Store(1, element, 1),), columns)
    check(kernel, torch.randn(rows * a * b))


@pytest.mark.parametrize("sizes", [(63,), (4097,), (7, 9, 5)], ids=str)
def test_flat_kernels_decode_their_index(sizes):
    """Transposed reads, a broadcast operand, the index itself, and a sum of all."""
    total = math.prod(sizes)
    steps = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    backward = [math.prod(sizes[:d]) for d in range(len(sizes))]
    body = (
        Load(0, Address(at(*backward)), F32), Load(1, Address(Affine.of({len(sizes) - 1: 1})), F32),
        Compute("mul", (0, 1), F32), Position(at(*steps, start=-3)), Compute("cast", (3,), F32),
        Compute("add", (2, 4), F32),
    )  # fmt: skip
    parameters = (
        Parameter("x", F32, False, total), Parameter("w", F32, False, sizes[-1]), Parameter("y", F32, True, total),
        Parameter("i", I64, True, total), Parameter("s", F32, True, 1),
    )  # fmt: skip
    stores = (Store(2, Address(at(*steps)), 5), Store(3, Address(at(*steps)), 3))
    columns = (Column("sum", 4, Address(ZERO), 2, F32, True, total),)
    kernel = KernelIR("k", sizes, len(sizes) - 1, parameters, body, stores, columns)
    check(kernel, torch.randn(total), torch.randn(sizes[-1]))


def test_guarded_loads_read_nothing_outside():
    """Two inputs end to end, and a padding."""
    body = (
        Position(at(1)), Constant(5, I64), Compute("lt", (0, 1), BOOL), Load(0, Address(at(1)), F32, 2, math.inf),
        Compute("ge", (0, 1), BOOL), Load(1, Address(at(1, start=-5)), F32, 4, -2.5), Compute("where", (2, 3, 5), F32),
    )  # fmt: skip
    parameters = (
        Parameter("a", F32, False, 5), Parameter("b", F32, False, 4), Parameter("y", F32, True, 9),
        Parameter("z", F32, True, 9),
    )  # fmt: skip
    stores = (Store(2, Address(at(1)), 6), Store(3, Address(at(1)), 5))
    check(KernelIR("k", (9,), 0, parameters, body, stores, ()), torch.randn(5), torch.randn(4), exact=True)


def gather(rows: int, size: int) -> KernelIR:
    body = (
        Load(1, Address(at(1)), I64), Constant(11, I64), Compute("checked", (0, 1), I64),
        Load(0, Address(at(0, 1), ((2, size, 11),)), F32),
    )  # fmt: skip
    parameters = (
        Parameter("table", F32, False, 11 * size), Parameter("index", I64, False, rows),
        Parameter("y", F32, True, rows * size),
    )  # fmt: skip
    return KernelIR("k", (rows, size), 1, parameters, body, (Store(2, Address(at(size, 1)), 3),), ())


def test_indirect_loads_count_negative_indices_from_the_end():
    index = torch.tensor([0, 10, -1, -11, 3])
    check(gather(5, 7), torch.randn(77), index, exact=True)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a failed assertion on a device ends the process's use of it")
@pytest.mark.parametrize("bad", [11, -12])
def test_an_index_out_of_range_is_an_error(bad):
    buffers = [torch.randn(77), torch.tensor([0, bad, 1]), torch.empty(21)]
    with pytest.raises(IndexError, match="out of range"):
        triton_launch(render_triton(gather(3, 7)))(buffers)


def draw(rows: int, size: int, flat: bool = True) -> KernelIR:
    element = at(size, 1)
    body: tuple = (
        Load(0, Address(ZERO), I64), Load(0, Address(Affine((), 1)), I64), Position(element),
        Compute("philox", (0, 1, 2), F32),
    )  # fmt: skip
    parameters = (Parameter("state", I64, False, 2), Parameter("y", F32, True, rows * size))
    stores = (Store(1, Address(element), 3),)
    if not flat:
        body = (*body, Reduce("sum", 3, F32))
        parameters = (*parameters, Parameter("total", F32, True, rows))
        stores = (*stores, Store(2, Address(at(1)), 4))
    return KernelIR("k", (rows, size), 1, parameters, body, stores, ())


@pytest.mark.parametrize(
    ("state", "size", "flat"),
    crossed([(7, 0), (-(2**62) - 12345, 2**40 + 3)], [63, 64, 3, 4100], [True, False], one_in=3),
)
def test_draws_are_the_same_bit_for_bit(state, size, flat):
    given = torch.tensor(state)
    rows = 5 if size < 100 else 2  # a long row is several blocks by itself, and the interpreter slow
    got = check(draw(rows, size, flat), given)[0]
    words = torch.stack(philox_words(given, 0, 0, -(-rows * size // 4), torch.device("cpu")), 1)
    words = words.flatten()[: rows * size]
    assert torch.equal(got.cpu(), (words >> 8).to(F32) * 2.0**-24)


@pytest.mark.parametrize("size", [512, 520, 129])
def test_draws_of_rows_that_are_cut_among_programs(size):
    """As a bias's gradient after a dropout: no reduction along rows, sums over them."""
    kernel = draw(5, size, True)
    columns = (Column("sum", 2, Address(at(0, 1)), 3, F32),)
    parameters = (*kernel.parameters, Parameter("sums", F32, True, size))
    check(replace(kernel, parameters=parameters, columns=columns), torch.tensor((7, 3)))
