"""split_softmaxes: a long softmax over memory's first dimension as reductions over rows and pointwise ops."""

from __future__ import annotations

import pytest
import torch

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
