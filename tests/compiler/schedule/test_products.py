"""What multiplies, where the answer differs by how an operand lies."""

from __future__ import annotations

import pytest
import torch

import aottrain
from aottrain.compiler.schedule import products
from aottrain.ir.settings.decisions import ATEN, ONEDNN, Decision, Record, Timing
from aottrain.measure.decisions import deciding
from aottrain.ops.products.libraries import PRODUCTS, _transposed_runs, multiplies_transposed
from aottrain.ops.products.onednn import has_onednn, product, product_by_transpose
from aottrain.toolchain.native import find_compiler

pytestmark = [
    pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN"),
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
]

ROWS = 1024


def decision(key, choice):
    return Decision("products", key, choice, "measured", {ATEN: Timing(3e-3), ONEDNN: Timing(2e-3)})


@pytest.mark.parametrize("tall, wide", [(ATEN, ATEN), (ONEDNN, ATEN), (ATEN, ONEDNN), (ONEDNN, ONEDNN)])
def test_what_multiplies_transposed_operands_is_asked_for_them(tall, wide, monkeypatch):
    """The gradients of weights: of the layer that widens it is tall, of the one that narrows it wide."""
    monkeypatch.setattr(products, "choose_library", lambda: decision("float32", ONEDNN))
    answers = {True: decision("tall", tall), False: decision("wide", wide)}
    monkeypatch.setattr(products, "multiplies_transposed", answers.__getitem__)
    torch.manual_seed(0)
    wide_layer, narrow_layer = torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False)
    model = torch.nn.Sequential(wide_layer, torch.nn.ReLU(), narrow_layer)
    x = torch.randn(ROWS, 64)
    step = aottrain.compile(model, kernel="cpp", capture="trace", on_unsupported="error")
    got = torch.autograd.grad(step(x).sum(), list(model.parameters()))
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    calls = step.report.graphs[0].library_calls
    by_onednn = {"onednn transposed": int(tall == ONEDNN), "onednn": 3 + (wide == ONEDNN)}
    assert {name: calls.get(f"aten.mm.default ({name})", 0) for name in by_onednn} == by_onednn


def test_where_nothing_is_measured_aten_multiplies_them():
    key = "float32, transposed on the left, tall"
    with deciding(Record(())):
        assert multiplies_transposed(tall=True).choice == ATEN
    with deciding(Record((decision(key, ONEDNN),))):
        assert multiplies_transposed(tall=True).choice == ONEDNN
        assert multiplies_transposed(tall=False).choice == ATEN


@pytest.mark.parametrize("function", [product, product_by_transpose])
def test_what_is_timed_is_the_same_product(function):
    assert function in PRODUCTS.values()
    runs = _transposed_runs(6, 5, 4, function)
    results = [runs[name].call() for name in (ATEN, ONEDNN)]
    assert torch.equal(*results) and results[0].shape == (6, 4)
