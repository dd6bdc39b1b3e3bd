"""Convolutions into memory of the caller's, where ATen would allocate: fresh memory on a CPU is slow to touch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def can_convolve_into() -> bool:
    """Whether oneDNN may be used, and has a convolution that adds to memory."""
    mkldnn = torch.backends.mkldnn
    return mkldnn.is_available() and mkldnn.enabled and hasattr(torch.ops.mkldnn, "_convolution_pointwise_")


def convolve_into(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    out: Tensor,
) -> Tensor:
    """aten.convolution, not transposed, of images (N, C, H, W) in channels_last into `out`, which is so too.

    oneDNN adds it to what is in `out`: zeros, so that it is the same result, bit for bit (but that -0 is 0).
    """
    out.zero_()
    arguments = weight, bias, padding, stride, dilation, groups
    return torch.ops.mkldnn._convolution_pointwise_(out, x, *arguments, "add", 1.0, None, [], None)
