"""Polynomials of sizes: their arithmetic, what is proven of them, and what is assumed."""

from __future__ import annotations

import itertools

import pytest

from aottrain.ir.sizes.polynomials import Polynomial, SizeFacts, UndecidedError, likely, same


def facts(**hints: int) -> SizeFacts:
    return SizeFacts(hints, {name: (2, None) for name in hints})


def test_arithmetic_is_that_of_numbers_at_every_size() -> None:
    known = facts(a=3, b=5)
    a, b = known.symbol("a"), known.symbol("b")
    made = [a + 2 * b - 1, (a - b) * (a + b), a * a * b // a, (6 * a * b + 4) // 6, (6 * a * b + 4) % 6, 3 - a, a**2]
    for x, y in itertools.product(range(2, 9), repeat=2):
        values = {"a": x, "b": y}
        numbers = [p.at(values) if isinstance(p, Polynomial) else p for p in made]
        assert numbers == [x + 2 * y - 1, x * x - y * y, x * y, x * y, 4, 3 - x, x * x]
    assert a - a == 0 and type(a - a) is int
    assert (a * a - 4) // (a - 2) is not None and ((a * a - 4) // (a - 2)).terms == (a + 2).terms
    assert likely(a * b) == 15 and same(a * b, b * a) and not same(a, b)


def test_what_the_ranges_prove_is_not_assumed() -> None:
    known = facts(a=3, b=5)
    a, b = known.symbol("a"), known.symbol("b")
    assert a > 1 and a * b > a and a * b * 4 >= 16 and a != 1 and a != 0 and 2 * a != 7 and a * b - a >= 2
    assert not (a < 2 or a * b <= b or a == a + 1)
    assert not known.at_least and not known.unequal


@pytest.mark.parametrize("other", [4, 7])
def test_what_they_do_not_prove_is_a_condition_that_another_size_may_not_meet(other: int) -> None:
    known = facts(a=3)
    a = known.symbol("a")
    assert a < 6 and a + 1 < 7 and a != 4
    assert list(known.conditions({"a": 3})) == [True, True]
    assert all(known.conditions({"a": other})) is False
    assert all(known.conditions({"a": 5}))


def test_what_happens_to_be_so_is_undecided() -> None:
    known = facts(a=3, b=3)
    a, b = known.symbol("a"), known.symbol("b")
    for question in (lambda: a == b, lambda: a == 3, lambda: range(a), lambda: a // 2, lambda: 1 / a, lambda: int(a)):
        with pytest.raises(UndecidedError):
            question()
    known.closed = True
    with pytest.raises(UndecidedError):
        bool(a < 100)
