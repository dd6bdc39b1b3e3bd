"""Products by a function of our own, where it is the fastest: which ones, into planned memory, as predicted."""

from __future__ import annotations

import pytest
import torch

import aottrain
from aottrain.compiler.passes import chunk_loss_heads
from aottrain.compiler.schedule import products
from aottrain.ir.kernels import tiles
from aottrain.ir.settings.decisions import ATEN, ONEDNN, OWN, Decision, Timing
from aottrain.measure.decisions import Timed
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
    times = {ATEN: Timing(3e-3), OWN: Timing(2e-3)}
    decision = Decision("products", "float32", OWN, "measured", times)
    monkeypatch.setattr(products, "choose_library", lambda: decision)
    monkeypatch.setattr(
        products, "multiplies_narrow", lambda form: Decision("products", f"bfloat16, {form}", OWN, "measured", times)
    )
    monkeypatch.setattr(products, "multiplies_transposed_by_tiles", lambda: decision)
    monkeypatch.setattr(chunk_loss_heads, "chosen_library", lambda dtype: OWN)


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


def test_bfloat16_under_autocast(fastest_here):
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(ROWS, 96, requires_grad=True)

    def autocast(call):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(call(x), [x, *model.parameters()])

    expected, step = autocast(model), step_of(model)
    for one, other in zip(autocast(step), expected, strict=True):
        assert (one - other).abs().max() <= 2**-5 * other.abs().max()  # of four layers' roundings, each way
    calls = step.report.graphs[0].library_calls
    assert [calls.get(name, 0) for name in NAMES] == [5, 1]


@pytest.mark.parametrize(("form", "left"), [
    (libraries.PLAIN, lambda x: x), (libraries.TRANSPOSED, lambda x: x.t()), (libraries.BIASED, lambda x: x),
])  # fmt: skip
def test_each_form_of_bfloat16_is_asked_for(monkeypatch, form, left):
    """Only that of the product is fastest by our own function."""
    monkeypatch.setattr(
        products,
        "multiplies_narrow",
        lambda asked: Decision("products", asked, OWN if asked == form else ATEN, "record"),
    )
    x, y, bias = (torch.randn(*shape).bfloat16() for shape in ((128, 128), (128, 96), (96,)))
    by = step_of(lambda x, y, bias: (left(x) @ y, torch.addmm(bias, x, y))[form == libraries.BIASED])
    by(x, y, bias)
    assert any("own product" in name for name in by.report.graphs[0].library_calls)
    other = step_of(lambda x, y, bias: (x.t() @ y, torch.addmm(bias, x, y))[form == libraries.TRANSPOSED])
    other(x, y, bias)
    assert not any("own product" in name for name in other.report.graphs[0].library_calls)


def test_a_transposed_view_of_float32_is_asked_for_apart(fastest_here, monkeypatch):
    aten = Decision("products", "float32 by tiles, transposed on the left", ATEN, "record")
    monkeypatch.setattr(products, "multiplies_transposed_by_tiles", lambda: aten)
    step = step_of(lambda x, y, bias: (x.t() @ y, x @ y, torch.addmm(bias, x, y)))
    step(torch.randn(128, 128), torch.randn(128, 96), torch.randn(96))
    calls = step.report.graphs[0].library_calls
    assert [calls.get(name, 0) for name in (*NAMES, "aten.mm.default")] == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_predicted_peak_counts_what_they_compute_in(fastest_here, dtype):
    model, x = Layers().to(dtype), torch.randn(ROWS, 96, dtype=dtype)
    step = step_of(model)
    step(x.requires_grad_()).backward()
    model.zero_grad()
    x.grad = None
    graph = step.report.graphs[0]
    with watch_cpu_peak([*model.parameters(), x]) as peak:
        step(x).backward()
    pieces = tiles.num_pieces(dtype)
    scratch_bytes = tiles.product_scratch_bytes(128, ROWS, 96, torch.get_num_threads(), pieces)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_head_is_told(fastest_here, dtype):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(4096, 64, dtype=dtype) for _ in range(2))
    target = torch.randint(0, 4096, (4096,))

    def loss(hidden, weight):
        return torch.nn.functional.cross_entropy(hidden @ weight.t(), target)

    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    step = step_of(loss)
    got = torch.autograd.grad(step(*leaves), leaves)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize(("times", "name"), [
    ({ATEN: 1.0, ONEDNN: 0.98, OWN: 0.96}, ATEN),
    ({ATEN: 1.0, ONEDNN: 0.8, OWN: 0.9}, ONEDNN),
    ({ATEN: 1.0, OWN: 0.9}, OWN),
], ids=["none is clearly faster", "oneDNN", "ours"])  # fmt: skip
def test_the_fastest(times, name):
    assert fastest({key: Timing(seconds) for key, seconds in times.items()}) == name


def test_tiles_of_float32_are_taken_where_they_win_by_much(monkeypatch):
    """Others on the same processor slow them down most."""
    monkeypatch.delenv("AOTTRAIN_RATES", raising=False)
    monkeypatch.setattr(libraries, "has_onednn", lambda: False)
    monkeypatch.setattr(libraries, "has_tiles", lambda: True)
    for own, name in ((0.85, ATEN), (0.7, OWN)):
        times = {ATEN: Timing(1.0), OWN: Timing(own)}
        monkeypatch.setattr(libraries, "timed", lambda *_, times=times, **__: Timed(times, "measured"))
        assert (libraries.choose_library().choice, libraries.multiplies_transposed_by_tiles().choice) == (name, name)
        assert libraries.multiplies_narrow(libraries.PLAIN).choice == OWN


def test_a_record_of_another_processor_is_not_followed_without_tiles(monkeypatch):
    recorded = Decision("products", "float32", OWN, "record")
    monkeypatch.setattr(libraries, "decide", lambda *_: recorded)
    monkeypatch.setattr(libraries, "has_onednn", lambda: True)
    for has, found in ((True, recorded), (False, None)):
        monkeypatch.setattr(libraries, "has_tiles", lambda has=has: has)
        assert libraries.choose_library() is found
