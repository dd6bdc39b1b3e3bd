"""Products by a function of our own, where it is the fastest: which ones, into planned memory, as predicted."""

from __future__ import annotations

import pytest
import torch

import aottrain
from aottrain.compiler.passes import chunk_loss_heads
from aottrain.compiler.schedule import products
from aottrain.ir.kernels.tiles import product_scratch_bytes
from aottrain.ir.settings.decisions import ATEN, ONEDNN, OWN, Decision, Timing
from aottrain.metrics.memory import watch_cpu_peak
from aottrain.ops.products import libraries
from aottrain.ops.products.libraries import fastest
from aottrain.toolchain.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

ROWS = 512
NAMES = ("aten.mm.default (own product)", "aten.addmm.default (own product with bias)")


@pytest.fixture
def fastest_here(monkeypatch):
    """A machine on which our own function multiplies fastest."""
    decision = Decision("products", "float32", OWN, "measured", {ATEN: Timing(3e-3), OWN: Timing(2e-3)})
    monkeypatch.setattr(products, "choose_library", lambda: decision)
    monkeypatch.setattr(chunk_loss_heads, "chosen_library", lambda: OWN)


class Layers(torch.nn.Module):
    """A layer with a bias, one without, one that is too narrow to be packed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(96, 128), torch.nn.Linear(128, 96, bias=False)
        self.narrow = torch.nn.Linear(96, 8)

    def forward(self, x):
        hidden = self.second(torch.nn.functional.gelu(self.first(x)))
        return self.narrow(torch.nn.functional.gelu(hidden)).square().mean()


def step_of(model, **options):
    return aottrain.compile(model, kernel="cpp", capture="trace", on_unsupported="error", **options)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_which_products_and_their_gradients(fastest_here, precision):
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(ROWS, 96, requires_grad=True)
    expected = torch.autograd.grad(model(x), [x, *model.parameters()])
    step = step_of(model)
    try:
        torch.set_float32_matmul_precision(precision)  # read at each call, as ATen does
        got = torch.autograd.grad(step(x), [x, *model.parameters()])
    finally:
        torch.set_float32_matmul_precision("highest")
    # Of four layers' products, each way; of the largest number of each.
    tolerance = 1e-5 if precision == "highest" else 1e-3
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()
    calls = step.report.graphs[0].library_calls
    # Forward of both wide layers; the gradients of their weights, and of what goes into them.
    assert [calls.get(name, 0) for name in NAMES] == [5, 1]
    assert calls["aten.addmm.default"] == 1  # the narrow layer's
    reason = "a function of our own, in pieces of bfloat16, multiplies 1.50 times as fast as aten.mm"
    assert products._reason(products.choose_library()).startswith(reason)


def test_the_predicted_peak_counts_what_they_compute_in(fastest_here):
    model, x = Layers(), torch.randn(ROWS, 96)
    step = step_of(model)
    step(x.requires_grad_()).backward()
    model.zero_grad()
    x.grad = None
    graph = step.report.graphs[0]
    with watch_cpu_peak([*model.parameters(), x]) as peak:
        step(x).backward()
    scratch_bytes = product_scratch_bytes(128, ROWS, 96, torch.get_num_threads())
    assert graph.predicted_peak_bytes > scratch_bytes > 0.1 * graph.predicted_peak_bytes
    assert graph.predicted_peak_bytes == pytest.approx(peak.num_bytes, rel=0.01)


def test_takes_no_memory_that_a_budget_counts(fastest_here):
    model, x = Layers(), torch.randn(ROWS, 96, requires_grad=True)
    step = step_of(model, budget=0.0)
    step(x).backward()
    assert not any("own product" in name for name in step.report.graphs[0].library_calls)


def test_open_sizes_are_atens(fastest_here):
    model = Layers()
    step = step_of(model, dynamic=True)
    for rows in (200, 300, 400):
        step(torch.randn(rows, 96)).backward()
    assert not any("own product" in name for graph in step.report.graphs for name in graph.library_calls)


def test_the_loss_head_is_told(fastest_here):
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(4096, 64), torch.randn(4096, 64), torch.randint(0, 4096, (4096,))

    def loss(hidden, weight):
        return torch.nn.functional.cross_entropy(hidden @ weight.t(), target)

    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    step = step_of(loss)
    got = torch.autograd.grad(step(*leaves), leaves)
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize(("times", "name"), [
    ({ATEN: 1.0, ONEDNN: 0.98, OWN: 0.96}, ATEN),
    ({ATEN: 1.0, ONEDNN: 0.8, OWN: 0.9}, ONEDNN),
    ({ATEN: 1.0, OWN: 0.9}, OWN),
], ids=["none is clearly faster", "oneDNN", "ours"])  # fmt: skip
def test_the_fastest(times, name):
    assert fastest({key: Timing(seconds) for key, seconds in times.items()}) == name


def test_a_record_of_another_processor_is_not_followed_without_tiles(monkeypatch):
    recorded = Decision("products", "float32", OWN, "record")
    monkeypatch.setattr(libraries, "decide", lambda *_: recorded)
    monkeypatch.setattr(libraries, "has_onednn", lambda: True)
    for has, found in ((True, recorded), (False, None)):
        monkeypatch.setattr(libraries, "has_tiles", lambda has=has: has)
        assert libraries.choose_library() is found
