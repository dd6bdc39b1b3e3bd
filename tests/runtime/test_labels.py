"""Launches under a profiler."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import aottrain
from aottrain.runtime.labels import labelled_launches
from aottrain.toolchain.native import find_compiler


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_a_kernel_that_computes_in_planned_memory_is_launched_with_it():
    """Sums over rows are added up in memory that the program gives."""
    wanted = torch.rand(8, 21, 64, 64)

    def loss(x):
        share = x.softmax(1)
        overlap, both = (share * wanted).sum((2, 3)), (share + wanted).sum((2, 3))
        return 1 - ((2 * overlap + 1) / (both + 1)).mean()

    x = torch.randn(8, 21, 64, 64, requires_grad=True)
    compiled = aottrain.compile(loss, kernel="cpp", capture="trace", on_unsupported="error")
    (before,) = torch.autograd.grad(compiled(x), x)
    assert compiled.report.graphs[0].arena_bytes
    with labelled_launches(), profile(activities=[ProfilerActivity.CPU]) as recorded:
        (gradient,) = torch.autograd.grad(compiled(x), x)
    assert torch.equal(gradient, before)
    assert any("test_labels.py" in event.key for event in recorded.key_averages())
