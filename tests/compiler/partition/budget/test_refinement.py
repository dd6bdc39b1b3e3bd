"""Changes to one schedule: what they keep, what they gain, and the helpers that make them fast."""

from __future__ import annotations

import random

import pytest
import torch

from aottrain.compiler.graphs.algorithms.range_maximum import RangeMaximum
from aottrain.compiler.graphs.measured_calls import no_workspace
from aottrain.compiler.graphs.repetition import once_for_alike
from aottrain.compiler.partition.budget.frontier import find_frontier
from aottrain.compiler.partition.budget.refinement import reexecute, relax, trim
from aottrain.compiler.partition.budget.simulation import Emitter, OpSchedule, Timeline, simulate
from aottrain.compiler.partition.costs.op_cost import node_seconds, price_of
from aottrain.compiler.partition.costs.storages import StorageGraph, contract
from aottrain.ir.graph import calls
from tests.compiler.programs import joint_of, leaf
from tests.zoo import CountingTrunk


@pytest.fixture(scope="module")
def graph() -> StorageGraph:
    torch.manual_seed(0)
    joint = joint_of(CountingTrunk(depth=4), torch.randn(2, 16, 16))
    return contract(joint, price_of("roofline"), no_workspace)


def seconds(graph: StorageGraph, schedule: OpSchedule) -> float:
    return sum(graph.costs[i] for i in (*schedule.forward, *schedule.backward))


def start_of(graph: StorageGraph) -> tuple[Emitter, Timeline]:
    """All that the backward reads is saved."""
    emitter = Emitter(graph)
    return emitter, simulate(graph, emitter.emit(graph.demanded, False))


def assert_runnable(graph: StorageGraph, schedule: OpSchedule) -> None:
    """Each op finds what it reads; each gradient is made; what may not run twice does not."""
    present = {*graph.at_hand, *schedule.saved}
    for i in schedule.backward:
        assert present.issuperset(graph.reads[i])
        assert graph.ops[i].late or not graph.must.intersection(graph.writes[i])
        present.update(graph.writes[i])
    assert present.issuperset(graph.gradients)
    assert [i for i in schedule.backward if graph.ops[i].late] == [i for i, op in enumerate(graph.ops) if op.late]


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("several", [1, 7])
def test_every_schedule_of_the_search_runs_and_the_peak_falls(graph, hold, several) -> None:
    emitter, start = start_of(graph)
    found = list(reexecute(emitter, start, graph.costs, hold, several, 200))
    for timeline in found:
        assert_runnable(graph, timeline.schedule)
    assert min(timeline.peak_bytes for timeline in found) < 0.6 * start.peak_bytes


def test_at_the_lowest_peaks_values_are_computed_more_than_once(graph) -> None:
    lowest = find_frontier(graph, {}).lowest.schedule.backward
    again = [i for i in lowest if not graph.ops[i].late]
    assert len(again) > len(set(again))


def test_relaxing_saves_time_and_never_raises_the_peak(graph) -> None:
    emitter, start = start_of(graph)
    gains = []
    for timeline in map(lambda found: trim(graph, found), reexecute(emitter, start, graph.costs, False, 7, 60)):
        relaxed = relax(emitter, timeline)
        assert_runnable(graph, relaxed.schedule)
        assert relaxed.peak_bytes <= timeline.peak_bytes
        gains.append(seconds(graph, timeline.schedule) - seconds(graph, relaxed.schedule))
    assert min(gains) >= -1e-12 and max(gains) > 0


def test_trimming_removes_runs_that_nothing_reads(graph) -> None:
    emitter, start = start_of(graph)
    useless = next(i for i in graph.early if not graph.must.intersection(graph.writes[i]) and graph.costs[i] > 0)
    padded = simulate(
        graph, OpSchedule(start.schedule.saved, start.schedule.forward, (useless, *start.schedule.backward))
    )
    assert trim(graph, padded).schedule == start.schedule


def test_the_frontier_does_not_depend_on_what_was_asked_before(graph) -> None:
    first, second = find_frontier(graph, {}), find_frontier(graph, {})
    assert [point.schedule for point in first.points] == [point.schedule for point in second.points]


def test_levels_are_those_of_a_plain_list() -> None:
    draws = random.Random(0)
    plain = [draws.randrange(1000) for _ in range(700)]
    levels = RangeMaximum(plain)
    for _ in range(300):
        first = draws.randrange(len(plain))
        end = draws.randrange(first + 1, len(plain) + 1)
        assert levels.largest(first, end) == max(plain[first:end])
        amount = draws.randrange(-50, 50)
        levels.add(first, end, amount)
        plain[first:end] = [value + amount for value in plain[first:end]]


def test_calls_that_are_alike_are_priced_once_and_alike() -> None:
    joint = joint_of(CountingTrunk(depth=6), torch.randn(2, 16, 16))
    asked = []

    def count(node) -> float:
        asked.append(node)
        return node_seconds(node)

    price = once_for_alike(count)
    for node in calls(joint.graph):
        assert price(node) == node_seconds(node)
    assert len(asked) < 0.4 * len(calls(joint.graph))


def test_calls_differ_by_values_and_layouts() -> None:
    def program(x):
        return (x * 1).exp() + (x * 1.0).exp() + (x * 2).exp() + x.t().exp() + x[:4].exp().sum()

    asked = []
    price = once_for_alike(lambda node: asked.append(node) or len(asked))
    names = {str(node.target): set() for node in calls(joint_of(program, leaf(8, 8)).graph)}
    for node in calls(joint_of(program, leaf(8, 8)).graph):
        names[str(node.target)].add(price(node))
    assert len(names["aten.exp.default"]) == 3  # contiguous, transposed, part
