"""Calls of lowered ops on images: pooling, its gradients, and sizes that change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

import aottrain.ops.pools  # noqa: F401  (the ops)
from aottrain.compiler.lowering.pooling import pair
from tests.compiler.lowering.lowering_cases import case, channels_last, plain, sliced, tensor
from tests.compiler.lowering.lowering_runs import Case

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


def pools() -> Iterator[Case]:
    windows: tuple[tuple[Any, ...], ...] = (
        ([2, 2], [2, 2]), ([3, 3], [2, 2], [1, 1]), ([2, 3], [1, 2], [1, 0]), ([3], [1], [1], [2]), ([2, 2],),
        ([3, 3], [2, 2], [1, 1], [1, 1], True), ([1, 4], [1, 3], [0, 2], [1, 1], True),
    )  # fmt: skip
    for dtype in (f32, f64, bf16):
        for layout in (plain, channels_last, sliced):
            for shape in ((2, 3, 8, 10), (1, 18, 7, 33)):
                x = layout(tensor(shape, dtype, special=True))
                for window in windows:
                    yield from case("max_pool2d_with_indices.default", x, *window)
                x = layout(tensor(shape, dtype))
                yield from case("avg_pool2d.default", x, [2, 2], [2, 2])
                yield from case("avg_pool2d.default", x, [3, 2], [1, 2], [1, 1])
                yield from case("avg_pool2d.default", x, [3, 3], [2, 2], [1, 1], False, False)
                yield from case("avg_pool2d.default", x, [3, 3], [2, 2], [0, 0], False, True, 5)
                wide = torch.nn.functional.interpolate(x, scale_factor=2)
                sizes = [*shape[:2], 2 * shape[2], 2 * shape[3]]
                yield from case("upsample_nearest2d_backward.default", layout(wide), sizes[2:], list(shape), 2.0, 2.0)
                yield from case("upsample_nearest2d_backward.default", layout(wide), sizes[2:], list(shape), None, None)
                yield from case("_upsample_nearest_exact2d_backward.default", wide, sizes[2:], list(shape))
                for scales in ((None, None), (3.0, 2.0), (2.9, 2.0)):
                    sizes = [3 * shape[2], 2 * shape[3]]
                    yield from case("upsample_nearest2d.default", x, sizes, *scales)
                    yield from case("_upsample_nearest_exact2d.default", x, sizes, *scales)
                yield from case("upsample_nearest2d.default", x, [shape[2] + 3, shape[3]])
                rest = ([2, 2], [2, 2], [0, 0], False, True, None)
                yield from case("avg_pool2d_backward.default", x, layout(wide), *rest)
    nothing = torch.full((1, 1, 3, 5), -math.inf)
    yield from case("max_pool2d_with_indices.default", nothing, [2, 2], [1, 1], [1, 1])
    yield from case("max_pool2d_with_indices.default", tensor((3, 6, 6)), [3, 3], [3, 3], [1, 1])
    for window in windows[:3] + windows[4:]:
        yield from _places_in_windows(*window)


def _places_in_windows(
    window: list[int], step: Any = None, pad: Any = 0, gap: Any = 1, up: bool = False
) -> Iterator[Case]:
    if gap not in (1, [1, 1]):
        return
    size, steps, pads = (list(pair(each)) for each in (window, step or window, pad))
    for dtype in (f32, bf16):
        for layout in (plain, channels_last, sliced):
            for shape in ((2, 3, 8, 10), (1, 18, 7, 33)):
                x = layout(tensor(shape, dtype, special=True))
                yield from case("aottrain.max_pool_taps.default", x, size, steps, pads, up)
                largest, taps = torch.ops.aottrain.max_pool_taps(x, size, steps, pads, up)
                g = layout(tensor(tuple(largest.shape), dtype, 3))
                for last in (False, True):
                    rest = list(shape[2:]), size, steps, pads, up, last
                    yield from case("aottrain.max_pool_gradient.default", g, layout(taps), *rest)
