"""C++ kernels that serve calls of any size: of many open sizes and strides, beside whatever else a kernel names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.toolchain import native
from tests.numerics.fuzz_checking import is_close
from tests.skips import NO_COMPILER

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason=NO_COMPILER)

BASE = torch.randn(6, 5, 4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# The first one of those that are alike in their strides is traced.
VIEWS = (
    BASE[::2, 1:, :, 1::2], BASE[1:, 2:, :, ::3], BASE[:, 2:, 1:], BASE[1:4, :, ::2], BASE[..., :3],
    BASE[1:, :, :3, :2], BASE.transpose(0, 3)[:5, :, :3], BASE, BASE[:2, :3].contiguous(), BASE[..., 1:].contiguous(),
)  # fmt: skip
PROGRAMS = {
    "maxima of rows": lambda x: x.amax(2),
    "maxima across rows": lambda x: (x.amax(0), x.amin(1)),
    "maxima of two dimensions": lambda x: x.amax((1, 3)) + x.amin((1, 3)),
    "chains of maxima": lambda x: (x - x.amax(3, keepdim=True)).amin(2),
    "softmax": lambda x: torch.softmax(x, 1) * torch.log_softmax(x, 2),
    "sums": lambda x: x.sum(2) * x.mean((1, 2)).sum(),
    "norm": lambda x: (x - x.mean(2, keepdim=True)) / (x.var(2, keepdim=True) + 0.1),
    "scaled by maxima": lambda x: x / (1 + x.abs().amax((0, 2), keepdim=True)),
    "gelu": lambda x: F.gelu(x.transpose(1, 3)) + x.transpose(1, 3).amax(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_compile_serves_sizes_and_strides(name, monkeypatch):
    """A name that hides another is an error of the compiler: a kernel's own names and those of its sizes are apart."""
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-Wshadow", "-Werror"))
    step = aottrain.compile(PROGRAMS[name], capture="trace", dynamic=True, kernel="cpp")
    for view in VIEWS:
        observed = []
        for call in (PROGRAMS[name], step):
            x = view.detach().requires_grad_()
            results = call(x)
            results = results if isinstance(results, tuple) else (results,)
            (gradient,) = torch.autograd.grad(sum(value.square().sum() for value in results), [x])
            observed.append((*results, gradient))
        for expected, got in zip(*observed, strict=True):
            assert got.stride() == expected.stride() or got is observed[1][-1]
            assert is_close(expected.detach(), got.detach())
    assert not step.report.fallbacks
    assert all(graph.kernel == "cpp" and graph.kernels for graph in step.report.graphs)
    assert len(step.report.graphs) < len(VIEWS)
