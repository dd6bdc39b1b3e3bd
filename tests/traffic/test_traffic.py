"""What programs move of the least that they could: it may only come closer. Nothing runs."""

from __future__ import annotations

import collections
import inspect
import sys

import pytest
import torch

import aottrain
from aottrain.compiler import traffic
from tests.recorded import RECORDED_TORCH, on_recorded_torch
from tests.sampling import crossed
from tests.traffic.measuring import BACKENDS, DTYPES, NAMES, traffic_of
from tests.traffic.record import change, key_of, load

needs_recorded_torch = pytest.mark.skipif(
    not on_recorded_torch(), reason=f"the record is of torch {RECORDED_TORCH}, others decompose otherwise"
)


@needs_recorded_torch
@pytest.mark.parametrize(("name", "backend", "dtype"), crossed(NAMES, BACKENDS, DTYPES, one_in=3))
def test_no_pattern_moves_more_than_recorded(name: str, backend: str, dtype: str) -> None:
    text = change(name, key_of(backend, dtype), traffic_of(name, dtype, backend).ratio)
    assert text is None, text


def test_every_pattern_is_recorded() -> None:
    keys = {key_of(backend, dtype) for backend in BACKENDS for dtype in DTYPES}
    assert {name: set(ratios) for name, ratios in load().items()} == {name: keys for name in NAMES}


MIB = 1 << 20
_N = 8 * MIB  # bytes of 2048 x 1024 numbers in float32


@pytest.mark.parametrize(
    ("name", "least", "exactly"),
    [
        ("softmax", 5 * _N, True),  # a row in, a row out; the tangent and the result in, the gradient out
        ("layer_norm", 5 * _N, False),  # besides, weights and their gradients
        ("gate_silu", 3 * _N + 5 * _N, True),
        ("dropout", 4 * _N, False),  # the backward draws again
        ("cross_entropy", 3 * 64 * MIB, False),  # nothing of that size need be saved
        ("batch_norm_of_rows", 4 * _N + 5 * _N, False),  # the mean, the spread, the result; the sums, the gradient
        ("hinge_of_classes", 3 * 64 * MIB, False),  # what is looked up as well is read whole
        ("factored_update", 20 * MIB, False),  # two in, one out, and the gradient for each of two means over all
    ],
)
def test_the_least_is_what_one_pass_each_way_moves(name: str, least: int, exactly: bool) -> None:
    traffic = traffic_of(name, "float32", "triton")
    assert traffic.moved >= 0.999 * traffic.least
    assert traffic.least == least if exactly else least <= traffic.least <= 1.01 * least


def test_the_ratio_of_an_optimizer_counts_each_list_once_each_way() -> None:
    # Before the norm the gradient; then gradient, parameter and two states in, parameter and two states out.
    assert traffic_of("optimizer_adamw", "float32", "cpp").least == 4 * (1 + 4 + 3)


def test_each_call_is_looked_at_once(monkeypatch) -> None:
    """Of a deep model's loop nests each was walked for every product that it leads to, and lowered each time."""
    asked = collections.Counter[str]()
    real = traffic.rules_for

    def rules_for(node):
        asked[node.name] += 1
        return real(node)

    monkeypatch.setattr(traffic, "rules_for", rules_for)
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)) for _ in range(6)]
    report = aottrain.compile(torch.nn.Sequential(*layers), capture="trace", kernel="cpp").prepare(torch.randn(4, 8))
    assert report.traffic is not None and report.traffic.least > 0
    assert asked and max(asked.values()) <= 2, "for what it reads, and whether it is a sum"


def test_a_long_chain_of_products_is_counted_without_recursion():
    """As a recurrent network's steps are. Each border, and each depth before one, asks for those before it."""
    steps = 150

    def recurrent(h, w):
        for _ in range(steps):
            h = torch.tanh(h @ w)
        return h

    h, w = torch.randn(4, 8), torch.randn(8, 8) / 3
    step = aottrain.compile(recurrent, capture="trace", kernel="cpp")
    step(h, w)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        moved = step.report.graphs[0].traffic.moved
    finally:
        sys.setrecursionlimit(limit)
    assert moved >= steps * (4 * 8 * 2 + 8 * 8) * 4
