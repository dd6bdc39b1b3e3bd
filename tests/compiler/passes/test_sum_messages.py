"""Messages along edges: looked up, scaled and added up by one call, to the last bit; which sums are none of these."""

from __future__ import annotations

import operator

import pytest
import torch

import aottrain
from aottrain.metrics.memory import watch_cpu_peak
from aottrain.ops import rows
from aottrain.toolchain.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
NODES, EDGES, WIDTH = 300, 2000, 24
OWN = "aottrain.sum_messages.default"


def edges(count=NODES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, count, (EDGES,), generator=generator)


SOURCE, TARGET = edges(), edges(seed=1)


def zeros(x):
    return torch.zeros_like(x)


def weighted(x, w):
    return zeros(x).index_add(0, TARGET, x[SOURCE] * w[:, None])


def into_zeros_of_their_type(x, w):
    messages = x[SOURCE] * w[:, None]
    return messages.new_zeros(NODES, WIDTH).index_add(0, TARGET, messages)


def from_the_end(x, w):
    return zeros(x).index_add(0, TARGET, w[:, None] * x[SOURCE - NODES])


def selected(x, w):
    return x.new_zeros(NODES, WIDTH).index_add(0, TARGET, x.index_select(0, SOURCE) * w.view(-1, 1))


def plain(x, w):
    return zeros(x).index_add(0, TARGET, x[SOURCE]) * w.mean()


def scattered(x, w):
    index = TARGET.view(-1, 1).expand(-1, WIDTH)
    return zeros(x).scatter_add(0, index, x.index_select(0, SOURCE) * w[:, None])


def of_heads(x, w):
    heads = x.view(NODES, 4, 6)
    weights = torch.stack([w, 2 * w, 1 - w, -w], 1)
    return zeros(heads).index_add(0, TARGET, heads[SOURCE] * weights[:, :, None]).flatten(1)


def attention(x, w):
    """As a graph attention network has it: the weights are made of both ends, and a softmax over what arrives."""
    scores = (x[SOURCE] * x[TARGET]).sum(1).exp()
    total = x.new_zeros(NODES).index_add(0, TARGET, scores)
    return zeros(x).index_add(0, TARGET, x[SOURCE] * (scores / total[TARGET])[:, None]) + w.mean()


def compiled(function, **options):
    return aottrain.compile(function, capture="trace", kernel="cpp", on_unsupported="error", **options)


def operands():
    torch.manual_seed(0)
    return torch.randn(NODES, WIDTH, requires_grad=True), torch.rand(EDGES, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "calls"),
    # Forward and backward.
    [
        (weighted, 2),
        (into_zeros_of_their_type, 2),
        (from_the_end, 2),
        (selected, 2),
        (plain, 2),
        (scattered, 2),
        (of_heads, 2),
        (attention, 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_messages_are_summed_as_eager_does(function, calls):
    x, w = operands()
    step = compiled(function)
    out, expected = step(x, w), function(x, w)
    assert torch.equal(out, expected) or function is attention  # whose weights kernels round otherwise
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(out)
    for one, other in zip(*(torch.autograd.grad(y, (x, w), weights) for y in (out, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert step.report.graphs[0].library_calls.get(OWN, 0) == calls


def short(x, w):
    return zeros(x[:, :8]).index_add(0, TARGET, x[SOURCE, :8] * w[:, None])


def added_to_others(x, w):
    return x.index_add(0, TARGET, x[SOURCE] * w[:, None])


def of_elements(x, w):
    return zeros(x).index_add(0, TARGET, x[SOURCE] * w[:, None].expand(-1, WIDTH).sin())


def along_columns(x, w):
    return x.new_zeros(WIDTH, NODES).index_add(1, TARGET, (x[SOURCE] * w[:, None]).t())


def read_twice(x, w):
    messages = x[SOURCE] * w[:, None]
    return zeros(x).index_add(0, TARGET, messages) + messages.square().sum()


def parts_of_rows(x, w):
    """A gather takes as many columns as it has numbers."""
    index = SOURCE.view(-1, 1).expand(-1, 20)
    return x.new_zeros(NODES, 20).index_add(0, TARGET, x.gather(0, index) * w[:, None])


def spread_over_heads(x, w):
    weights = torch.stack([w, 2 * w], 1)
    return x.new_zeros(NODES, 2, WIDTH).index_add(0, TARGET, x[SOURCE][:, None] * weights[:, :, None])


def of_one_of_two(x, w):
    weights = torch.stack([w, 2 * w], 1)[:1000]
    return x.new_zeros(NODES, 2, WIDTH).index_add(0, TARGET[:1000], x[:, None][SOURCE[:1000]] * weights[:, :, None])


def of_pairs(x, w):
    pairs = x.view(150, 2, WIDTH)[SOURCE[:1000] % 150] * w[:1000, None, None]
    return zeros(x).index_add(0, TARGET, pairs.view(EDGES, WIDTH))


def doubled(x, w):
    return zeros(x).index_add(0, TARGET, x[SOURCE] * w[:, None], alpha=2)


def of_doubles(x, w):
    return zeros(x).double().index_add(0, TARGET, x.double()[SOURCE] * w[:, None])


@pytest.mark.parametrize(
    "function",
    [
        *(short, parts_of_rows, added_to_others, of_elements, along_columns, read_twice, spread_over_heads),
        *(of_one_of_two, of_pairs, doubled, of_doubles),
    ],
)
def test_what_stays_as_it_is(function):
    x, w = operands()
    step = compiled(function)
    with torch.no_grad():
        torch.testing.assert_close(step(x, w), function(x, w), rtol=1e-5, atol=1e-4)
    assert OWN not in step.report.graphs[0].library_calls


@pytest.mark.parametrize(
    ("source", "target", "look_up"),
    [
        *((*numbers, operator.getitem) for numbers in ((NODES, 0), (-NODES - 1, 0), (0, NODES), (0, -1))),
        (-1, 0, lambda x, source: x.index_select(0, source)),
    ],
)
def test_a_number_outside_raises_as_in_eager(source, target, look_up):
    x, w = (each.detach() for each in operands())
    numbers = torch.full((EDGES,), source), torch.full((EDGES,), target)

    def program(x, w, source, target):
        return zeros(x).index_add(0, target, look_up(x, source) * w[:, None])

    step = compiled(program)
    assert torch.equal(step(x, w, SOURCE, TARGET), weighted(x, w))
    for call in (step, program):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            call(x, w, *numbers)


def test_without_a_compiler_it_is_the_operators_that_it_stands_for(monkeypatch):
    x, w = (each.detach() for each in operands())
    arguments = x, SOURCE, w[:, None].expand(-1, 3).contiguous(), TARGET, NODES, True
    own = rows.sum_messages(*arguments)
    monkeypatch.setattr(rows, "find_compiler", lambda: None)
    assert torch.equal(rows.sum_messages(*arguments), own)
    assert torch.equal(own, weighted(x, w))


def test_what_is_sent_is_nowhere_in_memory():
    x, w = operands()
    w = w.detach()
    step, weights = compiled(weighted, workspaces=True), torch.randn(NODES, WIDTH)
    torch.autograd.grad(step(x, w), x, weights)
    with watch_cpu_peak([x, w, weights, SOURCE, TARGET]) as peak:
        torch.autograd.grad(step(x, w), x, weights)
    messages = EDGES * WIDTH * 4
    graph = step.report.graphs[0]
    assert graph.predicted_peak_bytes == pytest.approx(peak.num_bytes, rel=0.01)
    assert sum(graph.memory.get(kind, 0) for kind in ("temporaries", "arena", "saved", "workspaces")) < messages
