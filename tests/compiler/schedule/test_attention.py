"""Which attention our own function does instead of ATen's, and what comes of it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.compiler.link import backends
from aottrain.compiler.link.retention import keep_memory
from aottrain.compiler.link.timeline import trace_memory
from aottrain.compiler.schedule import attention, order
from aottrain.compiler.schedule.memory import plan_memory
from aottrain.ir.graph import storage_bytes
from aottrain.ir.kernels.attention import scratch_floats
from aottrain.ir.settings.decisions import ATEN, OWN, Decision, Timing
from aottrain.measure.decisions import Timed
from aottrain.metrics.memory import watch_cpu_peak
from aottrain.toolchain.native import find_compiler
from tests.numerics.attention_types import DTYPES, in_bfloat16
from tests.numerics.tolerance import RTOL_ATOL

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


class Attention(nn.Module):
    def __init__(self, masked: bool = False):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.masked = masked

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = (torch.arange(x.shape[1]) % 5 < 3)[None, :] if self.masked else None
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=not self.masked)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().sum()


@pytest.fixture
def faster(monkeypatch):
    monkeypatch.setattr(attention, "_decision", lambda node: Decision("attention", "", OWN, "measured"))


def run(call, model, x, dtype):
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = call(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def compiled(masked=False, kernel="cpp", **options):
    torch.manual_seed(0)
    model = Attention(masked)
    return model, aottrain.compile(model, capture="trace", kernel=kernel, on_unsupported="error", **options)


def library_calls(call):
    return call.report.graphs[0].library_calls


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_as_exact_as_those_of_eager(faster, dtype):
    model, call = compiled()
    x = torch.randn(2, 70, 64)
    ours, theirs = run(call, model, x, dtype), run(model, model, x, dtype)
    exact_model = copy.deepcopy(model).double()
    exact = run(exact_model, exact_model, x.double(), torch.float64)
    found = library_calls(call)
    assert found[f"{FORWARD} (own attention)"] and found[f"{BACKWARD} (own attention backward)"]
    for a, b, c in zip(ours, theirs, exact, strict=True):
        unit = torch.finfo(torch.float32).eps * c.abs().max()
        assert (a - c).abs().max() <= 1.5 * (b - c).abs().max() + 4 * unit


@in_bfloat16
def test_each_is_decided_on_its_own(monkeypatch):
    known = {True: Decision("attention", "", OWN, "measured"), False: Decision("attention", "", ATEN, "measured")}
    monkeypatch.setattr(attention, "_decision", lambda node: known[node.target is attention._BACKWARD])
    model, call = compiled()
    run(call, model, torch.randn(2, 70, 64), torch.bfloat16)
    assert library_calls(call)[FORWARD] == 1 and library_calls(call)[f"{BACKWARD} (own attention backward)"] == 1


def test_stays_where_nothing_is_measured():
    model, call = compiled()
    run(call, model, torch.randn(2, 70, 64), torch.float32)
    assert library_calls(call)[FORWARD] == library_calls(call)[BACKWARD] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_is_added(faster, dtype):
    model, call = compiled(masked=True)
    x = torch.randn(2, 70, 64)
    ours, theirs = run(call, model, x, dtype), run(model, model, x, dtype)
    found = library_calls(call)
    assert found[f"{FORWARD} (own attention)"] and found[f"{BACKWARD} (own attention backward)"]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=RTOL_ATOL[dtype][0], atol=RTOL_ATOL[dtype][0] * float(b.abs().max()))


def test_takes_no_memory_that_a_budget_counts(faster):
    model, call = compiled(budget=0.5)
    run(call, model, torch.randn(2, 70, 64), torch.float32)
    assert library_calls(call).get(FORWARD, 0) >= 1 and library_calls(call)[BACKWARD] == 1


@in_bfloat16
def test_the_reference_is_atens(faster):
    model, call = compiled(kernel="aten")
    x = torch.randn(2, 70, 64)
    ours, theirs = run(call, model, x, torch.bfloat16), run(model, model, x, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_says_both_times(monkeypatch):
    found = {}
    choose = attention.choose_attentions
    monkeypatch.delenv("AOTTRAIN_RATES")
    timed = Timed({ATEN: Timing(2e-3), OWN: Timing(1e-3)}, "measured")
    monkeypatch.setattr(attention, "calls_timed", lambda calls: timed)
    monkeypatch.setattr(order, "choose_attentions", lambda graph: found.update(choose(graph)) or found)
    model, call = compiled()
    run(call, model, torch.randn(2, 70, 64), torch.float32)
    reason = "1.00 ms, ATen's own 2.00 ms"
    assert sorted(found.values()) == [("own attention", reason), ("own attention backward", reason)]


def test_a_steady_step_allocates_neither_results_nor_scratch_that_fit_below_its_peak(faster, monkeypatch):
    seen = []

    def keeping(parts, planned, workspace):
        seen.append((parts, planned, workspace, keep_memory(parts, planned, workspace)))
        return seen[-1][-1]

    monkeypatch.setattr(backends, "keep_memory", keeping)
    model, call = compiled()
    x = torch.randn(2, 70, 64)
    run(call, model, x, torch.float32)
    assert library_calls(call)[f"{FORWARD} (own attention)"]
    model.zero_grad()
    x.requires_grad_()
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as record:
        call(x).backward()
    allocated = [event.nbytes() for event in record.kineto_results.events() if event.name() == "[memory]"]
    parts, planned, workspace, kept = seen[-1]
    schedules, everything = [schedule for _, _, schedule in planned], [plan_memory(g, s, n) for g, n, s in planned]
    assert [memory.scratch for memory in kept] == [memory.scratch for memory in everything]
    assert [memory.offsets.keys() for memory in kept] == [memory.offsets.keys() for memory in everything]
    fresh = sorted(everything[0].residuals - kept[0].residuals, key=storage_bytes)
    # Attention's result and the square's derivative: either would lie idle beside the gradients at the step's end.
    assert len(fresh) == 2
    peak = trace_memory(parts, 0, workspace, schedules).peak_bytes
    for node in fresh:
        with_it = [replace(kept[0], residuals=kept[0].residuals | {node}), *kept[1:]]
        assert trace_memory(parts, 0, workspace, schedules, with_it).peak_bytes > peak
    # What escapes, besides: the gradients of x and of the wide weight.
    wanted = [*map(storage_bytes, fresh), 4 * 2 * 70 * 64, 4 * 64 * 192]
    assert sorted(count for count in allocated if count >= 4 * x.numel()) == sorted(wanted)


def test_the_predicted_peak_counts_what_is_planned(faster):
    model, call = compiled()
    x = torch.randn(2, 70, 64)
    run(call, model, x, torch.float32)
    model.zero_grad()
    graph = call.report.graphs[0]
    with watch_cpu_peak([*model.parameters(), x.requires_grad_()]) as peak:
        call(x).backward()
    assert graph.arena_bytes > 4 * scratch_floats(70, 70, 32, True) * torch.get_num_threads()
    assert graph.predicted_peak_bytes == pytest.approx(peak.num_bytes, rel=0.01)
