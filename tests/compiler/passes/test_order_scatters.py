"""Gradients of lookups: rows are added in order, whole, and the values stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import aottrain
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.compiler.schedule.order import schedule
from aottrain.metrics.memory import distinct_bytes, watch_cpu_peak
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import joint_of
from tests.numerics.tolerance import assert_close_as_sums

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
INDEX = torch.tensor([3, 0, -1, 3, 7, 2, -8, 3] * 16)
PUT, ADD = "aten.index_put.default", "aten.index_add.default"
OWN = f"{ADD} (own index_add)"
FRESH = "aten.embedding_dense_backward.default (own embedding_dense_backward)"


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


def two_of_other_ranks(x):
    """What is added has the shape that it would have for the first index alone."""
    return x.view(8, 32, 256).sin()[INDEX[:32], torch.arange(1024).view(32, 32) * 7 % 32]


def written(x):
    return x.sin().index_put((INDEX,), x.cos()[:1].expand(128, -1) * 2, accumulate=True)


@pytest.mark.parametrize(
    ("function", "added"),
    (
        (rows, 1),
        (inner, 1),
        (many_dims, 1),
        (short_index, 1),
        (few, 0),
        (two, 0),
        (two_of_other_ranks, 1),
        (written, 1),
    ),
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
    fresh = added and function in (
        rows,
        many_dims,
        two_of_other_ranks,
    )  # zeros, and whole rows of float32 along the first dimension
    assert calls.get(ADD, 0) + calls.get(OWN, 0) == added - fresh
    assert calls.get(FRESH, 0) == fresh and calls.get(PUT, 0) == (1 - added)


PLACES = torch.tensor([2, -1, 0, 2, 5, -8]), torch.tensor([1, 0, -3, 1, 1, 2])


@pytest.mark.parametrize(
    ("shape", "look_up", "puts"),
    [
        ((8, 3, 9000), lambda x: x[PLACES], 0),
        ((2, 8, 3, 9000), lambda x: x[:, PLACES[0], PLACES[1]], 0),
        ((8, 3, 9000), lambda x: x[PLACES[0][:, None], PLACES[1][:2].int()], 0),
        ((8, 3, 2, 9000), lambda x: x[PLACES[0], PLACES[1], 1 - PLACES[1] % 2], 0),
        ((8, 3, 9000), lambda x: x[PLACES].double(), 0),
        ((8, 9000, 3), lambda x: x[PLACES[0], :, PLACES[1]], 1),  # whose rows are none in memory
    ],
    ids=["first two", "in the middle", "of two ranks and types", "three", "cast", "apart"],
)
def test_rows_by_several_indices(shape, look_up, puts):
    """Some are named twice, some count from the end."""
    x = torch.randn(shape).requires_grad_()
    call = aottrain.compile(lambda x: look_up(x.sin()), capture="trace", kernel="cpp", on_unsupported="error")
    weight = torch.randn_like(look_up(x))
    wanted, got = (torch.autograd.grad(function(x), x, weight)[0] for function in (lambda x: look_up(x.sin()), call))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert call.report.graphs[0].library_calls.get(PUT, 0) == puts


class Put(torch.autograd.Function):
    """A backward that adds where nothing was looked up."""

    @staticmethod
    def forward(ctx, x, first, second):
        ctx.save_for_backward(first, second)
        return x.flatten(0, 1)[:6] * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_zeros(8, 3, 9000).index_put(ctx.saved_tensors, gradient, accumulate=True), None, None


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_index_that_is_out_of_range_raises_though_its_row_is_none_such(in_backward):
    """(7, 3) of (8, 3) would be the first row of the next eight: such puts stay as they are."""

    def put(x, first, second):
        return x.new_zeros(8, 3, 9000).index_put((first, second), x.flatten(0, 1)[:6], accumulate=True)

    function = Put.apply if in_backward else put
    x = torch.randn(8, 3, 9000, requires_grad=True)
    call = aottrain.compile(lambda *inputs: function(*inputs).sin(), capture="trace", kernel="cpp")

    def run(*indices):
        return torch.autograd.grad(call(x, *indices).sum(), x)[0]

    run(*PLACES)
    assert call.report.graphs[0].library_calls.get(PUT, 0) == 1
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        run(torch.zeros(6, dtype=torch.int64), torch.full((6,), 3))


def test_rows_that_a_program_adds_itself_stay_index_add():
    """Their index may be out of range, which ATen's gradient of embeddings would not say."""

    def program(x, index):
        return x.new_zeros(8, 8192).index_add(0, index, x)

    x, index = torch.randn(8, 8192), torch.arange(8)
    call = aottrain.compile(program, capture="trace", kernel="cpp")
    assert torch.equal(call(x, index), x)
    assert list(call.report.graphs[0].library_calls) == [OWN]
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        call(x, index + 1)


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


class Tied(nn.Module):
    """A table of embeddings that is looked up twice, and multiplied by: 2 MiB."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4096, 128, padding_idx=padding)
        self.between = nn.Linear(128, 128)

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        x = self.between(self.table(words)).sin() + self.table(others)
        return (x @ self.table.weight.t()).cos().mean()


@pytest.mark.parametrize("padding", [None, 3])
def test_what_was_looked_up_is_added_to_the_tables_other_gradient(padding):
    model, words = Tied(padding), torch.arange(256).view(2, 128) % 100
    truth = copy.deepcopy(model).double()
    wanted = torch.autograd.grad(truth(words, words // 2), list(truth.parameters()))
    call = aottrain.compile(model, kernel="cpp", workspaces=True, on_unsupported="error")
    got = torch.autograd.grad(call(words, words // 2), list(model.parameters()))
    for one, other in zip(got, wanted, strict=True):
        assert_close_as_sums(one, other, 256)  # places
    graph = call.report.graphs[0]
    assert graph.library_calls[OWN] == 2 and "embedding_dense_backward" not in str(graph.library_calls)


def test_the_gradient_of_a_table_that_is_used_twice_is_there_once():
    """GPT-2's is 147 MiB: what the last layer makes of it and what the lookup does were both whole in memory."""
    model, words = Tied(None), torch.arange(16).view(1, 16)
    call = aottrain.compile(model, kernel="cpp", workspaces=True, on_unsupported="error")
    call(words, words).backward()
    model.zero_grad(set_to_none=True)
    alive = [*model.parameters(), words]
    with watch_cpu_peak(alive) as peak:
        call(words, words).backward()
    predicted = call.report.graphs[0].predicted_peak_bytes
    assert abs(predicted - peak.num_bytes) <= 0.01 * predicted
    assert peak.num_bytes < distinct_bytes(alive) + 1.5 * (2 << 20)


def plain(x, w, rows, index):
    return (x @ w).index_add(0, index, rows)


def chained(x, w, rows, index):
    return (x @ w).index_add(0, index, rows).index_add(0, index // 2, rows.sin())


def seen_later(x, w, rows, index):
    product = x @ w
    return product.index_add(0, index, rows) * product


def returned(x, w, rows, index):
    product = x @ w
    return product, product.index_add(0, index, rows)


def added_to_itself(x, w, rows, index):
    product = (x @ w).sin()
    return product.index_add(0, index[:8], product)


def of_an_input(x, w, rows, index):
    return w.index_add(0, index, rows)


def of_a_part(x, w, rows, index):
    return (x @ w)[:, :256].index_add(0, index, rows[:, :256])


@pytest.mark.parametrize(
    ("function", "count"),
    ((plain, 1), (chained, 2), (seen_later, 0), (returned, 0), (added_to_itself, 0), (of_an_input, 0), (of_a_part, 0)),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_rows_are_added_in_place_where_nothing_else_sees_it(function, count):
    inputs = torch.randn(8, 8), torch.randn(8, 512), torch.randn(128, 512), INDEX % 8
    kept = [value.clone() for value in inputs]
    wanted = function(*inputs)
    joint = joint_of(function, *inputs)
    graph = apply_partition(joint, plan_partition(joint, "save_all")).forward
    assert sum(node.target is torch.ops.aten.index_add.default for node in schedule(graph).in_place) == count
    got = aottrain.compile(function, capture="trace", kernel="cpp", on_unsupported="error")(*inputs)
    torch.testing.assert_close(got, wanted)
    assert all(map(torch.equal, inputs, kept))


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_few_embeddings_is_made_of_sums(dtype, padding):
    """What is infinite stays in its own row."""
    types = torch.arange(2048).mul(7).remainder(3).view(8, 256)
    x, table = torch.randn(8, 256, 64, dtype=dtype), torch.randn(3, 64, dtype=dtype)
    cotangent = torch.randn(8, 256, 64, dtype=dtype)
    cotangent[0, 3] = torch.inf  # of type 0

    def program(x, table):
        return torch.tanh(x) + nn.functional.embedding(types, table, padding_idx=padding)

    compiled = aottrain.compile(program, kernel="cpp", capture="trace", on_unsupported="error")
    gradients = []
    for function in (compiled, program):
        inputs = [value.clone().requires_grad_() for value in (x, table)]
        gradients.append(torch.autograd.grad(function(*inputs), inputs, cotangent)[1])
    exact = torch.zeros(3, 64, dtype=torch.float64).index_add_(0, types.view(-1), cotangent.double().view(-1, 64))
    if padding is not None:
        exact[padding] = 0
    assert gradients[0].dtype is dtype and torch.isinf(gradients[0][0]).all()
    errors = [(gradient.double() - exact)[1:].abs().max() for gradient in gradients]
    assert errors[0] <= 1.5 * errors[1] + 1e-5
    report = compiled.prepare(x.clone().requires_grad_(), table.requires_grad_())
    assert not any("embedding_dense_backward" in str(call) for call in report.library_calls)
