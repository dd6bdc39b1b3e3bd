"""Small gathers that leave as one: how many, what they give bit by bit, and that a tight budget has them one by one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import aottrain.ops.collectives  # noqa: F401  # makes the operators known
from aottrain.compiler.graphs.repetition import SharedValues
from aottrain.compiler.link import flights, room
from aottrain.compiler.link.backends import KernelPlan
from aottrain.compiler.link.flights import _placed
from aottrain.ir.graph import calls, results, set_value
from aottrain.ir.ops import packet_name
from aottrain.measure import links
from aottrain.measure.links import Link
from aottrain.ops.collectives import padded, rows_of_shard

aten, parallel = torch.ops.aten, torch.ops.aottrain_parallel
WORLD, GROUP = 3, "0"
SHAPES = [(5,), (7, 3), (1,), (6, 2), (400, 400), (9,), (4, 4)]  # the fifth is large


@pytest.fixture(autouse=True)
def known_link(monkeypatch):
    monkeypatch.setattr(links, "_known", [Link()])


def shards_of(rank: int, shapes=SHAPES, dtypes=None):
    """Of weights that all have alike, the rows of this process."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for place, shape in enumerate(shapes):
        whole = torch.randn(shape, generator=generator).to((dtypes or {}).get(place, torch.float32))
        count = rows_of_shard(shape[0], WORLD)
        parts.append((whole, padded(whole[rank * count : (rank + 1) * count], count).contiguous()))
    return parts


def program(shapes=SHAPES, dtypes=None) -> fx.Graph:
    """Gathers each weight where it is read, and gives its sine."""
    graph, fake = fx.Graph(), FakeTensorMode().from_tensor
    sources = []
    for place, (_, part) in enumerate(shards_of(0, shapes, dtypes)):
        sources.append(graph.placeholder(f"shard{place}"))
        set_value(sources[-1], fake(part))
    given = []
    for source, (whole, _) in zip(sources, shards_of(0, shapes, dtypes), strict=True):
        gather = graph.call_function(parallel.gather_rows.default, (source, whole.shape[0], WORLD, GROUP))
        set_value(gather, fake(whole))
        given.append(graph.call_function(aten.sin.default, (gather,)))
        set_value(given[-1], fake(whole))
    graph.output(given)
    return graph


class Process(fx.Interpreter):
    """Runs a program of one process; a gather takes what the others have given to the same one."""

    def __init__(self, graph: fx.Graph, others=None):
        super().__init__(fx.GraphModule({}, graph))
        self.others, self.given = others, []

    def run_node(self, node):
        if node.target is not parallel.gather_start.default:
            return self.env[node.args[0]] if node.target is parallel.arrived.default else super().run_node(node)
        shard, rows, world, _ = self.fetch_args_kwargs_from_env(node)[0]
        assert world == WORLD
        self.given.append(shard)
        whole = torch.cat([shard] * WORLD if self.others is None else [o[len(self.given) - 1] for o in self.others])
        return whole if whole.shape[0] == rows else whole.narrow(0, 0, rows)


def run(graph: fx.Graph, shapes=SHAPES, dtypes=None):
    inputs = [[part for _, part in shards_of(rank, shapes, dtypes)] for rank in range(WORLD)]
    given = []
    for own in inputs:
        process = Process(graph)
        process.run(*own)
        given.append(process.given)
    return [Process(graph, given).run(*own) for own in inputs]


def num_gathers(graph: fx.Graph) -> int:
    return sum(packet_name(node.target) == "gather_start" for node in calls(graph))


@pytest.mark.parametrize("joins", [True, False])
def test_joined_gathers_give_every_bit_of_single_ones(joins):
    graph = _placed(program(), flights.MOST_BYTES, joins, SharedValues())
    assert num_gathers(graph) == (2 if joins else len(SHAPES))
    wanted = [whole.sin() for whole, _ in shards_of(0)]
    for given in run(graph):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(given, wanted, strict=True))
    names = [node.name for node in results(graph)]
    assert names == [node.name for node in results(program())]


def test_what_is_of_another_type_leaves_by_itself():
    dtypes = {1: torch.float64, 3: torch.float64}
    graph = _placed(program(dtypes=dtypes), flights.MOST_BYTES, True, SharedValues())
    assert num_gathers(graph) == 3
    for given in run(graph, dtypes=dtypes):
        assert [value.dtype for value in given] == [dtypes.get(i, torch.float32) for i in range(len(SHAPES))]
        pairs = zip(given, shards_of(0, dtypes=dtypes), strict=True)
        assert all(torch.equal(ours, whole.sin()) for ours, (whole, _) in pairs)


def test_gathers_that_are_far_apart_are_not_joined():
    """From the first to the last of one there are no more bytes of gathers than are started ahead of being read."""
    large = (20000, 8)
    far = [(5,), large, large, large, large, (5,)]
    assert num_gathers(_placed(program(far), flights.MOST_BYTES, True, SharedValues())) == 6
    near = [(5,), large, (5,), large, large, large, (5,)]
    assert num_gathers(_placed(program(near), flights.MOST_BYTES, True, SharedValues())) == 6


@pytest.mark.parametrize(("most", "first"), [(6400, 2), (12800, 3), (flights.MOST_BYTES, 3)])
def test_twice_as_many_leave_at_the_start(most, first):
    """Of six gathers of 6,400 bytes each; where nothing bounds them three are on their way at once."""
    shapes = [(40, 40)] * 6
    graph = _placed(program(shapes), most, True, SharedValues())
    joined = [node for node in calls(graph) if node.target is aten.cat.default]
    assert len(joined[0].args[0]) == first
    wanted = [whole.sin() for whole, _ in shards_of(0, shapes)]
    for given in run(graph, shapes):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(given, wanted, strict=True))


def test_without_latency_there_is_nothing_to_save(monkeypatch):
    monkeypatch.setattr(flights, "LEAST_BYTES", 8)
    links.set_link(Link(1e-12, 1e9))
    assert num_gathers(_placed(program(), flights.MOST_BYTES, True, SharedValues())) == len(SHAPES)


@pytest.mark.parametrize(("limit", "joined"), [(None, True), (10, True), (9, False), (8, False)])
def test_under_a_tight_budget_gathers_are_single(limit, joined, monkeypatch):
    """Peaks of 10 bytes with joined ones, of 9 with single ones."""
    monkeypatch.setattr(flights, "replace", lambda parts, **halves: SimpleNamespace(**halves))
    monkeypatch.setattr(room, "_question", lambda *given: ("under way", "these"))
    monkeypatch.setattr(room, "for_tangents", lambda parts, defined: parts)
    monkeypatch.setattr(room, "plan_kernels", lambda joint, plan, parts, options: KernelPlan("aten"))
    monkeypatch.setattr(room, "_peak", lambda joint, parts, options: 10 if num_gathers(parts.forward) == 2 else 9)
    parts = SimpleNamespace(forward=program(), backward=None)
    plan, options = SimpleNamespace(limit=limit, budget=0.5, under_way=""), SimpleNamespace(kernel="aten")
    placed, _, _ = room.plan_in_flight(None, plan, parts, (), options)
    assert num_gathers(placed.forward) == (2 if joined else len(SHAPES) if limit == 9 else 0)
