"""Memory that a collective has in hand: each planted hazard is found on the order of calls alone."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

import aottrain.ops.collectives  # noqa: F401  # makes the operators known
from aottrain.errors import VerificationError
from aottrain.ir.flights import flown, start_of, verify_apart, verify_flights
from aottrain.ir.graph import calls, placeholders, set_value, storage_root

aten, parallel = torch.ops.aten, torch.ops.aottrain_parallel


class Made:
    """A graph that is written down: two sums that leave together, a gather, and what is done meanwhile."""

    def __init__(self):
        self.graph = fx.Graph()
        self.a, self.b, self.shard = (self.given(name) for name in ("a", "b", "shard"))
        self.made = self.call(aten.sin.default, self.shard)
        self.sums = self.call(parallel.sum_start.default, [self.a, self.b], "0", value=None)
        self.first, self.second = (self.call(operator.getitem, self.sums, place) for place in (0, 1))
        self.gather = self.call(parallel.gather_start.default, self.made, 4, 2, "0")
        self.meanwhile = self.call(aten.cos.default, self.b)
        self.whole = self.call(parallel.arrived.default, self.gather)
        self.read = self.call(aten.sin.default, self.whole)
        self.there = self.call(parallel.arrived.default, self.first)
        self.also = self.call(parallel.arrived.default, self.second)
        self.output()

    def given(self, name):
        node = self.graph.placeholder(name)
        set_value(node, torch.empty(4))
        return node

    def call(self, target, *args, value=0):
        node = self.graph.call_function(target, args)
        set_value(node, [torch.empty(4)] * 2 if value is None else torch.empty(4))
        return node

    def output(self, *more):
        self.results = [self.there, self.also, self.read, *more]
        self.graph.output(self.results)

    def inserted(self, before, target, *args):
        with self.graph.inserting_before(before):
            return self.call(target, *args)

    def check(self, order=None):
        verify_flights(self.graph, calls(self.graph) if order is None else order, storage_root)


def moved(made, node, before):
    order = [each for each in calls(made.graph) if each is not node]
    order.insert(order.index(before), node)
    return order


def reads_before(made):
    made.inserted(made.meanwhile, aten.sin.default, made.first)


def reads_through_a_view(made):
    view = made.inserted(made.meanwhile, aten.view.default, made.gather, [2, 2])
    made.inserted(made.meanwhile, aten.sin.default, view)


def reads_what_has_arrived_too_early(made):
    return moved(made, made.read, made.whole)


def reads_late_what_nothing_waits_for(made):
    made.graph.output_node().args = ([made.there, made.read],)
    made.graph.erase_node(made.also)


def returns_what_is_under_way(made):
    made.graph.output_node().args = ([made.there, made.second, made.read],)
    made.graph.erase_node(made.also)


def writes_what_is_read(made):
    made.inserted(made.meanwhile, aten.sin_.default, made.made)


def starts_with_what_is_under_way(made):
    made.inserted(made.meanwhile, parallel.sum_start.default, [made.first], "0")


def waits_twice(made):
    made.inserted(made.read, parallel.arrived.default, made.gather)


def waits_before_it_starts(made):
    return moved(made, made.whole, made.gather)


def talks_in_another_order(made):
    return moved(made, made.gather, made.sums)


HAZARDS = {
    reads_before: "touches getitem, which sum_start_default has under way",
    reads_through_a_view: "touches gather_start_default, which gather_start_default has under way",
    reads_what_has_arrived_too_early: "touches gather_start_default",
    reads_late_what_nothing_waits_for: "nothing waits for getitem_1, which sum_start_default has started",
    returns_what_is_under_way: "the caller touches getitem_1",
    writes_what_is_read: "writes sin_default, which gather_start_default still reads",
    starts_with_what_is_under_way: "touches getitem, which sum_start_default has under way",
    waits_twice: "waits for gather_start_default, which nothing has under way",
    waits_before_it_starts: "waits for gather_start_default, which nothing has under way",
    talks_in_another_order: "collectives run in another order",
}


def test_what_is_right_passes():
    Made().check()


@pytest.mark.parametrize("plant", HAZARDS, ids=lambda plant: plant.__name__)
def test_each_hazard_is_found(plant):
    made = Made()
    order = plant(made)
    with pytest.raises(VerificationError, match=HAZARDS[plant]):
        made.check(order)


@pytest.mark.parametrize(("offset", "is_wrong"), [(0, True), (8, True), (16, False)])
def test_bytes_that_a_gather_still_reads_are_nobody_elses(offset, is_wrong):
    made = Made()
    offsets = {made.made: 0, made.meanwhile: offset}

    def check():
        verify_apart(calls(made.graph), storage_root, offsets, lambda node: 16)

    if is_wrong:
        with pytest.raises(VerificationError, match=r"has bytes of sin_default, which gather_start_default has under"):
            check()
    else:
        check()


def test_what_is_read_lives_until_the_wait():
    made = Made()
    assert start_of(made.also) is made.sums and start_of(made.whole) is made.gather
    assert flown(made.whole) == (made.made,) and flown(made.read) == ()
    assert placeholders(made.graph)[:2] == list(flown(made.there))
