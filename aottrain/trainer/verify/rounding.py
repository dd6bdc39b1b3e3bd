"""Whether a tensor is off from eager's by more than eager is from itself, element by element.

An element is measured in units of its scale: how far eager moved there and in its surroundings when its inputs were
changed by one rounding, and what a sum over its surroundings may lose by adding in another order. How many units are
too many, eager says too: of the elements of a right program no more are far off than of one of eager's own runs. So a
few activations that rounding carries across zero excuse as many such elements, and an element that is zeroed, however
small beside the largest, is found as soon as rounding does not explain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# How many times as far off a right program may be: it and eager each differ from the exact answer by such an error,
# and the farthest of a few samples underestimates the farthest of all. And how many times as many elements.
FACTOR, MANY = 4.0, 4
# Of the magnitude of an element's surroundings, what another order of a float32 sum may lose: 2^-24, the roundoff, of
# each of a few dozen partial sums.
SUM_ERROR = 2.0**-19
_LEVELS = 64  # of powers of two in which distances are counted


@dataclass(frozen=True)
class Surroundings:
    """Mean squares of a tensor: over all of it, and for each place along each axis. A vector has the first alone."""

    mean: float
    along: tuple[Tensor, ...]
    top: float

    @staticmethod
    def of(value: Tensor) -> Surroundings:
        value = value.detach().abs()
        top = value.max().item() if value.numel() else 0.0
        if not 0 < top < float("inf"):
            return Surroundings(0.0, (), 0.0)
        squares = value.float().div_(top).square_() if value.dtype is not torch.float64 else (value / top).square()
        axes = range(squares.ndim) if squares.ndim > 1 else ()
        along = tuple(squares.mean([d for d in axes if d != axis], keepdim=True) for axis in axes)
        return Surroundings(squares.mean().item(), along, top)

    @staticmethod
    def pooled(parts: Sequence[Surroundings]) -> Surroundings:
        """Of several tensors of one shape taken together."""
        nonzero = [part for part in parts if part.top]
        if not nonzero:
            return Surroundings(0.0, (), 0.0)
        top = max(part.top for part in nonzero)
        weights = [(part.top / top) ** 2 / len(parts) for part in nonzero]
        axes = range(len(nonzero[0].along))
        along = tuple(sum(w * part.along[d] for w, part in zip(weights, nonzero, strict=True)) for d in axes)
        return Surroundings(sum(w * part.mean for w, part in zip(weights, nonzero, strict=True)), along, top)

    def magnitude(self) -> Tensor | float:
        """For each element the root of the mean square around it: that of its row, times that of its column, over that
        of all, as of an outer product; a shape that broadcasts to the tensor's."""
        if not self.mean:
            return 0.0
        root: Tensor | float = self.top * self.mean**0.5
        for mean in self.along:
            root = root * (mean / self.mean).sqrt()
        return root


def distance(actual: Tensor, expected: Tensor) -> Tensor:
    """|actual - expected|, 0 where both are the same infinity or NaN; infinite where only one of them is finite."""
    kind = torch.float64 if torch.float64 in (actual.dtype, expected.dtype) else torch.float32
    difference = (actual.detach().to(kind) - expected.detach().to(kind)).abs_()
    if not torch.isfinite(difference).all():
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        difference = torch.where(same, 0.0, difference.nan_to_num(float("inf")))
    return difference


def relative_norm(difference: Tensor, expected: Tensor) -> float:
    """||difference|| / ||expected||, both 2-norms: 0 where there is none, infinite where only `expected` is zero."""
    norm = torch.linalg.vector_norm(difference, dtype=torch.float64).item()
    if norm == 0:
        return 0.0
    finite = torch.where(expected.isfinite(), expected, 0) if expected.is_floating_point() else expected
    reference = torch.linalg.vector_norm(finite.detach(), dtype=torch.float64).item()
    return norm / reference if reference else float("inf")


@dataclass(frozen=True)
class Excess:
    """What is beyond `tolerance` of each element's own size."""

    place: tuple[int, ...]
    """Of the worst element."""
    units: float
    """Its distance in units of its scale."""
    allowed: float
    """How many units eager's own runs explain."""
    count: int
    """Elements beyond that."""


def explained_by_sums(difference: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether every element is within the tolerance and what another order of summing explains, without any sample."""
    return bool((difference <= tolerance * expected.abs() + FACTOR * _sum_error(expected)).all())


def unexplained(difference: Tensor, expected: Tensor, samples: Sequence[Tensor], tolerance: float) -> Excess | None:
    """The worst of what the samples of eager's own distances do not explain; None where they explain everything.

    At every distance from FACTOR units on, at most MANY times as many elements may be so far off as are a FACTOR-th so
    far off in one of the samples, each of them in units of what the others say.
    """
    floor, free = _sum_error(expected), tolerance * expected.abs()
    around = [Surroundings.of(sample) for sample in samples]
    allowed = torch.zeros(_LEVELS, dtype=torch.int64)
    for i, sample in enumerate(samples):
        others = Surroundings.pooled(around[:i] + around[i + 1 :]).magnitude()
        allowed = allowed.maximum(_numbers_beyond(_units((sample.to(free.dtype) - free).clamp_(min=0), others + floor)))
    units = _units((difference - free).clamp_(min=0), Surroundings.pooled(around).magnitude() + floor)
    counts, shift = _numbers_beyond(units), int(FACTOR).bit_length() - 1
    excessive = (counts[shift:] > MANY * allowed[: _LEVELS - shift]).nonzero()
    if not len(excessive):
        return None
    level = int(excessive[-1])  # the farthest elements are at fault where several levels have too many
    worst = int(units.argmax())
    return Excess(
        place_of(worst, units.shape), units.flatten()[worst].item(), FACTOR * 2.0**level, int(counts[level + shift])
    )


def place_of(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The indices of an element by its number in row-major order."""
    place = []
    for size in reversed(shape):
        number, index = divmod(number, size)
        place.append(index)
    return tuple(reversed(place))


def _sum_error(expected: Tensor) -> Tensor | float:
    return SUM_ERROR * Surroundings.of(torch.where(expected.isfinite(), expected, 0)).magnitude()


def _units(difference: Tensor, scale: Tensor | float) -> Tensor:
    return torch.where(difference > 0, difference / scale, 0.0)


def _numbers_beyond(units: Tensor) -> Tensor:
    """How many are at least 1, 2, 4, 8, ..."""
    levels = torch.where(units.isfinite(), torch.frexp(units).exponent, _LEVELS)  # 2^(e - 1) <= units < 2^e
    levels = torch.where(units > 0, levels, 0).clamp_(0, _LEVELS)
    counts = torch.bincount(levels.flatten().to(torch.int64), minlength=_LEVELS + 1).cpu()
    return counts.flip(0).cumsum(0).flip(0)[1:]
