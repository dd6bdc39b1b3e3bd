"""The lower bound on added time, against the optimum over all schedules of small graphs."""

from __future__ import annotations

import heapq
import itertools
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aottrain.compiler.partition.budget.bound import find_gap, least_added_seconds
from aottrain.compiler.partition.budget.simulation import Emitter
from aottrain.compiler.partition.costs.storages import StorageGraph
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_family, plan_partition
from aottrain.explain.report import CompileReport
from tests.compiler.programs import joint_of, leaf
from tests.numerics.comparison import compiled
from tests.zoo import AttentionBlock, Trunk


def products(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = x @ weight
    return x.sum()


def layers(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return (x + F.gelu(F.layer_norm(x, (32,)) @ first) @ second).square().mean()


def branches(x: Tensor, y: Tensor) -> Tensor:
    h = (x @ y).sin()
    return (h.exp() * (x + y)).sum() + h.cos().sum()


def sorted_values(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    values, _ = (x * y).sort(-1)
    return values.exp().sum(), F.dropout(x.sin(), 0.5).mean(0)


PROGRAMS = {
    "products": lambda: (products, leaf(64, 32), leaf(32, 128, seed=1), leaf(128, 16, seed=2), leaf(16, 64, seed=3)),
    "layers": lambda: (layers, leaf(48, 32), leaf(32, 96, seed=1), leaf(96, 32, seed=2)),
    "branches": lambda: (branches, leaf(24, 24), leaf(24, 24, seed=1)),
    "several results": lambda: (sorted_values, leaf(16, 40), leaf(16, 40, seed=1)),
    "chain": lambda: (lambda x: x.sin().exp().tanh().cos().sigmoid() * 2, leaf(64, 64)),
}


class Optimum:
    """The least seconds of both programs for a peak of the backward, over every saved set and every order of running
    ops of the forward again between the backward's own: shortest paths over what is alive (Dijkstra)."""

    def __init__(self, graph: StorageGraph):
        self.graph, self.emitter = graph, Emitter(graph)
        self.late = [i for i, op in enumerate(graph.ops) if op.late]
        born = {s: k for k, i in enumerate(self.late) for s in graph.writes[i]}
        last = {s: k for k, i in enumerate(self.late) for s in (*graph.reads[i], *graph.writes[i]) if s in born}
        last.update((s, len(self.late)) for s in graph.gradients if s in born)
        fixed = sum(graph.sizes[s] for s in graph.outputs - graph.at_hand) + graph.tangent_bytes
        positions = range(len(self.late) + 1)
        self.others = [fixed + sum(graph.sizes[s] for s in born if born[s] < k <= last[s]) for k in positions]
        self.free = graph.at_hand | graph.outputs | frozenset(born)
        made = [s for i in graph.early for s in graph.writes[i]]
        self.early = [s for s in (*made, *graph.copied) if s not in self.free]

    def seconds(self, peak_bytes: int) -> float:
        graph = self.graph
        queue = list(self._starts())
        heapq.heapify(queue)
        done = set()
        while queue:
            seconds, k, alive = heapq.heappop(queue)
            if (k, alive) in done:
                continue
            done.add((k, alive))
            kept = set(alive)
            if k == len(self.late) and graph.gradients <= kept | self.free:
                return seconds
            for storage in alive:
                heapq.heappush(queue, (seconds, k, tuple(s for s in alive if s != storage)))
            again = [i for i in graph.early if graph.must.isdisjoint(graph.writes[i])]
            for i in [*again, *self.late[k : k + 1]]:
                more = kept.union(s for s in graph.writes[i] if s not in self.free)
                late = graph.write_bytes[i] if graph.ops[i].late else 0
                now = self.others[k] + sum(graph.sizes[s] for s in more) + late + graph.workspaces[i]
                if now <= peak_bytes and all(s in kept or s in self.free for s in graph.reads[i]):
                    following = seconds + graph.costs[i], k + graph.ops[i].late, tuple(sorted(more))
                    heapq.heappush(queue, following)
        return inf

    def _starts(self):
        for count in range(len(self.early) + 1):
            for saved in itertools.combinations(self.early, count):
                yield sum(self.graph.costs[i] for i in self.emitter.forward(saved)), 0, tuple(sorted(saved))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_bound_is_never_above_the_optimum(program: str) -> None:
    function, *args = PROGRAMS[program]()
    family = plan_family(joint_of(function, *args))
    graph, optimum = family.frontier.graph, Optimum(family.frontier.graph)
    once = optimum.emitter.least_seconds()
    top, floor = family.frontier.points[0].peak_bytes, family.frontier.lowest.peak_bytes
    bounds = []
    for limit in [int(top + (floor - top) * tenth / 10) for tenth in (0, 4, 7, 9, 11)]:  # the last no plan reaches
        best = optimum.seconds(limit) - once
        bound = least_added_seconds(graph, optimum.emitter.always, limit)
        assert bound <= best + 1e-12, limit
        point = family.frontier.within(limit)
        assert point is None or point.seconds >= best - 1e-12
        bounds.append(bound)
    assert bounds == sorted(bounds) and bounds[0] == 0.0


def test_on_a_chain_the_bound_is_the_optimum_at_every_plan() -> None:
    """Of products alike each value frees as much for as long: what is fractional in the bound is whole in the plans."""
    joint = joint_of(products, leaf(64, 64), *(leaf(64, 64, seed=i) for i in range(1, 6)))
    family = plan_family(joint)
    emitter = Emitter(family.frontier.graph)
    for point in family.frontier.points[:2]:
        bound = least_added_seconds(family.frontier.graph, emitter.always, point.peak_bytes)
        assert bound == pytest.approx(point.seconds, rel=1e-6)


@pytest.fixture
def trunk() -> nn.Module:
    torch.manual_seed(0)
    return Trunk(*(AttentionBlock() for _ in range(8)))


def test_in_repeated_blocks_plans_are_close_to_the_bound(trunk: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTTRAIN_RATES", "default")
    joint = joint_of(trunk, torch.randn(8, 128, 32))
    family = plan_family(joint)
    graph, always = family.frontier.graph, Emitter(family.frontier.graph).always
    for fraction in (0.3, 0.5, 0.7, 0.9):
        limit = family.limit(fraction)
        added, bound = family.frontier.within(limit).seconds, least_added_seconds(graph, always, limit)
        assert 0.85 * added <= bound <= added + 1e-12, fraction


@pytest.mark.parametrize("strategy", ["save_all", "min_cut", "recompute_all", "budget"])
def test_a_report_says_what_a_plan_adds_and_what_it_must(strategy: str) -> None:
    trunk = Trunk(AttentionBlock(), AttentionBlock())
    joint = joint_of(trunk, torch.randn(2, 32, 32))
    plan = plan_partition(joint, strategy, 0.3 if strategy == "budget" else None)
    graph = plan_family(joint).frontier.graph
    gap = find_gap(graph, plan, apply_partition(joint, plan))
    assert 0 <= gap.least_added_s <= gap.added_s + 1e-12 < gap.step_s
    assert bool(gap.added_s > 1e-12) == bool(strategy != "save_all")
    report = compiled(trunk, 0.3 if strategy == "budget" else strategy).prepare(torch.randn(2, 32, 32))
    assert report.gap.step_s > 0 and "by the cost model; " in CompileReport(graphs=[report]).explain()
