"""What a machine can do: the figures kept, the fixed ones, and the times of single calls."""

from __future__ import annotations

import json

import pytest
import torch

from aottrain.ir.tensor import tensor_spec
from aottrain.runtime import cache, rates, timings
from aottrain.runtime.calls import OpCall
from aottrain.runtime.rates import DEFAULT_RATES, rates_for
from aottrain.runtime.timings import call_seconds

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rates, "_known", {})
    cache.forget_tables()
    yield tmp_path
    cache.forget_tables()


@pytest.fixture
def clock(monkeypatch):
    """Every run takes a millisecond; how many were timed."""
    timed = []

    def seconds_of(run, device, max_runs, max_seconds):
        timed.append(run())
        return [0.002, 0.001]

    monkeypatch.delenv("AOTTRAIN_RATES", raising=False)
    monkeypatch.setattr(rates, "seconds_of", seconds_of)
    monkeypatch.setattr(timings, "seconds_of", seconds_of)
    monkeypatch.setattr(rates, "_SIDES", {"cpu": (8, 16)})
    monkeypatch.setattr(rates, "_COPIED_BYTES", {"cpu": 1000})
    return timed


def call(target, *args):
    return OpCall(target, args)


def spec(*shape, dtype=torch.float32):
    return tensor_spec(torch.empty(shape, dtype=dtype))


def test_fixed_rates_on_request(monkeypatch, folder):
    monkeypatch.setenv("AOTTRAIN_RATES", "default")
    assert rates_for(CPU) is DEFAULT_RATES and not list(folder.iterdir())


def test_rates_are_measured_once(clock):
    found = rates_for(CPU)
    assert found.bytes_per_s == pytest.approx(2 * 1000 / 0.001)
    assert found.flops_per_s(torch.bfloat16) == pytest.approx(2 * 16**3 / 0.001)
    assert found.op_overhead_s == pytest.approx(0.001 / rates._NUM_SMALL_OPS)
    count = len(clock)
    rates._known.clear()
    cache.forget_tables()
    assert rates_for(CPU) == found and len(clock) == count  # as another process would


def test_a_dtype_that_was_not_measured_has_the_rate_of_float32(clock):
    found = rates_for(CPU)
    assert found.flops_per_s(torch.complex64) == found.flops_per_s(None) == found.flops_per_s(torch.float32)


def test_a_damaged_file_is_measured_again(clock, folder):
    found = rates_for(CPU)
    (path,) = folder.glob("rates-*.json")
    path.write_text("{")
    rates._known.clear()
    cache.forget_tables()
    assert rates_for(CPU) == found and json.loads(path.read_text())["bytes_per_s"] == found.bytes_per_s


def test_what_cannot_be_measured_has_the_fixed_rates(clock, monkeypatch):
    def no_memory(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rates, "_copy_rate", no_memory)
    assert rates_for(CPU) is DEFAULT_RATES
    assert rates_for(torch.device("meta")) is DEFAULT_RATES


def test_inside_a_profiler_nothing_is_measured(clock):
    with torch.autograd.profiler.profile(profile_memory=True):
        assert rates_for(CPU) is DEFAULT_RATES
    assert not clock and rates_for(CPU) is not DEFAULT_RATES


def test_real_rates_are_plausible(monkeypatch):
    monkeypatch.delenv("AOTTRAIN_RATES", raising=False)
    found = rates_for(CPU)
    assert 1e6 < found.flops_per_s(torch.float32) < 1e16 and 1e6 < found.bytes_per_s < 1e14
    assert 1e-9 < found.op_overhead_s < 1


def test_calls_are_timed_once(clock):
    calls = [call(aten.mm.default, spec(4, 4), spec(4, 4)), call(aten.t.default, spec(4, 4))]
    assert call_seconds([*calls, *calls]) == (0.001, 0.0) * 2 and len(clock) == 1
    cache.forget_tables()
    assert call_seconds(calls) == (0.001, 0.0) and len(clock) == 1


def test_calls_that_cannot_be_timed():
    state = torch.get_rng_state()
    calls = [call(aten.mm.default, spec(2, 3), spec(2, 3)), call(aten.bernoulli.default, spec(3))]
    assert call_seconds(calls) == (None, None)
    assert torch.equal(torch.get_rng_state(), state)


def test_larger_calls_take_longer():
    small, large = call_seconds([call(aten.mm.default, spec(n, n), spec(n, n)) for n in (8, 512)])
    assert 0 < small < large
