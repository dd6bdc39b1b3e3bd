"""Maximum pooling that remembers the place of each maximum in its window, in one byte, instead of that in the image.

Pool and gradient have a lowering; what stands here says what they compute, and runs where there is none. Where columns
lie side by side on a CPU, a gradient is added to the few places that have one by a C++ function: a kernel that looks
for each place's windows reads neighbours apart from each other, and takes ten times as long.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aottrain.compat_dispatch import register_fake
from aottrain.ops.native.pools import POOLS
from aottrain.toolchain.native import Source, require_all

NATIVE = Source(POOLS, ("-fopenmp",))
SCATTERED = {torch.float32: "scatter_float", torch.float64: "scatter_double"}
# Fewer elements are done by the calling thread.
_PARALLEL_FROM = 16384
_library = torch.library.Library("aottrain", "FRAGMENT")
aten = torch.ops.aten


def _starts(like: Tensor, step: Sequence[int], pad: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The rows and columns of an image at which the windows of (..., rows, columns) results begin."""
    rows, columns = (
        torch.arange(size, device=like.device) * each - before
        for size, each, before in zip(like.shape[-2:], step, pad, strict=True)
    )
    return rows.unsqueeze(-1), columns


def max_pool_taps(
    x: Tensor, window: Sequence[int], step: Sequence[int], pad: Sequence[int], ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Of (channels, height, width), with a batch before or not, the largest of each window, as max_pool2d has it; and
    the number of its place in the window, row by row, as int8."""
    largest, index = aten.max_pool2d_with_indices(x, window, step, pad, [1, 1], ceil_mode)
    rows, columns = _starts(largest, step, pad)
    width = x.shape[-1]
    return largest, ((index // width - rows) * window[1] + index % width - columns).to(torch.int8)


def max_pool_gradient(
    gradient: Tensor,
    taps: Tensor,
    size: Sequence[int],
    window: Sequence[int],
    step: Sequence[int],
    pad: Sequence[int],
    ceil_mode: bool,
    channels_last: bool,
) -> Tensor:
    """The gradient of `max_pool_taps`' operand, whose height and width are `size`.

    Taps that `max_pool_taps` never gives, in the padding, count as the nearest element: ATen adds to memory that is not
    the image's where an index is outside of it.
    """
    rows, columns = _starts(taps, step, pad)
    wide = taps.to(torch.int64)
    row, column = (wide // window[1] + rows).clamp(0, size[0] - 1), (wide % window[1] + columns).clamp(0, size[1] - 1)
    index = row * size[1] + column
    like = _like(gradient, size, channels_last)
    return aten.max_pool2d_with_indices_backward(gradient, like, window, step, pad, [1, 1], ceil_mode, index)


def max_pool_scatter(
    gradient: Tensor, taps: Tensor, size: Sequence[int], window: Sequence[int], step: Sequence[int], pad: Sequence[int]
) -> Tensor:
    """`max_pool_gradient` on a CPU, contiguous, of float32 or float64, bit for bit ATen's. Taps that `max_pool_taps`
    never gives count as some element of the image."""
    gradient, taps = gradient.contiguous(), taps.contiguous()
    out = _like(gradient, size, channels_last=False)
    planes = math.prod(gradient.shape[:-2])
    sizes = (planes, *size, *gradient.shape[-2:], window[1], *step, *pad)
    threads = torch.get_num_threads() if out.numel() >= _PARALLEL_FROM else 1
    addresses = out.data_ptr(), taps.data_ptr(), gradient.data_ptr()
    _functions()[gradient.dtype](*addresses, (ctypes.c_int64 * len(sizes))(*sizes), threads)
    return out


@cache
def _functions() -> dict[torch.dtype, Any]:
    (library,) = require_all([NATIVE])
    functions = {dtype: getattr(library.functions, name) for dtype, name in SCATTERED.items()}
    for function in functions.values():
        function.argtypes = (*[ctypes.c_void_p] * 4, ctypes.c_int)
        function.restype = None
    return functions


def _like(gradient: Tensor, size: Sequence[int], channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(
        [*gradient.shape[:-2], *size], dtype=gradient.dtype, device=gradient.device, memory_format=layout
    )


def _fake_taps(x: Tensor, *pool: Any) -> tuple[Tensor, Tensor]:
    *sizes, ceil_mode = pool
    largest, index = aten.max_pool2d_with_indices(x, *sizes, [1, 1], ceil_mode)
    return largest, index.to(torch.int8)


def _fake_gradient(gradient: Tensor, taps: Tensor, size: Sequence[int], *pool: Any) -> Tensor:
    return _like(gradient, size, channels_last=pool[-1])


def _fake_scatter(gradient: Tensor, taps: Tensor, size: Sequence[int], *pool: Any) -> Tensor:
    return _like(gradient, size, channels_last=False)


_WINDOW = "int[2] window, int[2] step, int[2] pad, bool ceil_mode"
_library.define(f"max_pool_taps(Tensor x, {_WINDOW}) -> (Tensor, Tensor)")
_library.define(
    f"max_pool_gradient(Tensor gradient, Tensor taps, int[2] size, {_WINDOW}, bool channels_last) -> Tensor"
)
_library.define(
    "max_pool_scatter(Tensor gradient, Tensor taps, int[2] size, int[2] window, int[2] step, int[2] pad) -> Tensor"
)
_library.impl("max_pool_taps", max_pool_taps, "CompositeExplicitAutograd")
_library.impl("max_pool_gradient", max_pool_gradient, "CompositeExplicitAutograd")
_library.impl("max_pool_scatter", max_pool_scatter, "CPU")
register_fake(_library, "max_pool_taps")(_fake_taps)
register_fake(_library, "max_pool_gradient")(_fake_gradient)
register_fake(_library, "max_pool_scatter")(_fake_scatter)
