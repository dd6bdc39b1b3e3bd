"""A convolution to one pixel has strides of its own in dimensions of one element; where its views lie is known yet."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import aottrain


class ToOnePixel(nn.Module):
    """A convolution that leaves one pixel, read as rows and by a norm that views it."""

    def __init__(self, kernel: int, padding: int):
        super().__init__()
        self.convolution = nn.Conv2d(16, 32, kernel, stride=2, padding=padding)
        self.norm = nn.GroupNorm(1, 32)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = self.convolution(images)
        rows = images.flatten(2).transpose(1, 2)
        return self.norm(images).square().mean() + rows.tanh().sum()


@pytest.mark.parametrize(("kernel", "padding"), [(3, 1), (2, 0)])
def test_its_views_are_no_fault(kernel, padding):
    """Each such program once ran operator by operator, reported as a fault: segformer's and poolformer's last stage."""
    torch.manual_seed(0)
    model, images = ToOnePixel(kernel, padding), torch.randn(4, 16, 2, 2)
    eager = copy.deepcopy(model)
    compiled = aottrain.compile(model, capture="trace", kernel="cpp", decisions="default", on_unsupported="error")
    ours, theirs = compiled(images), eager(images)
    ours.backward()
    theirs.backward()
    assert compiled.report.fallbacks == []
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
