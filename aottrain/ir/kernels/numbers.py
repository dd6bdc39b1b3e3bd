"""What a type holds of a number that a program writes down."""

from __future__ import annotations

import torch

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Types in which no arithmetic is done: it is done in float32 and rounded."""
# The type whose lowest bits eager takes of a floating-point number that the type itself does not hold.
BY_WAY_OF = {torch.int16: torch.int32, torch.int8: torch.int32, torch.uint8: torch.int64}


def held(value: float | int | bool, dtype: torch.dtype) -> float | int | bool:
    """A number as a tensor of this type has it: bfloat16's 0.1 is 0.10009765625. A constant's text, what a cast makes
    of one and what a rule decides by one all ask here, for each number has one value in eager."""
    if dtype is torch.bool:
        return bool(value)
    if not dtype.is_floating_point:
        return int(value)
    number = float(value)
    return number if dtype is torch.float64 else torch.tensor(number, dtype=dtype).item()


def fits(value: float | int | bool, dtype: torch.dtype) -> bool:
    """Whether eager fills a tensor of this type with the number: it refuses 200 for int8 and 70000 for float16."""
    try:
        torch.full((2,), value, dtype=dtype, device="cpu")  # a single half may become infinite
    except (RuntimeError, OverflowError):
        return False
    return True
