"""The ranges in which eager wants the arguments of random operators, which have no part in how we draw."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def check_number(holds: bool, message: str) -> None:
    """Of an argument that is the same in each call of a program; one that cannot be traced runs eagerly."""
    if not holds:
        raise RuntimeError(message)


def check_values(flag: Tensor, message: str) -> None:
    """Part of the program: it raises a RuntimeError in each call in which the flag is False."""
    aten._assert_async.msg(flag, message)


def check_integers(low: int, high: int, dtype: torch.dtype) -> None:
    """Of draws in [low, high) that a tensor of this type is to hold."""
    check_number(low < high, f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    if dtype == torch.bool:
        least, most = 0, 1
    else:
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        least, most = int(limits.min), int(limits.max)
    check_number(least <= low and high - 1 <= most, f"random_ expects {low}..{high} to lie within {dtype}")
