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


def in_groups(x, w, b):
    return F.silu(F.group_norm(x, 16, w, b))


def of_rows(x, w, b):
    """Groups of tokens' channels, as a retention has them."""
    return F.silu(F.group_norm(x.transpose(1, 3).reshape(-1, SHAPE[1]), 16, w, b))


def inputs(dtype, tracked):
    torch.manual_seed(0)
    of_channels = [torch.randn(SHAPE[1]) for _ in range(2)]
    leaves = [value.to(dtype).requires_grad_() for value in (torch.randn(SHAPE) * 2 + 0.5, *of_channels)]
    running = [torch.full((SHAPE[1],), value, dtype=dtype) for value in (0.25, 2.0)] if tracked else []
    return leaves, running


@needs_compiler
@pytest.mark.parametrize(
    "program, tracked",
    [(normalised, False), (normalised, True), (in_groups, False), (of_rows, False)],
    ids=["a batch's own", "running", "groups", "groups of rows"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_precision_are_no_worse_than_eagers(dtype, program, tracked):
    compiled = aottrain.compile(program, capture="trace", kernel="cpp", on_unsupported="error")
    cotangent = torch.linspace(-1, 1, 8 * 64 * 12 * 16)

    def values(function, to):
        leaves, running = inputs(dtype, tracked)
        leaves = [leaf.detach().to(to).requires_grad_() for leaf in leaves]
        running = [value.to(to) for value in running]
        out = function(*leaves, *running)
        return [out, *torch.autograd.grad(out, leaves, cotangent.view(out.shape).to(to)), *running]

    exact = values(program, torch.float64)
    for ours, eagers, true in zip(values(compiled, dtype), values(program, dtype), exact, strict=True):
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


@needs_compiler
@pytest.mark.parametrize(
    "program, dtype", [(in_groups, torch.float32), (in_groups, torch.bfloat16), (of_rows, torch.bfloat16)]
)
def test_groups_are_kernels_whose_result_is_not_saved(program, dtype):
    x, *parameters = inputs(dtype, False)[0]
    compiled = aottrain.compile(program, capture="trace", kernel="cpp", on_unsupported="error")
    report = compiled.prepare(x, *parameters)
    assert not report.library_calls
    assert all(value.num_bytes < x.nbytes for value in report.saved)


def with_times(x, t, w, b):
    """What is added to a channel of an example, and what scales one, as a diffusion model's steps do."""
    return F.silu(F.group_norm(x + t[:, :, None, None], 16, w, b))


def scaled_by_examples(x, t, w, b):
    scale, shift = torch.stack((t, t * 2)).unsqueeze(-1).unsqueeze(-1)
    return F.group_norm(x, 16, w, b) * (1 + scale) + shift


@needs_compiler
@pytest.mark.parametrize("program", [with_times, scaled_by_examples])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_examples_channels_are_made_in_the_rows_of_their_groups(program, dtype):
    """Forward and backward each read x once, and write nothing else of its size than the result and its gradient."""
    (x, *parameters), _ = inputs(dtype, False)
    t = torch.linspace(-1, 1, 8 * 64).view(8, 64).to(dtype).requires_grad_()
    compiled = aottrain.compile(program, capture="trace", kernel="cpp", on_unsupported="error")
    wanted = program(*(value.double() for value in (x, t, *parameters)))
    out = compiled(x, t, *parameters)
    (report,) = compiled.report.graphs
    assert not report.library_calls and report.traffic.moved < 5.2 * x.nbytes
    cotangent = torch.linspace(-1, 1, out.numel()).view(out.shape)
    leaves = [x, t, *parameters]
    got = torch.autograd.grad(out, leaves, cotangent.to(dtype))
    eagers = torch.autograd.grad(program(x, t, *parameters), leaves, cotangent.to(dtype))
    exact = torch.autograd.grad(wanted, leaves, cotangent.double())
    for ours, eager, true in zip(got, eagers, exact, strict=True):
        assert ours.dtype is eager.dtype and ours.stride() == eager.stride()
        error, reference = ((value.double() - true).norm() for value in (ours, eager))
        assert error <= 1.5 * reference + 1e-6 * true.norm()
