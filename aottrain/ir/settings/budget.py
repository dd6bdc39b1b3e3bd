"""A memory budget as people write it: a fraction, a number of bytes, or `auto`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from aottrain.errors import BudgetError
from aottrain.ir.units import format_bytes

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]i?)?b\s*", re.IGNORECASE)
ALLOWED = 'a number from 0 to 1, bytes such as "6GiB", "800 MB" or "1000000B", or "auto"'

Budget = float | int | str


class Bytes(int):
    """A number of bytes that knows how a person wrote it."""

    text = ""


def parse_budget(value: Any) -> Budget:
    """A fraction as float, bytes as int, or "auto". Raises ValueError with what is allowed."""
    if isinstance(value, str):
        if value.strip().lower() == "auto":
            return "auto"
        match = _BYTES.fullmatch(value)
        if match is not None and len(match[1]) <= sys.float_info.max_10_exp - 12:
            budget = Bytes(float(match[1]) * _UNITS[(match[2] or "").lower()])
            budget.text = value.strip()
            return budget
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value <= 1.0:
        return float(value)
    raise ValueError(f"{value!r} is no budget; allowed: {ALLOWED}")


def bounds_bytes(budget: Budget | None) -> bool:
    """Whether it bounds the bytes of a step, written or by "auto", and is no fraction."""
    return isinstance(budget, str | int) and not isinstance(budget, bool)


def unmet(budget: Budget, lowest_bytes: int, lowest_of_kernels: int | None = None, sizes: str = "") -> BudgetError:
    """The refusal of a budget below the lowest peak."""
    text = f"the lowest peak that can be reached is {format_bytes(lowest_bytes)} ({lowest_bytes}B)"
    error = BudgetError(f"a budget of {budget_text(budget)} cannot be met: {text}{f', for {sizes}' if sizes else ''}")
    error.budget, error.sizes = budget, sizes
    error.lowest_bytes, error.lowest_of_kernels = lowest_bytes, lowest_of_kernels
    return error


def unmet_by_all(refusals: Sequence[BudgetError]) -> BudgetError:
    """The refusal of a budget that a program has no room in however it runs: op by op as the last of these says, as
    generated kernels as each of them does."""
    last = refusals[-1]
    peaks = [last.lowest_bytes, *(error.lowest_of_kernels for error in refusals)]
    return unmet(last.budget, min(peak for peak in peaks if peak is not None), sizes=last.sizes)


def budget_text(budget: Budget) -> str:
    """As the person wrote it: `0.4`, `6GiB`, `auto`; bytes that nobody wrote: `6.00 GiB`."""
    if isinstance(budget, str):
        return budget
    if isinstance(budget, Bytes) and budget.text:
        return budget.text
    return f"{budget:g}" if isinstance(budget, float) else format_bytes(budget)
