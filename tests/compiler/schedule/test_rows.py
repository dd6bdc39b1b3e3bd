"""Rows that are added to others by their numbers: which calls our own function does, bit for bit as ATen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.ops import rows
from aottrain.ops.rows import embedding_gradient, index_add, index_add_, scatter_add, scatter_add_
from aottrain.toolchain.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
INDEX = torch.randint(0, 50, (300,))


def added_by(function, *inputs):
    """The library calls that add rows, after both gradients were compared."""
    step = aottrain.compile(function, kernel="cpp", capture="trace", on_unsupported="error")
    gradients = []
    for call in (step, function):
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        call(*given).square().sum().backward()
        gradients.append([x.grad for x in given if x.is_floating_point()])
    for mine, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, eager)
    return {name for name in step.report.graphs[0].library_calls if "index_add" in name or "embedding_dense" in name}


def test_messages_and_gradients_of_lookups_are_added_by_our_own_function():
    x, index = torch.randn(50, 24), INDEX
    own = {"aten.index_add.default (own index_add)"}
    assert added_by(lambda x, i: torch.zeros(50, 24).index_add(0, i, x.sin()[i] * 2), x, index) == own
    own = {"aten.embedding_dense_backward.default (own embedding_dense_backward)"}
    assert added_by(lambda w, i: F.embedding(i, w), x, index) == own
    assert added_by(lambda w, i: F.embedding(i.view(30, 10), w, padding_idx=3).transpose(0, 1), x, index) == own


def test_other_calls_stay_atens():
    x = torch.randn(24, 50)
    assert "own" not in str(added_by(lambda x, i: torch.zeros(24, 50).index_add(1, i, x[:, i]), x, INDEX))
    w = torch.randn(50, 8)
    assert "own" not in str(added_by(lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), w, INDEX))
    assert "own" not in str(added_by(lambda w, i: F.embedding(i, w), w.double(), INDEX))
    assert "own" not in str(added_by(lambda w, i: F.embedding(i, w), w, INDEX.int()))


@pytest.mark.parametrize("width", [(), (1,), (3,), (16,), (5, 7), (300,)])
def test_rows_are_added_in_atens_order(width):
    into, rows = torch.randn(50, *width), torch.randn(300, *width) * 1e3
    expected = into.index_add(0, INDEX, rows)
    assert torch.equal(index_add(into, 0, INDEX, rows), expected)
    assert index_add_(into, 0, INDEX, rows) is into and torch.equal(into, expected)


@pytest.mark.parametrize("padding", [-1, 7])
@pytest.mark.parametrize(
    "lay", [lambda g: g, lambda g: g.transpose(0, 1).contiguous().transpose(0, 1), lambda g: g[:1]]
)
def test_a_tables_gradient_is_atens(padding, lay):
    gradient, index = lay(torch.randn(10, 30, 33)), INDEX.view(10, 30)
    gradient = gradient.expand(10, 30, 33)
    expected = torch.ops.aten.embedding_dense_backward(gradient, index, 50, padding, False)
    assert torch.equal(embedding_gradient(gradient, index, 50, padding, False), expected)
    part = torch.randn(10, 30, 99)[..., ::3]
    expected = torch.ops.aten.embedding_dense_backward(part, index.t().reshape(10, 30), 50, padding, False)
    assert torch.equal(embedding_gradient(part, index.t().reshape(10, 30), 50, padding, False), expected)


def test_a_row_that_nothing_was_added_to_before_is_a_sum_of_zero_and_it():
    """Zeros have the sign that a sum gives them, and rows without a number are zeros, whatever was in the memory."""
    gradient = torch.full((3, 700), -0.0)
    found = torch.full((50, 700), 7.0)
    assert rows._adds(found, torch.tensor([4, 9, 4]), gradient, (3, 50, 700, 700, -1, *rows._AS_THEY_ARE), fresh=True)
    assert not found.any() and not torch.signbit(found).any()


@pytest.mark.parametrize("wrong", [50, -1])
def test_a_number_outside_raises_before_anything_is_written(wrong):
    into, index = torch.zeros(50, 4), torch.tensor([0, 1, wrong])
    with pytest.raises(IndexError, match="out of range"):
        index_add_(into, 0, index, torch.ones(3, 4))
    assert not into.any()
    step = aottrain.compile(lambda x, i: x.sin().index_add(0, i, torch.ones(3, 4)), kernel="cpp", capture="trace")
    with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
        step(torch.zeros(50, 4), index)


def spread(index, rows):
    """One number all along each row."""
    return index.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)


def test_rows_that_are_scattered_by_one_number_each_are_added_by_our_own_function():
    x = torch.randn(50, 24)
    own = "aten.scatter_add.default (own scatter_add)"

    def scattered(into, i, index=None):
        rows = (x.sin()[i] * 2).unsqueeze(1).expand(-1, 3, -1).contiguous() * into[:1]
        return torch.zeros(50, 3, 24).scatter_add(0, spread(i, rows) if index is None else index, rows)

    step = aottrain.compile(scattered, kernel="cpp", capture="trace", on_unsupported="error")
    into = torch.randn(50, 3, 24, requires_grad=True)
    torch.testing.assert_close(step(into, INDEX), scattered(into, INDEX))
    assert own in step.report.graphs[0].library_calls
    whole = spread(INDEX, torch.empty(300, 3, 24)).contiguous()  # any numbers, as far as is known
    step = aottrain.compile(scattered, kernel="cpp", capture="trace", on_unsupported="error")
    torch.testing.assert_close(step(into, INDEX, whole), scattered(into, INDEX, whole))
    assert own not in step.report.graphs[0].library_calls


@pytest.mark.parametrize("width", [(2,), (16,), (5, 7)])
def test_scattered_rows_are_added_in_order(width):
    into, rows = torch.randn(50, *width), torch.randn(300, *width) * 1e3
    expected = into.index_add(0, INDEX, rows)
    assert torch.equal(scatter_add(into, 0, spread(INDEX, rows), rows), expected)
    assert scatter_add_(into, 0, spread(INDEX, rows), rows) is into and torch.equal(into, expected)


@pytest.mark.parametrize("wrong", [50, -1])
def test_a_scattered_row_outside_raises_atens_error_before_anything_is_written(wrong):
    into, rows = torch.zeros(50, 4), torch.ones(3, 4)
    index = spread(torch.tensor([0, 1, wrong]), rows)
    with pytest.raises(RuntimeError) as eager:
        into.scatter_add(0, index, rows)
    with pytest.raises(type(eager.value)) as own:
        scatter_add_(into, 0, index, rows)
    assert str(own.value) == str(eager.value) and not into.any()
