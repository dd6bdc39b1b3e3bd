"""Numbers that a tensor's type does not have: eager refuses to fill it with them, and so does a compiled program."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.toolchain.native import find_compiler
from tests.skips import NO_COMPILER

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER),
    pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly"),
]
PROGRAMS = {
    "int8 200": lambda x: torch.full_like(x, 200, dtype=torch.int8).long() + x.long(),
    "uint8 300": lambda x: torch.full_like(x, 300, dtype=torch.uint8).long() + x.long(),
    "int32 inf": lambda x: x.int().masked_fill(x > 0, float("inf")) + 1,
    "float16 70000": lambda x: torch.full_like(x, 70000.0, dtype=torch.float16).float() + x,
    "float32 1e39": lambda x: torch.full_like(x, 1e39) + x,
    "new_full": lambda x: x.half().new_full((3,), 1e5) * 2,
    "fill_": lambda x: x.half().clone().fill_(-1e5).float() + x,
    "masked_fill": lambda x: x.half().masked_fill(x > 0, -1e9).float() + x,
    "pad": lambda x: F.pad(x.half(), (1, 1), value=1e5).float() * 2,
    "clamp": lambda x: x.half().clamp(max=1e5).float() + x,
    "alpha": lambda x: torch.add(x.half(), x.half(), alpha=1e5).float() + x,
    "value": lambda x: torch.addcmul(x, x, x, value=1e39) + x,
}
ACCEPTED = {
    "uint8 -1": lambda x: torch.full_like(x, -1, dtype=torch.uint8).long() + x.long(),
    "float16 inf": lambda x: torch.full_like(x, float("inf"), dtype=torch.float16).float() + x,
    "float16 times 70000": lambda x: (x.half() * 70000.0).float() + x,
    "float16 where": lambda x: torch.where(x > 0, x.half(), -1e9).float() + x,
    "int8 plus 200": lambda x: x.to(torch.int8) + 200,
    "int8 equal to 200": lambda x: (x.to(torch.int8) - 56 == 200).float() + x,
}


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_is_refused_as_in_eager(name, capture):
    x = torch.arange(-4.0, 4.0)
    with pytest.raises((RuntimeError, OverflowError)) as wanted:
        PROGRAMS[name](x)
    with pytest.raises(type(wanted.value)) as got:
        aottrain.compile(PROGRAMS[name], kernel="cpp", capture=capture)(x)
    assert str(got.value).partition("\n")[0] == str(wanted.value).partition("\n")[0]


@pytest.mark.parametrize("name", ACCEPTED)
def test_other_numbers_are_what_eager_makes_of_them(name):
    x = torch.arange(-4.0, 4.0)
    got = aottrain.compile(ACCEPTED[name], kernel="cpp", capture="trace")(x)
    torch.testing.assert_close(got, ACCEPTED[name](x), rtol=0, atol=0)
