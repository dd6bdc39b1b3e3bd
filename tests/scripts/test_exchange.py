"""The clock of scripts/bench_exchange.py."""

from __future__ import annotations

import pytest
import torch

from scripts import bench_exchange


@pytest.fixture
def wire(monkeypatch):
    """Of a process that takes no time but what `spend` says."""
    now = [0.0]
    monkeypatch.setattr(bench_exchange.time, "process_time", lambda: now[0])
    found = bench_exchange.Wire(2, 1.0, 10.0)

    def spend(seconds):
        now[0] += seconds

    found.spend = spend
    return found


def test_what_is_computed_meanwhile_hides_what_is_on_the_link(wire):
    first, second = torch.empty(4), torch.empty(4)
    wire.start("gather", 10, first)  # over at 2
    wire.start("sum", 20, second)  # after it: over at 5
    wire.spend(0.5)
    wire.wait(first)
    wire.spend(2.0)
    wire.wait(second)
    wire.wait(second)  # is there
    assert wire.exposed == {"gather": 1.5, "sum": 1.0} and wire.now_s == 5.0 and wire.count == 2
    assert wire.first_sum_s == 0.0


def test_the_stand_in_takes_no_time_and_gives_what_it_is_given(wire):
    with wire.aside():
        wire.spend(3.0)
    assert wire.now_s == 0.0
    functional = bench_exchange.Functional(wire)
    shard, whole = torch.arange(3.0), torch.arange(6.0)
    gathered = functional.all_gather_into_tensor_out(shard, 2, "0", out=torch.empty(6))
    assert gathered.tolist() == [0.0, 1.0, 2.0] * 2
    assert functional.reduce_scatter_tensor(whole, "sum", 2, "0").tolist() == [0.0, 1.0, 2.0]
    assert wire.count == 2 and wire.free_s == pytest.approx(2 * (1 + 12 / 10))
