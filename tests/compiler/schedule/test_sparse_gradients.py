"""Sparse gradients beside generated kernels: a sparse tensor keeps the memory of its indices and values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import leaf
from tests.skips import NO_COMPILER

pytestmark = pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER)
INDEX = torch.tensor([1, 0, 0])


def alone(table, mask):
    return F.embedding(INDEX, table, sparse=True) * mask


def beside_another_use(table, mask):
    """What eager adds up is sparse and dense."""
    return torch.cat([F.embedding(INDEX, table, sparse=True) * mask, table * table.sign()])


def by_made_indices(table, mask):
    return F.embedding((INDEX + 1) % 3, table, sparse=True) * mask.exp() + (mask.exp() * table.abs()[:3]).sum(0)


def gathered(table, mask):
    return torch.gather(table, 1, INDEX.expand(4, 3), sparse_grad=True)[:3] * mask[:, :3] + table[:3, :3].sin()


def gradient(function, table, mask):
    out = function(table, mask)
    return torch.autograd.grad(out, table, torch.linspace(-1, 1, out.numel()).view(out.shape).cos())[0]


@pytest.mark.parametrize("program", [alone, beside_another_use, by_made_indices, gathered])
def test_gradients_are_eagers_and_stay(program):
    compiled = aottrain.compile(program, capture="trace", kernel="cpp", on_unsupported="error")
    wanted, got = [], []
    for seed in range(4):  # a later step may not write over what an earlier one gave
        table, mask = leaf(4, 8, seed=seed), leaf(3, 8, seed=seed + 10).detach()
        wanted.append(gradient(program, table, mask))
        got.append(gradient(compiled, table, mask))
    assert compiled.report.graphs[0].kernels
    for one, other in zip(wanted, got, strict=True):
        assert one.layout is other.layout
        torch.testing.assert_close(other.to_dense(), one.to_dense(), rtol=1e-4, atol=1e-4)


class WithImages(torch.nn.Module):
    """A table beside a convolution: what lays images in channels_last looks at the layout of every result."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.convolution = kind, torch.nn.Conv2d(3, 8, 3, padding=1)
        self.table = torch.nn.Embedding(7, 8, sparse=True)
        self.images = torch.nn.Parameter(torch.linspace(-1, 1, 4 * 8 * 36).view(4, 8, 6, 6))

    def forward(self, x):
        images = F.relu(self.convolution(x))
        rows, columns = torch.tensor([1, 2, 1, 3]), torch.zeros(4, 8, 6, 3, dtype=torch.long)
        if self.kind == "embedding":
            return images.mean((2, 3)) + self.table(rows)
        if self.kind == "scale":
            return images * self.table(rows)[:, :, None, None] + self.table.weight.sum()
        if self.kind == "gathered images":
            return images.mean() + torch.gather(self.images, 3, columns, sparse_grad=True)
        return torch.gather(images, 3, columns, sparse_grad=True).sum() + (images * images).mean()


@pytest.mark.parametrize("kind", ["embedding", "scale", "gathered images", "gathered from a result"])
def test_beside_convolutions(kind):
    model, x = WithImages(kind), torch.linspace(-2, 2, 4 * 3 * 36).sin().view(4, 3, 6, 6)
    compiled = aottrain.compile(model, capture="trace", kernel="cpp", on_unsupported="error")
    found = []
    for target in (model, compiled):
        model.zero_grad()
        target(x).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert compiled.report.graphs[0].kernels and not compiled.report.fallbacks
    for wanted, got in zip(*found, strict=True):
        assert (wanted is None) is (got is None)
        if wanted is not None:
            assert got.layout is wanted.layout
            torch.testing.assert_close(got.to_dense(), wanted.to_dense(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kernel", ["aten", "cpp"])
def test_the_other_part_of_a_dense_sum_may_be_undefined(kernel):
    """Of two results one goes unused: what is left of the sum is sparse."""

    def program(table):
        changed = table.sin() - table
        return changed, F.embedding(INDEX, changed, sparse=True)

    compiled = aottrain.compile(program, capture="trace", kernel=kernel, on_unsupported="error")
    for unused in (0, 1):
        table = leaf(4, 8)
        got, wanted = (torch.autograd.grad(f(table)[1 - unused].sum(), table)[0] for f in (compiled, program))
        torch.testing.assert_close(got.to_dense(), wanted.to_dense())


@pytest.mark.parametrize("kernel", ["aten", "cpp"])
def test_a_parameters_own_sum_is_sparse_where_the_dense_part_does_not_come(kernel):
    def program(table):
        return table.sin(), F.embedding(INDEX, table, sparse=True)

    compiled = aottrain.compile(program, capture="trace", kernel=kernel, on_unsupported="error")
    table = leaf(4, 8)
    got, wanted = (torch.autograd.grad(f(table)[1].sum(), table)[0] for f in (compiled, program))
    assert got.layout is wanted.layout is torch.sparse_coo
    torch.testing.assert_close(got.to_dense(), wanted.to_dense())


def test_indices_that_the_forward_made_stay():
    """A residual in a block, which the next step does not take while anything refers to it."""

    def program(table, mask):
        return F.embedding((mask[:, 0] > 0).long() * 2 + 1, table, sparse=True) * mask

    compiled = aottrain.compile(program, capture="trace", kernel="cpp", partition="save_all", on_unsupported="error")
    wanted, got = [], []
    for seed in range(3):
        table, mask = leaf(4, 8, seed=seed), leaf(50_000, 8, seed=seed + 10).detach()
        wanted.append(gradient(program, table, mask))
        got.append(gradient(compiled, table, mask))
    for one, other in zip(wanted, got, strict=True):
        torch.testing.assert_close(other.to_dense(), one.to_dense(), rtol=1e-4, atol=1e-3)
