"""max_pool_gradient: taps that no pooling gives stay inside the image."""

from __future__ import annotations

import pytest
import torch

import aottrain.ops.pools  # noqa: F401  (defines the operators)

own = torch.ops.aottrain


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
