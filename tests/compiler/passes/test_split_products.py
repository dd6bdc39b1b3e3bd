"""split_products: products of one or few terms as multiplications and sums, in the kernels of their neighbours."""

from __future__ import annotations

import pytest
import torch

import aottrain
from aottrain.compiler.passes.splits.products import split_products
from aottrain.ir.graph import OutputKind, calls, spec_of
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import joint_of, leaf
from tests.numerics.tolerance import assert_close

aten = torch.ops.aten
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


def weigh_experts(x, w):
    return torch.einsum("enw,ne->nw", x, w)


def rows(x, y):
    return torch.bmm(x, y.transpose(1, 2))


NARROW = {
    "a sum over experts": (weigh_experts, (leaf(4, 6, 16), leaf(6, 4, seed=1))),
    "outer products": (torch.bmm, (leaf(3, 6, 1), leaf(3, 1, 5, seed=1))),
    "outer products of views": (lambda x, y: x.mT @ y, (leaf(3, 1, 6), leaf(3, 1, 5, seed=1))),
    "a column each": (rows, (leaf(3, 6, 32), leaf(3, 1, 32, seed=1))),
    "a row each": (rows, (leaf(3, 1, 32), leaf(3, 6, 32, seed=1))),
    "a number each": (rows, (leaf(3, 1, 32), leaf(3, 1, 32, seed=1))),
}


@needs_compiler
@pytest.mark.parametrize("name", NARROW)
def test_narrow_products_are_sums_of_few_terms(name):
    function, inputs = NARROW[name]
    joint = joint_of(function, *inputs)
    split = split_products(joint)
    assert not {aten.mm.default, aten.bmm.default} & {node.target for node in calls(split.graph)}
    for one, other in zip(*(each.outputs_of(*OutputKind) for each in (split, joint)), strict=True):
        assert spec_of(one) == spec_of(other)
    compiled = aottrain.compile(function, kernel="cpp", capture="trace", on_unsupported="error")
    got, wanted = compiled(*inputs), function(*inputs)
    assert got.stride() == wanted.stride()
    assert_close(got, wanted)
    cotangent = torch.ones_like(wanted)
    for one, other in zip(*(torch.autograd.grad(y, inputs, cotangent) for y in (got, wanted)), strict=True):
        assert one.stride() == other.stride()
        assert_close(one, other)


def test_an_outer_product():
    x, y = leaf(6, 1).detach(), leaf(1, 5, seed=1).detach()
    joint = joint_of(torch.mm, x, y)
    assert [node.target for node in calls(split_products(joint).graph)] == [aten.mul.Tensor]
    compiled = aottrain.compile(torch.mm, kernel="aten", capture="trace", on_unsupported="error")
    assert torch.equal(compiled(x, y), x @ y)


@pytest.mark.parametrize(
    "function, inputs",
    [
        (torch.bmm, (leaf(3, 6, 16), leaf(3, 16, 5, seed=1))),
        (torch.bmm, (leaf(1, 6, 16), leaf(1, 16, 1, seed=1))),  # one matrix by a vector is a library's
        (torch.mm, (leaf(6, 16), leaf(16, 1, seed=1))),
        (lambda x, y: torch.bmm(x.bfloat16(), y.bfloat16()), (leaf(3, 6, 1), leaf(3, 1, 5, seed=1))),
    ],
    ids=["wide", "one matrix", "a matrix by a vector", "bfloat16"],
)
def test_others_stay(function, inputs):
    with torch.no_grad():
        joint = joint_of(function, *(value.detach() for value in inputs))
    assert split_products(joint) is joint
