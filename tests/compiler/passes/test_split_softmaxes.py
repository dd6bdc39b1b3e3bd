"""split_softmaxes: what goes along memory's first dimension as reductions over rows and pointwise ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.compiler.passes.splits.softmaxes import split_softmaxes
from aottrain.ir.graph import OutputKind, calls, spec_of
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import joint_of, leaf
from tests.numerics.tolerance import assert_close, assert_close_as_sums

SOFTMAXES = {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"}
LONG = 600


def softmaxes(joint):
    return [name for node in calls(joint.graph) if (name := str(node.target).split(".")[1]) in SOFTMAXES]


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "function",
    [lambda x: x.softmax(0), lambda x: x.log_softmax(0), lambda x: x.mT.softmax(1).mT],
    ids=["softmax", "its logarithm", "of a transpose"],
)
def test_a_long_softmax_over_the_first_dimension(function, dtype):
    x = leaf(LONG, 48).detach().to(dtype).requires_grad_()
    joint = joint_of(function, x)
    split = split_softmaxes(joint)
    is_across = spec_of(joint.outputs_of(*OutputKind)[0]) == spec_of(split.outputs_of(*OutputKind)[0])
    assert is_across and (not softmaxes(split) or "mT" in function.__code__.co_names)
    compiled = aottrain.compile(function, kernel="cpp", capture="trace", on_unsupported="error")
    got, wanted = compiled(x), function(x)
    assert got.stride() == wanted.stride() and got.dtype is dtype
    assert_close(got, wanted)
    cotangent = leaf(LONG, 48, seed=1).detach().to(dtype)
    one, other = (torch.autograd.grad(y, x, cotangent)[0] for y in (got, wanted))
    assert one.stride() == other.stride()
    if dtype is torch.bfloat16:
        assert_close(one, other)
    else:
        assert_close_as_sums(one, other, 64 * LONG)


def compared_both_ways(x):
    """Each row with its column, as images with their captions, of which some do not count."""
    target = torch.arange(x.shape[1]) % 40
    by_columns = F.cross_entropy(x.t(), target, ignore_index=3)
    return by_columns + F.cross_entropy(x.t(), target, reduction="sum"), F.log_softmax(x, 1)


def by_columns(x):
    target = torch.arange(x.shape[1])
    return F.cross_entropy(x.t(), target, reduction="none"), F.log_softmax(x.t(), 1)


def spreads(x):
    """The numbers are far from zero: their mean is rounded."""
    y = x + 1000
    return x.var(0), y.std(0, keepdim=True), x.var(0, correction=0)


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [compared_both_ways, by_columns, spreads], ids=lambda each: each.__name__)
def test_rows_that_lie_across_memory(function, dtype):
    x = leaf(LONG, 48).detach().to(dtype).requires_grad_()
    left = {name for node in calls(split_softmaxes(joint_of(function, x)).graph) if (name := str(node.target))}
    assert not {"aten.var.correction", "aten.std.correction"} & left
    compiled = aottrain.compile(function, kernel="cpp", capture="trace", on_unsupported="error")
    got, wanted = compiled(x), function(x)
    exact = function(x.detach().double().requires_grad_())
    for one, other, best in zip(got, wanted, exact, strict=True):
        assert one.stride() == other.stride() and one.dtype is dtype
        limit = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2}[dtype] * best.abs().max()
        assert (one - best).abs().max() <= 1.5 * (other - best).abs().max() + limit
    cotangents = [torch.linspace(0.5, 1, out.numel(), dtype=dtype).view(out.shape) for out in wanted]
    one, other = (torch.autograd.grad(outs, x, cotangents)[0] for outs in (got, wanted))
    assert one.stride() == other.stride()
    if dtype is torch.bfloat16:
        assert (one - other).abs().max() <= 2e-2 * other.abs().max()
    else:
        assert_close_as_sums(one, other, 64 * LONG)


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_a_comparison_both_ways_passes_over_its_scores_three_times():
    """By rows with the columns' maxima, the columns' sums, and backward; a library turned them around, too."""

    def program(x):
        target = torch.arange(LONG)
        return F.cross_entropy(x, target) + F.cross_entropy(x.t(), target)

    report = aottrain.compile(program, kernel="cpp", capture="trace", on_unsupported="error").prepare(leaf(LONG, LONG))
    assert report.traffic is not None
    assert report.traffic.moved <= 4.2 * 4 * LONG * LONG and not report.library_calls


@pytest.mark.parametrize(
    "function, shape",
    [
        (lambda x: x.softmax(1), (48, LONG)),
        (lambda x: x.softmax(0), (48, LONG)),  # short: its rows are done side by side
        (lambda x: x.softmax(0), (LONG, 4)),
        (lambda x: x.softmax(1), (3, LONG, 48)),
    ],
    ids=["along memory", "short", "few neighbours", "not the first"],
)
def test_others_stay(function, shape):
    joint = joint_of(function, leaf(*shape))
    assert split_softmaxes(joint) is joint
