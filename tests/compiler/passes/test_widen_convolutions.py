"""Convolutions along rows as convolutions of images of one row: what runs, and what is given back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aottrain.compiler.passes.widen_convolutions import widen_convolutions
from aottrain.toolchain.native import find_compiler
from tests.compiler.passes.test_choose_layouts import both, check_equal
from tests.compiler.programs import joint_of, targets

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")


class Rows(nn.Module):
    """Strides, dilations, groups, a transposed convolution, batch norm, a residual, a value that escapes half-way."""

    def __init__(self, by_channel: bool):
        super().__init__()
        self.by_channel = by_channel
        self.first, self.second = nn.Conv1d(4, 8, 5, stride=2, padding=2), nn.Conv1d(8, 8, 3, dilation=2, padding=2)
        self.depthwise, self.up = nn.Conv1d(8, 8, 3, padding=1, groups=8, bias=False), nn.ConvTranspose1d(8, 4, 4, 2, 1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        x = x.transpose(1, 2) if self.by_channel else x
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = hidden + self.depthwise(torch.tanh(self.second(hidden)))
        return self.up(hidden), hidden


@pytest.mark.parametrize("by_channel", (False, True))
def test_results_and_gradients_have_eagers_strides_and_values(by_channel):
    shape = (4, 64, 4) if by_channel else (4, 4, 64)
    wanted, got, report = both(Rows(by_channel), torch.randn(*shape, requires_grad=True))
    check_equal(wanted, got)
    assert "8 convolutions, forward and backward, in channels_last" in report.layouts


@pytest.mark.parametrize("shape", ((1, 4, 64), (4, 4, 1), (1, 4, 1), (3, 1, 8)))
def test_dimensions_of_size_one_have_eagers_strides(shape):
    """In which layout these lie no stride says, and oneDNN gives others than ATen."""
    for model in (nn.Conv1d(shape[1], 1, 1), nn.Conv1d(shape[1], 4, 1), nn.Conv1d(shape[1], 6, 3, padding=1)):
        check_equal(*both(model, torch.randn(*shape, requires_grad=True))[:2])


def test_programs_without_rows_stay():
    joint = joint_of(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8))
    assert widen_convolutions(joint) is joint
    joint = joint_of(nn.Conv1d(3, 4, 3), torch.randn(2, 3, 8, requires_grad=True))
    assert targets(widen_convolutions(joint).graph).count("aten.convolution.default") == 1
