"""max_pool_gradient: taps that no pooling gives stay inside the image."""

from __future__ import annotations

import pytest
import torch

import aottrain.ops.pools  # noqa: F401  (defines the operators)
from aottrain.toolchain.native import find_compiler
from tests.skips import NO_COMPILER

own = torch.ops.aottrain
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("tap", [0, 8])
def test_taps_in_the_padding_count_as_the_nearest_element(tap, channels_last):
    """Calls are measured on made-up inputs, whose taps are all 0: before the image, at its border."""
    gradient, pool = torch.rand(2, 3, 4, 4), ([8, 8], [3, 3], [2, 2], [1, 1], False, channels_last)
    taps = torch.full(gradient.shape, tap, dtype=torch.int8)
    result = own.max_pool_gradient(gradient, taps, *pool)
    torch.testing.assert_close(result.sum((2, 3)), gradient.sum((2, 3)))
    corner = 0 if tap == 0 else -1
    assert result[0, 0, corner, corner] >= gradient[0, 0, corner, corner]


@needs_compiler
@pytest.mark.parametrize("tap", [0, 8, -1, 127])
def test_scattered_taps_stay_in_the_image(tap):
    gradient, pool = torch.rand(2, 3, 4, 4, dtype=torch.float64), ([8, 8], [3, 3], [2, 2], [1, 1])
    taps = torch.full(gradient.shape, tap, dtype=torch.int8)
    result = own.max_pool_scatter(gradient, taps, *pool)
    torch.testing.assert_close(result.sum((2, 3)), gradient.sum((2, 3)))


@needs_compiler
@pytest.mark.parametrize("shape", [(5, 9, 7), (40, 6, 64, 64)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_are_scattered_as_they_are_gathered(shape, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, pool = torch.rand(*shape), ([3, 2], [2, 1], [1, 0])
    largest, taps = own.max_pool_taps(x, *pool, False)
    gradient = torch.rand_like(largest).mT.contiguous().mT  # as it may lie
    scattered = own.max_pool_scatter(gradient, taps, list(shape[-2:]), *pool)
    assert torch.equal(scattered, own.max_pool_gradient(gradient, taps, list(shape[-2:]), *pool, False, False))
