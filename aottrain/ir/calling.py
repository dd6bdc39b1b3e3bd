"""How a call's result is put together from what the compiled program computes and from the caller's own inputs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from aottrain.ir.sizes import Size
from aottrain.ir.tensor import TensorSpec


class ResultSource(Enum):
    """Where a result tensor's memory comes from."""

    PRIMAL = "primal"  # an input of the call
    COMPUTED = "computed"  # a fresh tensor that the program returns


@dataclass(frozen=True)
class OutputInfo:
    """One tensor of the result.

    index: of the primal, or of the computed tensor. geometry: (size, stride, offset from that tensor's first element)
    where the result is a view of it, made outside the compiled function so that later writes land where eager's would;
    None where it is that tensor itself. requires_grad: gradients flow through it. origin: how autograd thinks that the
    view was made, which decides whether it may be written to. dtype: of the view, whose elements the geometry counts;
    None where it is its tensor's. conj, neg: whether it is a lazy conjugate, a lazy negative.
    split: (sizes, dim, which) of a part as torch.unsafe_split makes it, which shares memory and is no view.
    twin: the number of an earlier result that is the same view object.
    parent: the number of the result that it is a view of, where that is a view itself; geometry counts from its first
    element, and dtype, conj and neg are beside its own.
    """

    source: ResultSource
    index: int
    requires_grad: bool
    geometry: tuple[tuple[Size, ...], tuple[Size, ...], Size] | None = None
    origin: Any = None
    dtype: torch.dtype | None = None
    conj: bool = False
    neg: bool = False
    split: tuple[Any, int, int] | None = None
    twin: int | None = None
    parent: int | None = None


def is_pair(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether one is the complex type of the other's numbers, in whatever order."""
    real, numbers = (other, one) if one.is_complex else (one, other)
    return real.is_floating_point and numbers.is_complex and numbers.to_real() == real


@dataclass(frozen=True)
class ComputedInfo:
    """One fresh tensor that the program returns: the tensor leaf `position` of the result, or that leaf's base.

    requires_grad: gradients flow through it to inputs. isolated: it requires gradients, and they reach no input.
    """

    spec: TensorSpec
    requires_grad: bool
    position: int
    is_base: bool = False
    isolated: bool = False


@dataclass(frozen=True)
class Link:
    """A result through which gradients of other results pass: what autograd adds up there, eager's hooks see.

    output: its place among the tensors of the result, or -1 for an input whose new value gradients flow through.
    computed: which computed output it is as a whole, updated inputs after the others; -1 where it is a view.
    """

    output: int
    computed: int
    spec: TensorSpec


@dataclass(frozen=True)
class Links:
    """reached: for each computed output, the links that its gradient comes to before any other, each as often as
    autograd adds a part of the gradient up there: the order of additions is eager's."""

    links: tuple[Link, ...] = ()
    reached: tuple[tuple[int, ...], ...] = ()


NO_LINKS = Links()
