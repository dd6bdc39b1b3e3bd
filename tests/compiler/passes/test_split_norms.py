"""split_norms: of parameters in half precision, too, and statistics are made once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.toolchain.native import find_compiler

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
SHAPE = (8, 64, 12, 16)


def normalised(x, w, b, mean=None, var=None):
    return F.silu(F.batch_norm(x, mean, var, w, b, True, 0.3))


def inputs(dtype, tracked):
    torch.manual_seed(0)
    of_channels = [torch.randn(SHAPE[1]) for _ in range(2)]
    leaves = [value.to(dtype).requires_grad_() for value in (torch.randn(SHAPE) * 2 + 0.5, *of_channels)]
    running = [torch.full((SHAPE[1],), value, dtype=dtype) for value in (0.25, 2.0)] if tracked else []
    return leaves, running


@needs_compiler
@pytest.mark.parametrize("tracked", [False, True], ids=["a batch's own", "running"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_precision_are_no_worse_than_eagers(dtype, tracked):
    compiled = aottrain.compile(normalised, capture="trace", kernel="cpp", on_unsupported="error")
    cotangent = torch.linspace(-1, 1, 8 * 64 * 12 * 16).view(SHAPE)

    def values(function, to):
        leaves, running = inputs(dtype, tracked)
        leaves = [leaf.detach().to(to).requires_grad_() for leaf in leaves]
        running = [value.to(to) for value in running]
        out = function(*leaves, *running)
        return [out, *torch.autograd.grad(out, leaves, cotangent.to(to)), *running]

    exact = values(normalised, torch.float64)
    for ours, eagers, true in zip(values(compiled, dtype), values(normalised, dtype), exact, strict=True):
        assert ours.dtype is eagers.dtype and ours.stride() == eagers.stride()
        error, reference = ((value.double() - true).norm() for value in (ours, eagers))
        assert error <= 1.5 * reference + 1e-6 * true.norm()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_library_does_it_and_the_statistics_are_saved(dtype):
    compiled = aottrain.compile(normalised, capture="trace", kernel="cpp", on_unsupported="error")
    report = compiled.prepare(*inputs(dtype, False)[0])
    assert not report.library_calls
    assert not any("batch_spread" in value.op for value in report.recomputed)
    assert [value.num_bytes for value in report.saved] == [4 * SHAPE[1]] * 2
