"""How a call's result is put together from what the compiled program computes and from the caller's own inputs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from aottrain.ir.sizes.expressions import Size
from aottrain.ir.tensor import TensorSpec


class ResultSource(Enum):
    """Where a result tensor's memory comes from."""

    PRIMAL = "primal"  # an input of the call
    COMPUTED = "computed"  # a fresh tensor that the program returns


@dataclass(frozen=True)
class OutputInfo:
    """One tensor of the result."""

    source: ResultSource
    index: int
    """Of the primal, or of the computed tensor."""
    requires_grad: bool
    """Gradients flow through it."""
    geometry: tuple[tuple[Size, ...], tuple[Size, ...], Size] | None = None
    """(size, stride, offset from that tensor's first element) of a view of it, made outside the compiled function so
    that later writes land where eager's would; None where the result is that tensor itself."""
    origin: Any = None
    """How autograd thinks that the view was made, which decides whether it may be written to."""
    dtype: torch.dtype | None = None
    """Of the view, whose elements the geometry counts; None where it is its tensor's."""
    conj: bool = False
    """Whether it is a lazy conjugate."""
    neg: bool = False
    """Whether it is a lazy negative."""
    split: tuple[Any, int, int] | None = None
    """(sizes, dim, which) of a part as torch.unsafe_split makes it, which shares memory and is no view."""
    hidden: bool = False
    """Whether it shows memory of its tensor and autograd takes it for a tensor of its own, as .data and the parts of
    torch.unsafe_split: it is no view, and writes to it are counted in it alone."""
    twin: int | None = None
    """The number of an earlier result that is the same view object."""
    parent: int | None = None
    """The number of the result that it is a view of, where that is a view itself. The geometry counts from its first
    element; dtype, conj and neg are beside its own."""


def is_pair(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether one is the complex type of the other's numbers, in whatever order."""
    real, numbers = (other, one) if one.is_complex else (one, other)
    return real.is_floating_point and numbers.is_complex and numbers.to_real() == real


@dataclass(frozen=True)
class ComputedInfo:
    """One fresh tensor that the program returns."""

    spec: TensorSpec
    requires_grad: bool
    """Gradients flow through it to inputs."""
    position: int
    """Of the tensor leaf of the result that it is, or is the base of."""
    is_base: bool = False
    isolated: bool = False
    """It requires gradients, and they reach no input."""


@dataclass(frozen=True)
class Link:
    """A result through which gradients of other results pass: what autograd adds up there, eager's hooks see."""

    output: int
    """Its place among the tensors of the result; -1 for an input whose new value gradients flow through."""
    computed: int
    """Which computed output it is as a whole, updated inputs after the others; -1 where it is a view."""
    spec: TensorSpec


@dataclass(frozen=True)
class Links:
    """All links of a program."""

    links: tuple[Link, ...] = ()
    reached: tuple[tuple[int, ...], ...] = ()
    """Of each computed output, the links that its gradient comes to before any other. Each stands as often as autograd
    adds a part of the gradient there: the order of additions is eager's."""


NO_LINKS = Links()
