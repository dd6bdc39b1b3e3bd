"""Sizes that are known at a call alone, as polynomials of its symbols: what kernels for all sizes are planned with.

A polynomial takes the place of an integer. Sums and products are polynomials, too. A comparison is answered from the
ranges of the symbols where these decide it. Else it is answered by the sizes of the call that was traced (the hint),
and that answer is an assumption: a guard, which another call has to meet. So what was decided holds for every call that
the guards let pass. What neither can answer raises `UndecidedError`: whether two sizes are equal that only happen to
be, or what an integer is that has to be a number here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from aottrain.errors import CompilerError

Monomial = tuple[str, ...]  # the symbols that are multiplied, sorted
Terms = tuple[tuple[Monomial, int], ...]  # with their coefficients, which are not 0; sorted
_NUMBER: Monomial = ()
# Of a symbol in the text of a polynomial, so that it is no other name of generated code.
PREFIX = "size_"


class UndecidedError(CompilerError):
    """What is asked of a size has another answer in each call."""


@dataclass(eq=False)
class SizeFacts:
    """What is known of the symbols, and what was assumed about them. Two are never equal."""

    hints: Mapping[str, int]
    """The value of each symbol in the call that was traced."""
    ranges: Mapping[str, tuple[int, int | None]]
    """Least and greatest value of each symbol; None where there is no greatest."""
    at_least: dict[Terms, int] = field(default_factory=dict)
    """Assumed of a polynomial without a number: that it is no less than this."""
    unequal: dict[Terms, None] = field(default_factory=dict)
    """Assumed of these polynomials: that they are not 0."""
    closed: bool = False
    """Whether guards have been made of what was assumed, so that nothing more may be."""

    def symbol(self, name: str) -> Polynomial:
        return Polynomial((((name,), 1),), self)

    def is_negative(self, terms: Terms) -> bool:
        """Whether a polynomial is below 0: proven, or assumed."""
        if _least(terms, self) >= 0:
            return False
        if _least(_scaled(terms, -1), self) > 0:
            return True
        negative = _value(terms, self.hints) < 0
        self._assume(_plus(_scaled(terms, -1), -1) if negative else terms)
        return negative

    def is_zero(self, terms: Terms) -> bool:
        """Whether a polynomial that has symbols is 0; never where that is not so in the call that was traced."""
        if _least(terms, self) > 0 or _least(_scaled(terms, -1), self) > 0 or terms in self.unequal:
            return False
        number = dict(terms).get(_NUMBER, 0)
        if number % math.gcd(*(c for monomial, c in terms if monomial)):
            return False
        if _value(terms, self.hints) == 0 or self.closed:
            raise UndecidedError(f"whether {_text(terms)} is 0 depends on the sizes of a call")
        self.unequal[terms] = None
        return False

    def _assume(self, terms: Terms) -> None:
        """That a polynomial is not below 0."""
        if self.closed:
            raise UndecidedError(f"whether {_text(terms)} is negative depends on the sizes of a call")
        moving, number = _parted(terms)
        self.at_least[moving] = max(-number, self.at_least.get(moving, -number))

    def conditions(self, symbols: Mapping[str, Any]) -> Iterator[Any]:
        """What was assumed, as truth values of the symbols that are given (`torch.SymInt`, or numbers)."""
        for terms, least in self.at_least.items():
            yield _value(terms, symbols) >= least
        for terms in self.unequal:
            yield _value(terms, symbols) != 0


class Polynomial:
    """An integer that follows from a call's sizes. Its operations give an `int` where no symbol is left."""

    __slots__ = ("_hash", "facts", "terms")

    def __init__(self, terms: Terms, facts: SizeFacts):
        self.terms, self.facts, self._hash = terms, facts, hash(terms)

    @property
    def hint(self) -> int:
        """Its value in the call that was traced."""
        return _value(self.terms, self.facts.hints)

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset(name for monomial, _ in self.terms for name in monomial)

    def at(self, values: Mapping[str, Any]) -> Any:
        """Its value where the symbols have these."""
        return _value(self.terms, values)

    def __add__(self, other: Any) -> Any:
        terms = _terms(other)
        return NotImplemented if terms is None else self._made(_sum(self.terms, terms))

    def __mul__(self, other: Any) -> Any:
        terms = _terms(other)
        return NotImplemented if terms is None else self._made(_product(self.terms, terms))

    def __pow__(self, exponent: Any) -> Any:
        if not isinstance(exponent, int) or exponent < 0:
            return NotImplemented
        return math.prod([self] * exponent)

    def __neg__(self) -> Any:
        return self._made(_scaled(self.terms, -1))

    def __sub__(self, other: Any) -> Any:
        return self + -1 * other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    __radd__, __rmul__ = __add__, __mul__

    def __abs__(self) -> Any:
        return -self if self < 0 else self

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        terms = _terms(other)
        found = None if terms is None else _divided(self.terms, terms)
        if found is not None:
            quotient, number = self._made(found[0]), found[1]
            if number == 0 or (number > 0 and bool(other > number)):
                return quotient, number
        if terms is not None and self >= 0 and other > self:
            return 0, self
        raise UndecidedError(f"{self} divided by {other} is no polynomial")

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        if other >= 0 and self > other:
            return 0, other
        raise UndecidedError(f"{other} divided by {self} is no number")

    def __floordiv__(self, other: Any) -> Any:
        return divmod(self, other)[0]

    def __rfloordiv__(self, other: Any) -> Any:
        return divmod(other, self)[0]

    def __mod__(self, other: Any) -> Any:
        return divmod(self, other)[1]

    def __rmod__(self, other: Any) -> Any:
        return divmod(other, self)[1]

    def __lt__(self, other: Any) -> bool:
        return _is_negative(self - other)

    def __gt__(self, other: Any) -> bool:
        return _is_negative(other - self)

    def __le__(self, other: Any) -> bool:
        return not _is_negative(other - self)

    def __ge__(self, other: Any) -> bool:
        return not _is_negative(self - other)

    def __eq__(self, other: object) -> bool:
        if _terms(other) is None:
            return NotImplemented
        return not (self - other)

    def __bool__(self) -> bool:
        return not self.facts.is_zero(self.terms)

    def __hash__(self) -> int:
        return self._hash

    def __index__(self) -> int:
        raise UndecidedError(f"{self} has to be a number")

    __int__ = __float__ = __index__

    def __truediv__(self, other: Any) -> float:
        raise UndecidedError(f"{self} divided by {other} is no number")

    __rtruediv__ = __rpow__ = __truediv__

    def __str__(self) -> str:
        return f"({_text(self.terms, PREFIX)})"

    __repr__ = __str__

    def _made(self, terms: Terms) -> Any:
        moving, number = _parted(terms)
        return Polynomial(terms, self.facts) if moving else number


def same(a: Any, b: Any) -> bool:
    """Whether two integers are equal in every call. False where they only may be: nothing is assumed."""
    if isinstance(a, Polynomial) and isinstance(b, Polynomial):
        return a.terms == b.terms
    return not isinstance(a, Polynomial) and not isinstance(b, Polynomial) and a == b


def likely(value: Any) -> Any:
    """An integer as the call that was traced has it, or inside `sizes_at` that call: for choices that are right
    whatever it is."""
    if not isinstance(value, Polynomial):
        return value
    values = current_values()
    # Numbers that a kernel derives from sizes are symbols of its own, with the value that they had when it was made.
    return value.hint if values is None else value.at({**value.facts.hints, **values})


def is_open(*values: Any) -> bool:
    """Whether any of the integers is known at a call alone."""
    return any(isinstance(value, Polynomial) for value in values)


_FACTS: ContextVar[SizeFacts | None] = ContextVar("facts", default=None)


def within(facts: SizeFacts | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called inside `open_sizes`."""
    if facts is None:
        return function

    def run(*args: Any, **options: Any) -> Any:
        with open_sizes(facts):
            return function(*args, **options)

    return run


@contextmanager
def open_sizes(facts: SizeFacts | None) -> Iterator[None]:
    """While kernels are planned for all sizes, the symbolic sizes of specs are polynomials with these facts."""
    token = _FACTS.set(facts)
    try:
        yield
    finally:
        _FACTS.reset(token)


def current_facts() -> SizeFacts | None:
    """Those of `open_sizes`; None where kernels are for fixed sizes alone."""
    return _FACTS.get()


class SizeValues(dict[str, int]):
    """What each symbol is in one call; two are never equal."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


_VALUES: ContextVar[SizeValues | None] = ContextVar("values", default=None)


@contextmanager
def sizes_at(values: Mapping[str, int]) -> Iterator[None]:
    """Inside, but not within `open_sizes`, the symbolic sizes of specs are the numbers that they are in such a call."""
    token = _VALUES.set(SizeValues(values))
    try:
        yield
    finally:
        _VALUES.reset(token)


def current_values() -> SizeValues | None:
    """Those of `sizes_at`; None: the call that was traced."""
    return _VALUES.get()


def _is_negative(value: Any) -> bool:
    return value.facts.is_negative(value.terms) if isinstance(value, Polynomial) else value < 0


def _terms(value: Any) -> Terms | None:
    if isinstance(value, Polynomial):
        return value.terms
    if isinstance(value, int):
        return ((_NUMBER, int(value)),) if value else ()
    return None


def _parted(terms: Terms) -> tuple[Terms, int]:
    """Without the number, and that number. It comes first."""
    if terms and not terms[0][0]:
        return terms[1:], terms[0][1]
    return terms, 0


def _of(terms: Mapping[Monomial, int]) -> Terms:
    return tuple(sorted((monomial, c) for monomial, c in terms.items() if c))


def _sum(a: Terms, b: Terms) -> Terms:
    total = dict(a)
    for monomial, c in b:
        total[monomial] = total.get(monomial, 0) + c
    return _of(total)


def _product(a: Terms, b: Terms) -> Terms:
    total: dict[Monomial, int] = {}
    for (one, c), (other, d) in product(a, b):
        monomial = tuple(sorted(one + other))
        total[monomial] = total.get(monomial, 0) + c * d
    return _of(total)


def _scaled(terms: Terms, factor: int) -> Terms:
    return tuple((monomial, c * factor) for monomial, c in terms)


def _plus(terms: Terms, number: int) -> Terms:
    return _sum(terms, ((_NUMBER, number),))


def _value(terms: Terms, values: Mapping[str, Any]) -> Any:
    return sum(c * math.prod(values[name] for name in monomial) for monomial, c in terms)


def _divided(a: Terms, b: Terms) -> tuple[Terms, int] | None:
    """Quotient and rest of a division; None where they are no polynomial and no number. Term by term, the highest first
    (Cox, Little and O'Shea, Ideals, Varieties, and Algorithms, 2.3)."""
    if not b:
        return None
    divisor, factor = max(b, key=_order)
    quotient: Terms = ()
    while _parted(a)[0]:
        monomial, c = max(a, key=_order)
        left = list(monomial)
        for name in divisor:
            if name not in left:
                return None
            left.remove(name)
        if c % factor:
            return None
        part = ((tuple(left), c // factor),)
        quotient, a = _sum(quotient, part), _sum(a, _scaled(_product(b, part), -1))
    rest = _parted(a)[1]
    if not divisor:  # by a number: floor
        quotient, rest = _plus(quotient, rest // factor), rest % factor
    return quotient, rest


def _order(term: tuple[Monomial, int]) -> tuple[int, Monomial]:
    """By degree; then a product with any term keeps the order."""
    names = term[0]
    return len(names), names


def _least(terms: Terms, facts: SizeFacts) -> float:
    """What a polynomial is never below, by the ranges of its symbols and by what is assumed; minus infinity for
    nothing that is known.

    With each symbol as its least value and what it has beyond that, a polynomial without negative coefficients is least
    where nothing is beyond. Else each term has its own bound.
    """
    moving, number = _parted(terms)
    known: float = facts.at_least.get(moving, -math.inf) + number
    shifted: Terms = ()
    for monomial, c in terms:
        part: Terms = ((_NUMBER, c),)
        for name in monomial:
            part = _product(part, _sum(((_NUMBER, facts.ranges[name][0]),), (((name,), 1),)))
        shifted = _sum(shifted, part)
    beyond, least = _parted(shifted)
    if all(c > 0 for _, c in beyond):
        return max(known, least)
    return max(known, sum(_term_least(monomial, c, facts) for monomial, c in terms))


def _term_least(monomial: Monomial, c: int, facts: SizeFacts) -> float:
    least = float(c)
    for name in monomial:
        bound = facts.ranges[name][0 if c > 0 else 1]
        if bound is None or facts.ranges[name][0] < 0:
            return -math.inf
        least *= bound
    return least


def _text(terms: Terms, prefix: str = "") -> str:
    parts = []
    for monomial, c in reversed(terms):
        names = [prefix + name for name in monomial]
        parts.append(" * ".join(names if c == 1 and names else [str(c), *names]))
    return " + ".join(parts) or "0"
