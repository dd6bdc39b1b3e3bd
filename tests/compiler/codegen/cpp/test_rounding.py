"""Values of low precision in generated C++: rounded where they are computed, and not once more where they are kept."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.compiler.codegen.cpp.render import render_cpp
from aottrain.compiler.codegen.cpp.text import holds, literal, to_stored
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import Address, Compute, Constant, Load
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import leaf
from tests.compiler.schedule.test_scheduling import schedules

BF16, F32 = torch.bfloat16, torch.float32


def code(function, *args) -> str:
    """Of the forward."""
    return "".join(render_cpp(call.kernel) for call in schedules(function, *args)[0].kernels)


def test_what_is_computed_is_rounded_once():
    text = code(lambda x: x.exp(), leaf(64).detach().bfloat16().requires_grad_())
    assert text.count("round_bf16(") == 1 and text.count("= upper_bf16(") == 1 and "= to_bf16(" not in text


def test_what_is_chosen_is_not_rounded():
    x = leaf(8, 16).detach().bfloat16().requires_grad_()
    text = code(lambda x: torch.cat([x, x[:, :4]], 1), x)
    assert "round_bf16(" not in text and "= upper_bf16(" in text


def test_numbers_of_the_program_are_rounded():
    place = Address(Affine.of({}, 0))
    assert literal(0.1, BF16) == "0.10009765625f" and literal(0.1, F32) == "0.10000000149011612f"
    assert holds(Constant(0.1, BF16), BF16) and not holds(Constant(0.1, F32), BF16) and holds(Constant(0.5, F32), BF16)
    assert holds(Constant(math.nan, BF16), BF16) and not holds(Constant(math.nan, F32), BF16)
    assert holds(Load(0, place, BF16), BF16) and not holds(Load(0, place, F32), BF16)
    assert holds(Load(0, place, BF16, guard=1, other=0.1), BF16)
    assert not holds(Compute("add", (0, 1), F32), BF16) and holds(Compute("add", (0, 1), BF16), BF16)
    assert to_stored(F32, "v0", Constant(0.1, F32)) == "v0" and to_stored(BF16, "v0") == "to_bf16(v0)"


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_eager(dtype):
    """With fillings that the type does not hold, infinities, NaN, and numbers below the smallest normal one."""

    def function(x):
        padded = F.pad(x, (1, 2), value=0.1)
        chosen = torch.where(padded > 0, padded, 0.3)
        return (
            padded,
            chosen,
            torch.cat([x, -x], 1),
            x.abs(),
            torch.maximum(x, x.flip(0)),
            x.clamp(min=0.7),
            x[2:4].sum(0),
        )

    torch.manual_seed(0)
    x = torch.randn(64, 1024).to(dtype)
    x[0, :6] = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e-40, -65504.0]).to(dtype)
    call = aottrain.compile(function, capture="trace", kernel="cpp", on_unsupported="error")
    for ours, theirs in zip(call(x), function(x), strict=True):
        same = ours.view(torch.int16) == theirs.view(torch.int16)
        assert (same | (ours.isnan() & theirs.isnan())).all()


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
def test_each_number_of_float16_is_read_and_made_as_by_eager():
    """All of them, and float32 numbers beside each, beside what lies between two, and beyond the largest."""
    halves = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    bits = halves.float().view(torch.int32)[:, None] + torch.tensor([0, 1, -1, 0xFFF, 0x1000, 0x1001, 0x1FFF])
    numbers = torch.cat([bits.int().view(torch.float32).flatten(), torch.tensor([65519.9, 65520.0, 1e30, 2e-8, 3e-8])])
    read = aottrain.compile(lambda x: x.float().neg(), capture="trace", kernel="cpp", on_unsupported="error")
    made = aottrain.compile(lambda x: x.half().neg(), capture="trace", kernel="cpp", on_unsupported="error")
    for got, known in ((read(halves), halves.float().neg()), (made(numbers), numbers.half().neg())):
        whole = torch.int32 if known.dtype is torch.float32 else torch.int16
        is_nan = known.isnan()
        assert got.isnan().equal(is_nan)
        assert got.view(whole)[~is_nan].equal(known.view(whole)[~is_nan])
