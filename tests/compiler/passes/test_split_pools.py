"""Maximum pooling by places in windows: what is rewritten, what is left, and that every bit stays."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.compiler.passes.splits.pools import scatter_pools, split_pools
from aottrain.ir.graph import calls, info
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import joint_inputs, joint_of, leaf
from tests.numerics.tolerance import assert_close
from tests.skips import NO_COMPILER

TAPS, GRADIENT = "aottrain.max_pool_taps.default", "aottrain.max_pool_gradient.default"
SCATTER = "aottrain.max_pool_scatter.default"
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER)


def names(joint) -> list[str]:
    return [info(node).name for node in calls(joint.graph)]


def special(x):
    with torch.no_grad():
        x.view(-1)[::7] = 0.0
        x.view(-1)[3] = math.nan
        x.view(-1)[40:43] = torch.tensor([math.inf, -math.inf, -0.0])
    return x


@needs_compiler
@pytest.mark.parametrize("window", [(2,), (3, 2, 1), ((2, 3), (1, 2), (1, 0)), (3, 2, 1, 1, True), (2, 3)], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 9, 10), (3, 8, 7)], ids=str)
@pytest.mark.parametrize("relu", [True, False])
def test_every_bit_stays(window, shape, relu):
    x = special(leaf(*shape))
    if len(shape) == 4:
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    joint = joint_of(lambda x: F.max_pool2d(F.relu(x) if relu else x, *window), x)
    split = split_pools(joint)
    assert {TAPS, GRADIENT} <= set(names(split))
    scattered = scatter_pools(split)
    if len(shape) == 4:
        assert scattered is split  # channels lie side by side
    else:
        assert SCATTER in names(scattered) and GRADIENT not in names(scattered)
    given = joint_inputs(joint, (x,))
    for rewritten in (split, scattered):
        for got, wanted in zip(rewritten(*given), joint(*given), strict=True):
            assert got.stride() == wanted.stride()
            assert torch.equal(got.view(torch.int32), wanted.view(torch.int32))


def test_a_relus_gradient_is_taken_after_the_pool():
    """Unless something else reads the relu's result as well."""
    joint = split_pools(joint_of(lambda x: F.max_pool2d(F.relu(x), 2), leaf(2, 3, 8, 8)))
    order = names(joint)
    assert order.index("aten.threshold_backward.default") < order.index(GRADIENT)
    joint = split_pools(joint_of(lambda x: (F.max_pool2d(y := F.relu(x), 2), y * 2), leaf(2, 3, 8, 8)))
    order = names(joint)
    assert order.index("aten.threshold_backward.default") > order.index(GRADIENT)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
        lambda x: F.max_pool2d(x, 2, return_indices=True),
        lambda x: F.max_pool2d(x, 2, dilation=2),
        lambda x: F.max_pool2d(x, 6),
        lambda x: F.max_pool2d(x.detach(), 2),
    ],
)
def test_what_is_left_as_it_is(function):
    """Places in the image that the caller wants, windows with gaps or of many elements, pools without a backward."""
    joint = joint_of(function, leaf(2, 3, 12, 12))
    assert split_pools(joint) is joint


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_scattered_where_columns_lie_side_by_side(dtype):
    """Bit for bit eager's; halves' by a kernel, which adds up in float32."""

    def pooled(x):
        return F.max_pool2d(x, 3, 2, 1)

    x = torch.randn(4, 6, 37, 41, dtype=dtype, requires_grad=True)
    compiled = aottrain.compile(pooled, capture="trace", kernel="cpp", decisions="default")
    tangent = torch.randn_like(pooled(x))
    (got,), (wanted,) = (torch.autograd.grad(call(x), x, tangent) for call in (compiled, pooled))
    (graph,) = compiled.report.graphs
    assert any("max_pool_scatter" in str(call) for call in graph.library_calls) == (dtype is not torch.bfloat16)
    assert_close(got, wanted) if dtype is torch.bfloat16 else torch.testing.assert_close(got, wanted, rtol=0, atol=0)
