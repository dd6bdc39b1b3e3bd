"""Counts of numbers as an op whose result has a size that is known before its values.

ATen's result is as long as the largest number wants, and has at least `minlength` counts. Here it has as many. Where
a number wants more the op raises, so that eager runs the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aottrain.compat_dispatch import register_fake

_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define("bincount(Tensor numbers, Tensor? weights, SymInt minlength) -> Tensor")


def _bincount(numbers: Tensor, weights: Tensor | None, minlength: int) -> Tensor:
    """As aten.bincount: numbers (count), weights (count) -> (minlength). Raises RuntimeError where the result is
    longer."""
    result = torch.ops.aten.bincount.default(numbers, weights, minlength)
    if len(result) != minlength:
        raise RuntimeError("a number that is counted is beyond the least length of the counts")
    return result


_library.impl("bincount", _bincount, "CompositeExplicitAutograd")


@register_fake(_library, "bincount")
def _(numbers: Tensor, weights: Tensor | None, minlength: int) -> Tensor:
    if weights is None:
        return numbers.new_empty((minlength,), dtype=torch.int64)
    return numbers.new_empty((minlength,), dtype=torch.float32 if weights.dtype is torch.float32 else torch.float64)
