"""What of a program's collectives is exposed, by hand: calls of five seconds, a link of one second and 4 bytes a
second."""

from __future__ import annotations

import operator
from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch
from torch import fx

import aottrain.ops.collectives  # noqa: F401  # makes the operators known
from aottrain.compiler.link.exposure import collectives_of
from aottrain.compiler.partition.costs.op_cost import node_seconds, taken_in
from aottrain.ir.graph import set_value
from aottrain.measure import links
from aottrain.measure.decisions import deciding
from aottrain.measure.links import Link, set_link

aten, parallel = torch.ops.aten, torch.ops.aottrain_parallel


@pytest.fixture(autouse=True)
def slow_link(monkeypatch):
    monkeypatch.setattr(links, "_known", [Link()])
    monkeypatch.setattr(links, "_of_groups", {})
    set_link(Link(1.0, 4.0, 2))
    with deciding("default"):
        yield


class Made:
    """A graph that is written down, its values of 16 bytes."""

    def __init__(self):
        self.graph = fx.Graph()
        self.a, self.b = (self.call(None, name) for name in ("a", "b"))

    def call(self, target, *args, value=None):
        node = self.graph.placeholder(*args) if target is None else self.graph.call_function(target, args)
        set_value(node, torch.empty(4) if value is None else value)
        return node


def found(forward: Made, backward: Made | None = None):
    parts = SimpleNamespace(forward=forward.graph, backward=None if backward is None else backward.graph)
    return collectives_of(parts, (), lambda node: 5.0)


def times(call):
    return pytest.approx(astuple(call)[4:], abs=1e-3)


def flights() -> Made:
    made = Made()
    sums = made.call(parallel.sum_start.default, [made.a, made.b], "0", value=[torch.empty(4)] * 2)
    items = [made.call(operator.getitem, sums, place) for place in (0, 1)]
    gather = made.call(parallel.gather_start.default, made.a, 4, 2, "0")
    made.call(aten.cos.default, made.b)
    whole = made.call(parallel.arrived.default, gather)
    made.call(aten.view.default, whole, [2, 2], value=torch.empty(2, 2))
    made.call(aten.sin.default, whole)
    for item in items:
        made.call(parallel.arrived.default, item)
    made.call(aten.cos.default, made.b)
    return made


def test_one_follows_the_other_on_the_link_and_hides_behind_calls():
    """A sum of 32 bytes takes 9 s, a gather that brings 8 of 16 bytes 3 s behind it; it is waited for after 5 s."""
    all_of = found(flights(), flights())
    sums, gather, *again = all_of
    assert [call.num_bytes for call in all_of] == [32, 8, 32, 8] and all_of.num_bytes == 80
    assert times(sums) == (0.0, 17.0, 9.0, 0.0) and times(gather) == (0.0, 5.0, 3.0, 7.0)
    assert (sums.hidden_s, gather.hidden_s) == (9.0, 0.0)
    assert [astuple(call)[1:] for call in again] == [astuple(sums)[1:], astuple(gather)[1:]]
    assert [call.half for call in again] == ["backward"] * 2
    assert all_of.forward_s == pytest.approx(22.0, abs=1e-3) and all_of.exposed_s == pytest.approx(14.0, abs=1e-3)
    assert all_of.link_s == 24.0 and all_of.first_sum == pytest.approx(0.0, abs=1e-3)


def test_what_leaves_and_arrives_in_one_call_is_exposed():
    made = Made()
    made.call(aten.sin.default, made.a)
    made.call(parallel.all_sum.default, made.a, "0")
    made.call(parallel.scatter_sum.default, made.a, 2, "0", value=torch.empty(2))
    made.call(aten.sin.default, made.a)
    total, part = found(Made(), made)
    assert times(total) == (5.0, 5.0, 5.0, 5.0) and times(part) == (10.0, 10.0, 3.0, 3.0)
    assert found(Made(), made).first_sum == pytest.approx(5 / 18)
    assert str(part).startswith("backward: aottrain_parallel.scatter_sum.default(float32[4], 2, 0)")


def test_a_program_that_talks_to_nobody_has_none():
    made = Made()
    made.call(aten.sin.default, made.a)
    assert not len(found(made)) and found(made).first_sum is None


@pytest.mark.parametrize(("size", "gathered", "summed", "cut"), [(2, 8, 16, 8), (4, 12, 24, 12), (1, 0, 0, 0)])
def test_each_process_takes_in_what_the_others_have(size, gathered, summed, cut):
    set_link(Link(1.0, 4.0, size))
    made = Made()
    calls = [made.call(parallel.gather_rows.default, made.a, 4, size, "0"),
             made.call(parallel.all_sum.default, made.a, "0"),
             made.call(parallel.scatter_sum.default, made.a, size, "0", value=torch.empty(1))]  # fmt: skip
    assert list(map(taken_in, calls)) == [gathered, summed, cut]
    assert node_seconds(calls[0]) == 1 + gathered / 4


def test_each_group_has_a_link_of_its_own():
    """Ten times as slow between copies, of which there are three; none waits for the other group."""
    set_link(Link(1.0, 4.0, 2), {"copies": Link(10.0, 0.4, 3)})
    made = Made()
    near = made.call(parallel.sum_start.default, [made.a], "parts", value=[torch.empty(4)])
    far = made.call(parallel.sum_start.default, [made.b], "copies", value=[torch.empty(4)])
    waits = [made.call(parallel.arrived.default, made.call(operator.getitem, each, 0)) for each in (near, far)]
    made.graph.output(waits)
    first, second = found(made)
    assert (first.num_bytes, second.num_bytes) == (16, 21)  # twice all but its own share
    assert first.link_s == 1.0 + 16 / 4 and second.link_s == 10.0 + 21 / 0.4
    assert first.exposed_s == pytest.approx(5.0, abs=1e-3)
    assert second.exposed_s == pytest.approx(second.link_s - 5.0, abs=1e-3)
