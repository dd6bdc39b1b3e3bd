"""What is computed again is made from little: a residual stream is not summed anew from its beginning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aottrain.ir.graph import spec_of
from tests.golden.programs import Golden
from tests.golden.texts import compiled

WIDTH, ROWS = 64, 256


class Stream(nn.Module):
    """Under autocast: the stream in float32, what each block adds to it in bfloat16, half of its bytes."""

    def __init__(self, depth: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = x + F.gelu(layer(norm(x)))
            return x.square().sum()


def widest(depth: int, kernel: str) -> tuple[int, int]:
    """Of a program's kernels the most bytes read, and the most buffers of the stream's size."""
    known = compiled(Golden(lambda: (Stream(depth), (torch.randn(ROWS, WIDTH),)), {"kernel": kernel}))
    read, buffers = 0, 0
    for fused in known["decided"].fused:
        for call in fused.schedule.kernels:
            sizes = [spec.nbytes for node in call.reads if (spec := spec_of(node)) is not None]
            read, buffers = max(read, sum(sizes)), max(buffers, sum(size >= 2 * ROWS * WIDTH for size in sizes))
    return read, buffers


@pytest.mark.parametrize("kernel", ["cpp", "triton"])
def test_no_kernel_reads_more_where_there_are_more_layers(kernel):
    few, many = widest(4, kernel), widest(12, kernel)
    assert many[0] == few[0]
    assert max(few[1], many[1]) <= 5


def test_a_value_is_saved_instead_of_several_that_are_read_for_it_alone():
    known = compiled(Golden(lambda: (Stream(6), (torch.randn(ROWS, WIDTH),)), {"kernel": "cpp"}))
    plan = known["built"]["plan"]
    assert any(reason.startswith("bounds recompute") for reason in plan.reasons.values())
