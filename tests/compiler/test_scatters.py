"""Gradients of lookups: rows are added in order, whole, and the values stay."""

from __future__ import annotations

import pytest
import torch

import aottrain
from aottrain.toolchain.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
INDEX = torch.tensor([3, 0, -1, 3, 7, 2, -8, 3] * 16)
PUT, ADD = "aten.index_put.default", "aten.index_add.default"


def rows(x):
    return x.sin()[INDEX]


def inner(x):
    return x.view(4, 8, -1).sin()[:, INDEX]


def many_dims(x):
    return x.sin()[INDEX.view(8, 16)]


def short_index(x):
    return x.sin()[INDEX.int()]


def few(x):
    return x[:, :4].sin()[INDEX]


def two(x):
    return x.sin()[INDEX, INDEX]


def written(x):
    return x.sin().index_put((INDEX,), x.cos()[:1].expand(128, -1) * 2, accumulate=True)


@pytest.mark.parametrize(
    ("function", "added"),
    ((rows, 1), (inner, 1), (many_dims, 1), (short_index, 1), (few, 0), (two, 0), (written, 1)),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_large_lookups_are_added_row_by_row(function, added):
    x = torch.randn(32 if function is inner else 8, 8192 if function is not inner else 128).requires_grad_()
    call = aottrain.compile(function, capture="trace", kernel="cpp", on_unsupported="error")
    weight = torch.randn_like(function(x))
    wanted = torch.autograd.grad((function(x.double()) * weight).sum(), x)[0]
    got = torch.autograd.grad((call(x) * weight).sum(), x)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    calls = call.report.graphs[0].library_calls
    assert calls.get(ADD, 0) == added
    assert calls.get(PUT, 0) == (1 - added)


def test_the_same_sums_every_time():
    x = torch.randn(8, 8192).requires_grad_()
    call = aottrain.compile(rows, capture="trace", kernel="cpp")
    found = [torch.autograd.grad(call(x).square().sum(), x)[0] for _ in range(3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_an_index_out_of_range_is_an_error():
    def function(x, index):
        return x.index_put((index,), x[:1].expand(128, -1), accumulate=True)

    call = aottrain.compile(function, capture="trace", kernel="cpp")
    call(torch.randn(8, 512), INDEX)
    with pytest.raises((IndexError, RuntimeError)):
        call(torch.randn(8, 512), INDEX + 8)
