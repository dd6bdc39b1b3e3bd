"""What is proven never to fall as sizes grow, and what is not."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from aottrain.ir.sizes.expressions import SizeExpression
from aottrain.ir.sizes.rising import rises

LEAST = {"s": 2, "t": 3, "n": -10}


def expression(text: str) -> SizeExpression:
    return SizeExpression(text, tuple(name for name in LEAST if name in text))


@pytest.mark.parametrize(
    "text",
    ["s", "3 + 4*s*t", "8*((7 + s) // 8)", "max(1, s)", "min(s, t)", "s*s", "(-2) + s", "s*((-3) + t)", "(2*3)*s + n"],
)
def test_what_rises(text):
    size = expression(text)
    assert rises(size, LEAST)
    for name, other in product(size.names, (0, 5)):
        at = {each: least + other for each, least in LEAST.items()}
        values = [size.of({**at, name: LEAST[name] + step}) for step in range(40)]
        assert all(a <= b for a, b in pairwise(values))


@pytest.mark.parametrize(
    "text", ["400 + ((-1)*s)", "400*t + ((-1)*s*t)", "s % 8", "s // t", "s*((-3) + s)", "n*n", "(-1)*s*((-3) + s)"]
)
def test_what_may_fall_is_not_taken_to_rise(text):
    assert not rises(expression(text), LEAST)


def test_a_number_rises():
    assert rises(7, LEAST)
