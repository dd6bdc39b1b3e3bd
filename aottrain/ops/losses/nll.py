"""Negative log-likelihood row by row: what is left of a loss then are sums.

It has a lowering; what stands here says what it computes, and runs where there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aottrain.compat_dispatch import register_fake

_library = torch.library.Library("aottrain", "FRAGMENT")

# ATen's numbers of a loss's reductions; the third is the sum.
NONE, MEAN = 0, 1


def nll_rows(log_probabilities: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """-log_probabilities[row, target[row]] of (rows, classes) and (rows,), in float32 at least; 0 where the target is
    to be ignored. Of images, (images, classes, height, width) and (images, height, width), a row is that of a pixel.
    Raises IndexError for a class that there is not."""
    wide = log_probabilities.to(torch.promote_types(log_probabilities.dtype, torch.float32))
    aten = torch.ops.aten
    forward = aten.nll_loss_forward if target.dim() == 1 else aten.nll_loss2d_forward
    return forward(wide, target, None, NONE, ignore_index)[0]


def _fake(log_probabilities: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    wide = torch.promote_types(log_probabilities.dtype, torch.float32)
    return log_probabilities.new_empty(target.shape, dtype=wide)


_library.define("nll_rows(Tensor log_probabilities, Tensor target, int ignore_index) -> Tensor")
_library.impl("nll_rows", nll_rows, "CompositeExplicitAutograd")
register_fake(_library, "nll_rows")(_fake)
