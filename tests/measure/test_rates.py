"""What a machine can do: the figures kept, the fixed ones, and the times of single calls."""

from __future__ import annotations

import json

import pytest
import torch

from aottrain.ir.tensor import tensor_spec
from aottrain.measure import rates
from aottrain.measure.calls import OpCall
from aottrain.measure.rates import DEFAULT_RATES, rates_for
from aottrain.measure.timings import call_seconds
from aottrain.toolchain import cache
from tests.measure.clocks import Clock

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(rates, "_SIDES", {"cpu": {1: 16}})
    monkeypatch.setattr(rates, "_COPIED_BYTES", {"cpu": 1000})
    return Clock(monkeypatch)


def call(target, *args):
    return OpCall(target, args)


def spec(*shape, dtype=torch.float32):
    return tensor_spec(torch.empty(shape, dtype=dtype))


def test_fixed_rates_on_request(monkeypatch, folder):
    monkeypatch.setenv("AOTTRAIN_RATES", "default")
    assert rates_for(CPU) is DEFAULT_RATES and not list(folder.iterdir())


def test_rates_are_measured_once_and_stepped(clock, monkeypatch):
    """In powers of two from the fixed figures: the last percent of a rate decides nothing."""
    found = rates_for(CPU)
    model = DEFAULT_RATES.bytes_per_s
    assert found.bytes_per_s == model * 2.0**-13  # 2 * 1000 bytes in a millisecond, 1e4 times less than 20e9
    assert found.flops_per_s(torch.float32) == 180e9 * 2.0**-14  # 2 * 16 ** 3 in that time
    assert found.op_overhead_s == DEFAULT_RATES.op_overhead_s * 2  # 5 us
    count = clock.num_runs
    clock.forget(monkeypatch)
    cache.forget_tables()
    assert rates_for(CPU) == found and clock.num_runs <= count + 4  # as another process would: the one check
    clock.seconds = 0.0011
    assert rates_for(CPU) == found and clock.num_runs <= count + 4


@pytest.mark.parametrize(("measured", "taken"), [(1.0, 1), (0.51, 1), (1.9, 1), (0.49, 0.5), (2.1, 2), (5.8, 8)])
def test_less_than_a_whole_step_is_none(measured, taken):
    model = DEFAULT_RATES.bytes_per_s
    assert rates.stepped(measured * model, model) == taken * model


def test_a_dtype_that_was_not_measured_has_the_rate_of_float32(clock):
    found = rates_for(CPU)
    assert found.flops_per_s(torch.complex64) == found.flops_per_s(None) == found.flops_per_s(torch.float32)


def test_a_damaged_file_is_measured_again(clock, folder):
    found = rates_for(CPU)
    (path,) = folder.glob("rates-*.json")
    whole = json.loads(path.read_text())
    for damage in ("{", json.dumps({"rates": {"times": {"bytes_per_s": ["fast", 0]}}}), json.dumps({"rates": 7})):
        path.write_text(damage)
        cache.forget_tables()
        assert rates_for(CPU) == found
        assert json.loads(path.read_text())["rates"]["times"] == whole["rates"]["times"]


def test_figures_are_kept_with_what_they_hang_on(clock, folder):
    rates_for(CPU)
    (path,) = folder.glob("rates-*.json")
    kept = json.loads(path.read_text())
    assert {"processor", "threads", "torch", "code", "date"} <= kept["measured on"].keys()
    assert kept["measured on"]["date"] == kept["rates"]["date"]


def test_what_cannot_be_measured_has_the_fixed_rates(clock, monkeypatch):
    def no_memory(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rates, "rate_runs", no_memory)
    assert rates_for(CPU) is DEFAULT_RATES
    assert rates_for(torch.device("meta")) is DEFAULT_RATES


def test_inside_a_profiler_nothing_is_measured(clock):
    with torch.autograd.profiler.profile(profile_memory=True):
        assert rates_for(CPU) is DEFAULT_RATES
    assert not clock.num_runs and rates_for(CPU) is not DEFAULT_RATES


def test_calls_are_timed_once(clock):
    calls = [call(aten.mm.default, spec(4, 4), spec(4, 4)), call(aten.t.default, spec(4, 4))]
    assert call_seconds([*calls, *calls]) == (0.001, 0.0) * 2
    count = clock.num_runs
    cache.forget_tables()
    assert call_seconds(calls) == (0.001, 0.0) and clock.num_runs == count


def test_calls_that_cannot_be_timed(clock):
    state = torch.get_rng_state()
    calls = [call(aten.mm.default, spec(2, 3), spec(2, 3)), call(aten.bernoulli.default, spec(3))]
    assert call_seconds(calls) == (None, None)
    assert torch.equal(torch.get_rng_state(), state)
