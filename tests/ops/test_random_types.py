"""Each random operator with tensors of each type: it gives numbers as eager gives them, or raises as eager raises."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain import philox_eager
from aottrain.ops.random import ranges
from tests.conformance.harness import FRONTENDS

N = 4000
TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.uint8, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip

# Calls with a tensor of the type, or with the type.
CALLS = {
    "bernoulli_": lambda t: t.bernoulli_(0.25),
    "bernoulli_ of a tensor": lambda t: t.bernoulli_(torch.full((N,), 0.25)),
    "bernoulli_ of float64": lambda t: t.bernoulli_(torch.full((N,), 0.25, dtype=torch.float64)),
    "bernoulli": lambda t: torch.bernoulli(torch.full((N,), 0.25).to(t.dtype)),
    "bernoulli by a number": lambda t: torch.bernoulli(t, 0.25),
    "dropout": lambda t: F.dropout(t, 0.25),
    "native_dropout": lambda t: torch.native_dropout(t, 0.25, True)[0],
    "rand": lambda t: torch.rand(N, dtype=t.dtype),
    "randn": lambda t: torch.randn(N, dtype=t.dtype),
    "rand_like": lambda t: torch.rand_like(t),
    "randn_like": lambda t: torch.randn_like(t),
    "randn_like, transposed": lambda t: torch.randn_like(t.reshape(40, 100).t()),
    "uniform_": lambda t: t.uniform_(-1.0, 3.0),
    "normal_": lambda t: t.normal_(1.0, 2.0),
    "normal of two": lambda t: torch.normal(t, t.detach().clone()),
    "normal of mean and float32": lambda t: torch.normal(t, torch.full((N,), 2.0)),
    "normal of float32 and deviation": lambda t: torch.normal(torch.full((N,), 2.0), t),
    "normal of a mean": lambda t: torch.normal(t, 2.0),
    "normal of a deviation": lambda t: torch.normal(1.0, t),
    "normal of numbers": lambda t: torch.normal(1.0, 2.0, (N,), dtype=t.dtype),
    "rrelu": lambda t: F.rrelu(t, training=True),
    "exponential_": lambda t: t.exponential_(2.0),
    "log_normal_": lambda t: t.log_normal_(0.0, 0.5),
    "cauchy_": lambda t: t.cauchy_(0.0, 1.0).clamp(-3, 3),
    "geometric_": lambda t: t.geometric_(0.5),
    "randint": lambda t: torch.randint(3, 90, (N,), dtype=t.dtype),
    "randint_like": lambda t: torch.randint_like(t, 3, 90),
    "random_": lambda t: t.random_(),
    "random_ to": lambda t: t.random_(90),
    "random_ from": lambda t: t.random_(3, 90),
    "random_ from, open": lambda t: t.random_(3, None),
    "randperm": lambda t: torch.randperm(100, dtype=t.dtype),
    "multinomial": lambda t: torch.multinomial(t.reshape(40, 100), 100, True),
    "gumbel_softmax": lambda t: F.gumbel_softmax(t.reshape(40, 100)),
}


def outcome(call, dtype):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what eager refuses, is left to eager with a warning
        try:
            return call(torch.ones(N).to(dtype))
        except RuntimeError as error:
            return type(error)


def moments(value):
    """Mean and deviation, of both parts of complex numbers."""
    parts = torch.view_as_real(value.resolve_conj()).unbind(-1) if value.is_complex() else [value]
    return [moment for part in parts for moment in (part.double().mean().item(), part.double().std().item())]


def through(call, way):
    if way == "compiled":
        return aottrain.compile(call, capture="trace")

    def drawn(tensor):
        with philox_eager():
            return call(tensor)

    return drawn


@pytest.mark.parametrize("way", ["philox_eager", "compiled"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_numbers_as_eager_or_its_error(dtype, way):
    for name, call in CALLS.items():
        drawing = through(call, way)
        want, got = outcome(call, dtype), outcome(drawing, dtype)
        if isinstance(want, type) or isinstance(got, type):
            assert want is got, f"{name}: eager {want}, here {got}"
            continue
        assert way != "compiled" or not drawing.report.num_fallbacks, f"{name}: {drawing.report.fallbacks}"
        assert (want.dtype, want.shape, want.stride()) == (got.dtype, got.shape, got.stride()), name
        wanted, found = moments(want), moments(got)
        # Sixteen deviations of a mean of 4,000 numbers, on both sides: no two distributions here are as near.
        bound = 16 * max(wanted[1::2]) / math.sqrt(N) * math.sqrt(2)
        assert wanted == pytest.approx(found, abs=bound), f"{name}: {wanted} became {found}"


def test_asking_eager_for_its_types_draws_nothing_from_its_generator(monkeypatch):
    monkeypatch.setattr(ranges, "_taken", set())
    torch.manual_seed(0)
    with philox_eager():
        first = torch.randn(8)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with philox_eager():
        assert torch.equal(torch.randn(8), first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_exponential_numbers_are_above_zero(dtype, monkeypatch):
    """F.gumbel_softmax takes their logarithm: one 0 of 16 million draws would make a row of it NaN."""
    from aottrain.ops.random.mode import PhiloxMode

    def zeros(mode, size, dtype, device):
        return torch.zeros(size, dtype=dtype, device=device)

    monkeypatch.setattr(PhiloxMode, "uniform", zeros)
    with philox_eager():
        assert (torch.empty(8, dtype=dtype).exponential_() > 0).all()
        assert F.gumbel_softmax(torch.zeros(4, 8, dtype=dtype)).isfinite().all()


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_drawn_results_are_views_of_nothing(dtype, frontend):
    """What is drawn comes in fours; a view of more would be refused where a gradient is added to it in place."""
    for draw in (torch.rand, torch.randn):
        value = aottrain.compile(lambda draw=draw: draw(5, 5, dtype=dtype), capture=frontend)()
        assert not value._is_view() and value.untyped_storage().nbytes() == 25 * dtype.itemsize
        value += torch.ones((), dtype=dtype, requires_grad=True)
        assert value.requires_grad
