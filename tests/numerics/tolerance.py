"""How far a compiled result may be from eager, in one place. Almost all comparisons are bitwise and need none.

Bounds follow from arithmetic, not from one processor: eager adds in another order on each, and where it happens to be
exact on one, no other order of the same sum would be.
"""

from __future__ import annotations

import math

import torch

# (relative, absolute). Only for programs whose eager formula depends on values (eager's gradient of `prod` looks for
# zeros first), where the traced formula multiplies in another order: a few units in the last place, times the terms.
RTOL_ATOL = {
    torch.float64: (1e-12, 1e-12),  # 2^-52, some thousand operations
    torch.float32: (1e-5, 1e-6),  # 2^-23, some dozen operations
    torch.bfloat16: (2e-2, 2e-2),  # 2^-8, one rounding more or less
    torch.float16: (2e-3, 2e-3),  # 2^-11, one rounding more or less
}


def sum_error(count: int, dtype: torch.dtype) -> float:
    """What adding `count` independent numbers of either sign may lose, in units of one of them.

    After k of them the sum is about sqrt(k) large, and is rounded by at most eps / 2 of that. Errors add as their
    squares do: eps / 2 * sqrt(1 + 2 + ... + count). One by one is the worst order.
    """
    return torch.finfo(dtype).eps / 2 * math.sqrt(count * (count + 1) / 2)


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    rtol, atol = RTOL_ATOL[wanted.dtype]
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, equal_nan=True)


def assert_close_as_sums(got: torch.Tensor, wanted: torch.Tensor, count: int) -> None:
    """Where each element is a sum of about `count` terms, which cancel in some: none is larger than the largest sum."""
    largest = wanted.abs().max().item()
    torch.testing.assert_close(got, wanted, rtol=0, atol=sum_error(count, got.dtype) * largest, check_dtype=False)
