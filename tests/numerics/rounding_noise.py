"""How far rounding alone may take a program: runs of it in which every result is rounded at random.

A program may ask for the sign of a difference that is zero but for rounding; then no answer to it is wrong. (Monte
Carlo arithmetic: Parker, "Monte Carlo Arithmetic", UCLA CSD-970002, 1997.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Rounding errors do not add up to the same sum in each run, and there are few runs.
MANY_TIMES = 8.0


class RandomRounding(TorchDispatchMode):
    """Every new floating-point result is off by up to one unit in the last place; a NaN has either sign."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)  # the program's own draws stay as they are

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(value.alias_info is not None for value in func._schema.returns):
            return found
        for value in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(value, Tensor) and value.layout is torch.strided and _has_memory(value):
                self._disturb(value)
        return found

    def _disturb(self, value: Tensor) -> None:
        if value.is_complex() and not value.is_conj():
            value = torch.view_as_real(value)
        if not value.is_floating_point() or not value.numel():
            return
        size = value.untyped_storage().nbytes() // value.element_size()
        if sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) >= size or 0 in value.stride():
            return
        factors = (
            torch.rand(value.shape, generator=self.generator, dtype=torch.float64).mul_(2).sub_(1).to(value.device)
        )
        disturbed = value.double() * (1 + factors * torch.finfo(value.dtype).eps)
        value.copy_(torch.where(value.isnan(), disturbed.copysign(factors), disturbed))


def _has_memory(value: Tensor) -> bool:
    """Forward mode runs some operators on meta tensors first, for a layout, and its zeros need no memory."""
    return not value.is_meta and not value._is_zerotensor()


def within_noise(wanted: Tensor, got: Tensor, noisy: list[Tensor]) -> bool:
    """Whether `got` is no farther from `wanted` than some runs with noise are, a few times over; of integers and truth
    values, whether only those differ that differ in some run with noise."""
    if not wanted.is_floating_point() and not wanted.is_complex():
        excused = wanted == got
        for other in noisy:
            excused |= wanted != other
        return bool(excused.all())
    has_digits = ~_at_a_pole(wanted, noisy)
    wanted, got, noisy = wanted[has_digits], got[has_digits], [other[has_digits] for other in noisy]
    return _distance(wanted, got) <= MANY_TIMES * max(_distance(wanted, other) for other in noisy)


def _at_a_pole(wanted: Tensor, noisy: list[Tensor]) -> Tensor:
    """Where no run comes near zero, and yet some have the other sign, or are ten times as large: what is computed from
    the reciprocal of what is zero but for rounding. No digit of it is right, and it may be infinite."""
    if wanted.is_complex():
        return torch.zeros(wanted.shape, dtype=torch.bool)
    runs = torch.stack([wanted, *noisy]).double()
    sizes = runs.abs()
    apart = (runs.signbit() != runs[0].signbit()).any(0) | (sizes.amax(0) > 10 * sizes.amin(0))
    return apart & (sizes.amin(0) > torch.finfo(wanted.dtype).eps ** -0.5)


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite where one is NaN or infinite and the other is not, or has the other sign."""
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    away = (a - b).abs().nan_to_num(float("inf"), float("inf"))
    return float(torch.where(same, 0.0, away).max()) if a.numel() else 0.0
