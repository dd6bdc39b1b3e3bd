"""own_product: by tiles of bfloat16, or by the same sums in plain C++ where the processor has no tiles."""

from __future__ import annotations

import pytest
import torch

from aottrain.ir.kernels import tiles
from aottrain.ir.kernels.tiles import product_scratch_bytes
from aottrain.ir.settings.decisions import OWN
from aottrain.ops.losses import loss_head
from aottrain.ops.products import pieces
from aottrain.ops.products.pieces import own_biased_product, own_product
from aottrain.toolchain.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

# Of |left| |right|. A sum of n float32 terms is off by some of its own roundings, of 2^-24 each; of numbers that are
# independent about log2(n) of them (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 4.2), for
# which this has room to n = 2^12. Two pieces leave out three products of at most 2^-17.
TOLERANCE = {"highest": 12 * 2**-24, "high": 3 * 2**-17}
SIZES = [(40, 50, 70), (33, 64, 31), (128, 100, 96), (1, 1, 1), (70, 33, 52)]
# More than one part of everything that is packed at a time.
LARGE = (tiles.TALL + 9, tiles.DEEP + 40, tiles.WIDE + 33)


@pytest.fixture(params=TOLERANCE)
def precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def matrix(rows, columns, transposed=False):
    return torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)


def assert_product(got, left, right, beside, precision):
    exact = left.double() @ right.double() + beside.double()
    scale = left.double().abs() @ right.double().abs() + beside.double().abs()
    assert got.dtype is torch.float32
    assert ((got.double() - exact).abs() <= TOLERANCE[precision] * scale + 1e-37).all()


@pytest.mark.parametrize("right_transposed", [False, True])
@pytest.mark.parametrize("left_transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_size_and_layout(sizes, left_transposed, right_transposed, precision):
    rows, terms, columns = sizes
    left, right = matrix(rows, terms, left_transposed), matrix(terms, columns, right_transposed)
    bias, into = torch.randn(columns), torch.randn(rows, columns)
    assert_product(own_product(left, right), left, right, torch.zeros(()), precision)
    assert_product(own_biased_product(bias, left, right), left, right, bias, precision)
    before = into.clone()
    assert own_product(left, right, out=into, adds=True) is into
    assert_product(into, left, right, before, precision)


def assert_order_of_terms_alone(got, left, right, bias):
    """The order of sums hangs neither on the threads nor on the other rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert torch.equal(own_product(left, right, bias), got)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(own_product(left[5:20], right, bias), got[5:20])


def test_more_than_is_packed_at_a_time(precision):
    if not pieces.has_tiles():
        rows, terms, columns = 34, tiles.DEEP + 40, 20  # plain loops take long
    else:
        rows, terms, columns = LARGE
    left, right, bias = matrix(rows, terms), matrix(terms, columns, True), torch.randn(columns)
    got = own_product(left, right, bias)
    assert_product(got, left, right, bias, precision)
    assert_order_of_terms_alone(got, left, right, bias)


def test_parts_of_larger_matrices_and_memory_of_the_caller(precision):
    left, right = torch.randn(50, 200)[:, 60:100], torch.randn(200, 40)[::5]
    out = torch.full((50, 64), 7.0)
    scratch = torch.empty(product_scratch_bytes(50, 40, 40, torch.get_num_threads()), dtype=torch.uint8)
    got = own_product(left, right, out=out[:, 10:50], scratch=scratch)
    assert_product(got, left, right, torch.zeros(()), precision)
    assert (out[:, :10] == 7).all() and (out[:, 50:] == 7).all()
    assert_product(own_product(left[:, ::2], right[::2]), left[:, ::2], right[::2], torch.zeros(()), precision)


def assert_rounded_once(got, left, right, beside=0.0):
    """Of bfloat16 numbers: as far off as float32 sums and one rounding to the result's type are."""
    exact = left.double() @ right.double() + beside
    sums = TOLERANCE["highest"] * (left.double().abs() @ right.double().abs() + abs(beside))
    rounding = exact.abs() * (2**-8 if got.dtype == torch.bfloat16 else 0)
    assert ((got.double() - exact).abs() <= rounding + sums * 1.01 + 1e-37).all()


@pytest.mark.parametrize("right_transposed", [False, True])
@pytest.mark.parametrize("left_transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bfloat16_of_any_size_and_layout(sizes, left_transposed, right_transposed):
    rows, terms, columns = sizes
    left = matrix(rows, terms, left_transposed).bfloat16()
    right = matrix(terms, columns, right_transposed).bfloat16()
    bias, into = torch.randn(columns).bfloat16(), torch.randn(rows, columns)
    got = own_product(left, right)
    assert got.dtype == torch.bfloat16
    assert_rounded_once(got, left, right)
    assert_rounded_once(own_biased_product(bias, left, right), left, right, bias.double())
    before = into.clone()
    own_product(left, right, out=into, adds=True)
    assert_rounded_once(into, left, right, before.double())
    assert_rounded_once(own_product(left, right, out=torch.empty(rows, columns)), left, right)


@pytest.mark.parametrize("left_transposed", [False, True])
def test_more_of_bfloat16_than_is_packed_at_a_time(left_transposed):
    """Sums that do not end in one pass go on in float32."""
    rows, terms, columns = (
        (tiles.TALL + 9, tiles.DEEPER + 40, tiles.WIDE + 33) if pieces.has_tiles() else (34, 2100, 20)
    )
    left, right = matrix(rows, terms, left_transposed).bfloat16(), matrix(terms, columns, True).bfloat16()
    bias, out = torch.randn(columns).bfloat16(), torch.full((rows, columns + 8), 7.0).bfloat16()
    threads = torch.get_num_threads()
    num_bytes = product_scratch_bytes(rows, terms, columns, threads, 1, narrow=True)
    memory = torch.full((num_bytes + 4096,), 7, dtype=torch.uint8)
    got = own_product(left, right, bias, out=out[:, 4:-4], scratch=memory[:num_bytes])
    assert_rounded_once(got, left, right, bias.double())
    assert (out[:, :4] == 7).all() and (out[:, -4:] == 7).all() and (memory[num_bytes:] == 7).all()
    assert_order_of_terms_alone(got, left, right, bias)


def test_few_terms_and_many_columns_of_bfloat16():
    rows, terms, columns = 70, 40, 4 * tiles.WIDE + 33 if pieces.has_tiles() else 90
    left, right = matrix(rows, terms).bfloat16(), matrix(terms, columns).bfloat16()
    assert_rounded_once(own_product(left, right), left, right)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3.3e38])
def test_bfloat16_that_is_not_finite(value):
    left, right = torch.rand(40, 50).bfloat16(), torch.rand(50, 60).bfloat16()
    left[30, 7] = value
    expected = (left.float() @ right.float()).bfloat16()
    torch.testing.assert_close(own_product(left, right), expected, equal_nan=True)


@pytest.mark.parametrize("rows", [96, 40, 300])
@pytest.mark.parametrize("planned", [1, 2, 3, 5])
def test_memory_that_was_planned_for_another_number_of_threads(planned, rows):
    left, right, before = matrix(rows, 70), matrix(70, 64), torch.get_num_threads()
    num_bytes = product_scratch_bytes(rows, 70, 64, planned)
    memory = torch.full((num_bytes + 4096,), 7, dtype=torch.uint8)
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            got = own_product(left, right, scratch=memory[:num_bytes])
            assert_product(got, left, right, torch.zeros(()), "highest")
            assert (memory[num_bytes:] == 7).all()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3.4e38])
@pytest.mark.parametrize("where", ["left", "right"])
def test_what_is_not_finite_is_aten_s(value, where, adds, precision):
    """Infinity times a piece that is 0 would be NaN; what the largest numbers are rounded to is infinite, too."""
    left, right, into = torch.rand(40, 50), torch.rand(50, 60), torch.rand(40, 60)
    (left if where == "left" else right)[30, 7] = value
    expected = left @ right + into * adds
    got = own_product(left, right, out=into, adds=adds)
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mean", [0.5, 10.0])
def test_sums_of_many_terms_of_one_sign(mean):
    """Added one after the other they would be off by half as much again, or more."""
    torch.manual_seed(0)
    left, right = torch.rand(40, 1024) - 0.5 + mean, torch.rand(1024, 36) - 0.5 + mean
    exact = left.double() @ right.double()
    assert (own_product(left, right).double() - exact).norm() <= 1.4 * torch.finfo(torch.float32).eps * exact.norm()


def test_small_numbers(precision):
    """What no piece can hold is below the smallest normal number."""
    left, right = torch.randn(40, 50) * 1e-30, torch.randn(50, 60)
    exact, scale = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    assert ((own_product(left, right).double() - exact).abs() <= TOLERANCE[precision] * scale + 50 * 2**-125).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_head_s_products(monkeypatch, dtype):
    calls = []

    def product(*arguments, **memory):
        calls.append(memory.get("adds", False))
        return own_product(*arguments, **memory)

    monkeypatch.setattr(loss_head, "own_product", product)
    hidden, weight, target = torch.randn(70, 40).to(dtype), torch.randn(90, 40).to(dtype), torch.randint(0, 90, (70,))
    bias, rule = torch.randn(90).to(dtype), (1, -100, torch.float32, torch.float32, 32, [True] * 3)
    expected = torch.ops.aottrain.linear_cross_entropy(hidden, weight, bias, target, *rule)
    got = torch.ops.aottrain.linear_cross_entropy(hidden, weight, bias, target, *rule, OWN)
    # ATen rounds the weight's gradient of each chunk to bfloat16.
    tolerance = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-8 * float(expected[3].abs().max())}
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)
    assert calls == [False, False, False, False, False, True, False, False, True]
