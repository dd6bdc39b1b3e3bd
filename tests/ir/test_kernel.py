"""KernelIR: what verification refuses, how many passes a row needs, how it prints."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aottrain.compiler.codegen.evaluation import evaluate
from aottrain.compiler.codegen.row_passes import BEFORE, plan_passes
from aottrain.errors import VerificationError
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import (
    Address,
    Column,
    Compute,
    Constant,
    KernelIR,
    Level,
    Load,
    Parameter,
    Part,
    Position,
    Reduce,
    Store,
    is_natural,
    levels,
    stages,
)
from aottrain.ir.kernels.traffic import moved_bytes
from aottrain.ir.kernels.verify import verify_kernel

F32 = torch.float32
ELEMENT, ROW = Address(Affine(((0, 8), (1, 1)))), Address(Affine(((0, 1),)))


def softmax() -> KernelIR:
    """Of 4 rows of 8, with the sum over rows."""
    body = (
        Load(0, ELEMENT, F32), Reduce("max", 0, F32), Compute("sub", (0, 1), F32), Compute("exp", (2,), F32),
        Reduce("sum", 3, F32), Compute("div", (3, 4), F32),
    )  # fmt: skip
    parameters = (Parameter("x", F32, False, 32), Parameter("y", F32, True, 32), Parameter("s", F32, True, 8))
    column = Column("sum", 2, Address(Affine(((1, 1),))), 5, F32)
    return KernelIR("kernel_0", (4, 8), 1, parameters, body, (Store(1, ELEMENT, 5),), (column,))


def test_levels_and_stages_of_a_softmax():
    kernel = softmax()
    verify_kernel(kernel)
    assert levels(kernel) == [Level.ELEMENT, Level.ROW, Level.ELEMENT, Level.ELEMENT, Level.ROW, Level.ELEMENT]
    assert stages(kernel) == [0, 1, 1, 1, 2, 2]


def test_a_costly_value_is_held_for_the_next_pass_if_it_fits():
    kernel = softmax()
    held = plan_passes(kernel, can_hold=True)
    assert len(held.passes) == 3
    assert held.holds == {3: 1}
    assert 0 not in held.passes[2]
    again = plan_passes(kernel, can_hold=False)
    assert not again.holds
    assert {0, 2, 3} <= set(again.passes[2])
    assert BEFORE not in held.holds.values()


def test_bytes_count_each_element_once():
    kernel = softmax()
    assert moved_bytes(kernel) == (32 + 32 + 8) * 4
    twice = replace(kernel, body=(*kernel.body, Load(0, ELEMENT, F32)))
    assert moved_bytes(twice) == moved_bytes(kernel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"body": (Compute("neg", (0,), F32),)}, "not computed yet"),
        ({"ranges": (5, 8)}, "reaches 0..39 of the 32 elements"),
        ({"columns": (Column("sum", 2, ROW, 5, F32),)}, "address that depends on the row"),
        ({"stores": (Store(1, ROW, 5),)}, "stored once per row"),
        ({"stores": (Store(1, Address(Affine((), -1)), 1),)}, "reaches -1..-1"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(VerificationError, match=message):
        verify_kernel(replace(softmax(), **change))


def test_printed():
    text = str(softmax())
    assert text.startswith("kernel_0: 4 rows of 8\n")
    assert "v1: float32 row = max over the row of v0" in text
    assert "p2[i1] = sum over rows of v5" in text


def test_constants_that_compare_equal_may_differ():
    from aottrain.compiler.lowering import Builder

    builder = Builder()
    zero, negative = builder.constant(0.0, F32), builder.constant(-0.0, F32)
    assert zero != negative
    assert builder.constant(0.0, F32) == zero
    assert builder.body[zero] == Constant(0.0, F32)


def groups() -> KernelIR:
    """2 rows of 3 parts of 4, of which each is added up, and the row."""
    element = Address(Affine(((0, 12), (1, 4), (2, 1))))
    body = Load(0, element, F32), Reduce("sum", 0, F32), Compute("sub", (0, 1), F32)
    names = ("x", False, 24), ("y", True, 24), ("parts", True, 6)
    parameters = tuple(Parameter(name, F32, written, span) for name, written, span in names)
    part = Part(2, Address(Affine(((0, 3), (1, 1)))), 0, F32)
    return KernelIR("kernel_0", (2, 3, 4), 1, parameters, body, (Store(1, element, 2),), (), parts=(part,))


def test_a_sum_over_parts_of_rows():
    kernel, x = groups(), torch.arange(24.0)
    verify_kernel(kernel)
    assert kernel.num_kept == 2 and moved_bytes(kernel) == (24 + 24 + 6) * 4
    assert "p2[3*i0 + i1] = sum over i2 of v0" in str(kernel)
    y, sums = torch.zeros(24), torch.zeros(6)
    evaluate(kernel, [x, y, sums])
    rows = x.view(2, 12)
    assert torch.equal(sums, x.view(6, 4).sum(1)) and torch.equal(y.view(2, 12), rows - rows.sum(1, True))
    for loops in (((0, 12), (1, 4), (2, 1)), ((0, 3), (2, 1))):
        other = replace(kernel.parts[0], address=Address(Affine(loops)))
        with pytest.raises(VerificationError, match=r"sum over a part of a row"):
            verify_kernel(replace(kernel, parts=(other,)))
    into = replace(kernel.parts[0], buffer=0)
    with pytest.raises(VerificationError, match="written more than once"):
        verify_kernel(replace(kernel, parts=(into,)))


def test_what_is_never_negative():
    place, below = Position(Affine(((0, 1),))), Position(Affine(((0, 1),), -1))
    zero, two, minus = (Constant(value, torch.int64) for value in (0, 2, -2))
    address = Address(Affine(((0, 1),)))
    body = (
        place, below, zero, two, minus, Load(0, address, torch.int64),
        Compute("div", (0, 3), torch.int64), Compute("fmod", (1, 3), torch.int64), Compute("lt", (5, 2), torch.bool),
        Compute("where", (8, 3, 5), torch.int64), Compute("where", (8, 4, 5), torch.int64),
        Compute("checked", (9, 3), torch.int64), Compute("checked", (5, 3), torch.int64),
    )  # fmt: skip
    kernel = KernelIR("k", (4,), 0, (Parameter("x", torch.int64, False, 4),), body, (), ())
    assert [value for value in range(len(body)) if is_natural(kernel, value)] == [0, 2, 3, 6, 9, 11]


def test_what_is_read_and_written_moves_twice_and_what_is_looked_up_as_often_as_it_is():
    square = Address(Affine(((0, 1),)))
    body = (Load(0, square, F32), Compute("mul", (0, 0), F32))
    update = KernelIR("k", (64,), 0, (Parameter("x", F32, True, 64),), body, (Store(0, square, 1),), ())
    assert moved_bytes(update) == 2 * 64 * 4
    found = (Load(0, square, torch.int64), Load(1, Address(Affine(), ((0, 1, 1000),)), F32))
    parameters = (Parameter("i", torch.int64, False, 8), Parameter("t", F32, False, 1000), Parameter("y", F32, True, 8))
    assert moved_bytes(KernelIR("k", (8,), 0, parameters, found, (Store(2, square, 1),), ())) == 8 * (8 + 4 + 4)
