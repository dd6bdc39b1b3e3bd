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

    def program(x):
        share = x.softmax(1)
        return (share * share).sum((2, 3)) / share.sum((2, 3))

    x = torch.randn(8, 6, 64, 64, requires_grad=True)
    compiled = aottrain.compile(program, kernel="cpp", capture="trace", on_unsupported="error")
    wanted = compiled(x)
    with labelled_launches(), profile(activities=[ProfilerActivity.CPU]) as recorded:
        got = compiled(x)
    assert torch.equal(got, wanted)
    assert any("test_labels.py" in event.key for event in recorded.key_averages())
