"""Batch and group normalisation in parts, so that what is cheap to compute again is not one op with what is not.

The statistics of a batch are a few numbers for each channel: once they are known, the normalised values are pointwise,
and a backward that needs them again reads the input once. Channels are dimension 1, statistics have shape (channels,)
and are float32 at least. Each op has a lowering; what stands here says what it computes, and runs where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aottrain.compat_dispatch import register_fake

_library = torch.library.Library("aottrain", "FRAGMENT")


def channel_dims(rank: int) -> list[int]:
    """All dimensions but the channels'."""
    return [d for d in range(rank) if d != 1]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """One number for each channel, to be broadcast against `like`."""
    return values.view(-1, *[1] * (like.dim() - 2))


def batch_spread(x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of x - mean and of its square. Of a mean that was rounded, or is that of some of the batch, the first
    says what it lacks."""
    distance = x.to(mean.dtype) - _per_channel(mean, x)
    dims = channel_dims(x.dim())
    return distance.sum(dims), (distance * distance).sum(dims)


def batch_statistics(
    mean: Tensor,
    lost: Tensor,
    square: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    count: int,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From `batch_spread` the mean, the reciprocal deviation, and the new running mean and variance.

    count: elements of a channel, at least 2. The sum of distances corrects for what the mean lacks (Chan, Golub,
    LeVeque, "Algorithms for computing the sample variance", The American Statistician 37, 1983).
    """
    off = lost / count
    center, total = mean + off, square - lost * off
    fresh = center, total / (count - 1)
    new = [
        (momentum * value + (1 - momentum) * running.to(value.dtype)).to(running.dtype)
        for value, running in zip(fresh, (running_mean, running_var), strict=True)
    ]
    return center, (total / count + eps).rsqrt(), new[0], new[1]


def batch_normalize(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x - mean) * rstd * weight + bias, in x's type."""
    out = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(rstd, x)
    if weight is not None:
        out = out * _per_channel(weight, x)
    if bias is not None:
        out = out + _per_channel(bias, x)
    return out.to(x.dtype)


def batch_norm_sums(gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of bias and weight: sums of the gradient, and of it times the normalised x."""
    gradient, normal = gradient.to(mean.dtype), (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(rstd, x)
    dims = channel_dims(x.dim())
    return gradient.sum(dims), (gradient * normal).sum(dims)


def batch_norm_input_gradient(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, total: Tensor, product: Tensor
) -> Tensor:
    """rstd * weight * (gradient - total / n - normal * product / n), total and product being `batch_norm_sums`."""
    count = math.prod(x.shape) // x.shape[1]
    normal = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(rstd, x)
    rest = gradient.to(mean.dtype) - _per_channel(total / count, x) - normal * _per_channel(product / count, x)
    step = rstd if weight is None else rstd * weight
    return (_per_channel(step, x) * rest).to(x.dtype)


def group_norm_sums(gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """As `batch_norm_sums`, of groups: x of (examples, groups, channels, elements), statistics of (examples, groups, 1,
    1) -> (groups, channels) each."""
    gradient, normal = gradient.to(mean.dtype), (x.to(mean.dtype) - mean) * rstd
    return gradient.sum([0, 3]), (gradient * normal).sum([0, 3])


def group_norm_example_sums(gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """As `group_norm_sums`, of each example -> both sums, of (2, examples, groups, channels)."""
    gradient, normal = gradient.to(mean.dtype), (x.to(mean.dtype) - mean) * rstd
    return torch.stack((gradient.sum(3), (gradient * normal).sum(3)))


def group_norm_sums_in_rows(gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """`group_norm_example_sums`, for a kernel whose rows are the groups."""
    return group_norm_example_sums(gradient, x, mean, rstd)


def channel_sums_in_rows(x: Tensor) -> Tensor:
    """The sum of each channel of each example, for a kernel whose rows are groups of channels: (examples, channels,
    ...) -> (examples, channels)."""
    return x.flatten(2).sum(2)


def group_norm_input_gradient(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, total: Tensor, product: Tensor
) -> Tensor:
    """rstd * (gradient * weight - total / n - normal * product / n), n being the elements of a group: x as that of
    `group_norm_sums`, weight of (1, groups, channels, 1), total and product those sums times weight, added up over the
    channels of a group, of (examples, groups, 1, 1)."""
    count = x.shape[2] * x.shape[3]
    gradient, normal = gradient.to(mean.dtype), (x.to(mean.dtype) - mean) * rstd
    scaled = gradient if weight is None else gradient * weight
    return rstd * (scaled - total / count - normal * (product / count))


def _as_statistics(count: int, position: int) -> Callable[..., tuple[Tensor, ...]]:
    """The type of results that are like the argument in this place."""
    return lambda *args: tuple(torch.empty_like(args[position]) for _ in range(count))


_OPS: tuple[tuple[Callable[..., Any], str, Callable[..., Any]], ...] = (
    (batch_spread, "Tensor x, Tensor mean) -> (Tensor, Tensor)", _as_statistics(2, 1)),
    (
        batch_statistics,
        "Tensor mean, Tensor lost, Tensor square, Tensor running_mean, Tensor running_var, int count, float momentum, "
        "float eps) -> (Tensor, Tensor, Tensor, Tensor)",
        lambda *args: tuple(torch.empty_like(args[place]) for place in (0, 0, 3, 4)),
    ),
    (
        batch_normalize,
        "Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias) -> Tensor",
        lambda x, *rest: torch.empty_like(x),
    ),
    (
        batch_norm_sums,
        "Tensor gradient, Tensor x, Tensor mean, Tensor rstd) -> (Tensor, Tensor)",
        _as_statistics(2, 2),
    ),
    (
        group_norm_sums,
        "Tensor gradient, Tensor x, Tensor mean, Tensor rstd) -> (Tensor, Tensor)",
        lambda gradient, x, mean, rstd: tuple(mean.new_empty(x.shape[1:3]) for _ in range(2)),
    ),
    (
        group_norm_example_sums,
        "Tensor gradient, Tensor x, Tensor mean, Tensor rstd) -> Tensor",
        lambda gradient, x, mean, rstd: mean.new_empty((2, *x.shape[:3])),
    ),
    (
        group_norm_sums_in_rows,
        "Tensor gradient, Tensor x, Tensor mean, Tensor rstd) -> Tensor",
        lambda gradient, x, mean, rstd: mean.new_empty((2, *x.shape[:3])),
    ),
    (channel_sums_in_rows, "Tensor x) -> Tensor", lambda x: x.new_empty(x.shape[:2])),
    (
        group_norm_input_gradient,
        "Tensor gradient, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor total, Tensor product) -> Tensor",
        lambda gradient, x, mean, *rest: torch.empty_like(x, dtype=mean.dtype),
    ),
    (
        batch_norm_input_gradient,
        "Tensor gradient, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor total, Tensor product) -> Tensor",
        lambda gradient, x, *rest: torch.empty_like(x),
    ),
)
for _function, _schema, _fake in _OPS:
    _library.define(f"{_function.__name__}({_schema}")
    _library.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    register_fake(_library, _function.__name__)(_fake)
