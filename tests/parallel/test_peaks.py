"""The predicted peak of a process that has parts of the weights, against the allocator's events: under a process group
that sends nothing, since gloo's threads hold what has arrived until they have more to do."""

from __future__ import annotations

import gc
from datetime import timedelta

import pytest
import torch
from torch import nn

import aottrain
from aottrain.compat_distributed import imagined_processes
from aottrain.config.parallel import ParallelConfig
from aottrain.measure import links
from aottrain.measure.links import Link
from aottrain.ops import collectives
from aottrain.trainer.engines import LossModule
from aottrain.trainer.parallel.link import assume_link
from aottrain.trainer.parallel.replicas import grouped
from aottrain.trainer.parallel.shards import Shards
from aottrain.trainer.parallel.world import World
from scripts.bench_models import GPT
from tests.compiler.link.test_peak import measured_peak
from tests.parallel.sums import Odd, Plain, loss
from tests.sampling import WHOLE

LATENCY_S = 1e-6  # what is large is gathered alone


class Holding:
    """What a sum is cut out of, and the part that a gather reads, are held until they have arrived, as by groups that
    send; this one would drop them at once."""

    def __init__(self, functional):
        self.functional, self.held = functional, {}

    def __getattr__(self, name):
        return getattr(self.functional, name)

    def reduce_scatter_tensor(self, whole, *rest):
        part = self.functional.reduce_scatter_tensor(whole, *rest)
        self.held[part.untyped_storage().data_ptr()] = whole
        return part

    def all_gather_into_tensor_out(self, part, *rest, out):
        self.held[out.untyped_storage().data_ptr()] = part
        return self.functional.all_gather_into_tensor_out(part, *rest, out=out)

    def wait_tensor(self, value):
        self.held.pop(value.untyped_storage().data_ptr(), None)
        return self.functional.wait_tensor(value)


@pytest.fixture(autouse=True)
def holding(monkeypatch):
    functional = Holding(torch.ops._c10d_functional)
    monkeypatch.setattr(collectives, "_functional", lambda: functional)
    yield
    assert not functional.held


@pytest.fixture
def world():
    with imagined_processes(2):
        yield World(0, 2, "shard")


class Uneven(nn.Module):
    """Rows that no number of processes divides, deep enough that gathers are under way beside what is computed."""

    def __init__(self):
        super().__init__()
        self.odd, self.rest = Odd(), nn.ModuleList(nn.Linear(19, 19) for _ in range(12))

    def forward(self, tokens):
        x = self.odd(tokens)
        for each in self.rest:
            x = each(x).tanh()
        return x


@pytest.mark.parametrize(("made", "kernel", "plan", "num_gathers"), [
    pytest.param(Plain, "aten", {"partition": "save_all"}, 5, marks=WHOLE),
    (Uneven, "aten", {"partition": "min_cut"}, 5),
    (Uneven, "cpp", {"budget": 0.5}, 6),
    (Plain, "cpp", {"budget": "1.8MB"}, 5),
    pytest.param(Plain, "cpp", {"budget": 0.0}, 12, marks=WHOLE),  # no room for any of them
])  # fmt: skip
def test_the_peak_is_predicted_with_joined_gathers_under_way(world, made, kernel, plan, num_gathers, monkeypatch):
    monkeypatch.setattr(links, "_known", [Link(latency_s=LATENCY_S)])
    graph, measured = predicted_and_measured(Plain(128) if made is Plain else made(), world, kernel, plan, (8, 32))
    assert measured == graph.predicted_peak_bytes
    gathers = [each for each in graph.collectives if "gather" in each.call]
    assert len(gathers) == num_gathers
    assert any(each.hidden_s > each.link_s / 2 for each in gathers) == (plan != {"budget": 0.0})


@pytest.mark.parametrize("kernel", ["aten", "cpp"])
def test_a_budget_leaves_room_for_what_is_under_way(kernel):
    """At 1.0, which is the peak of the min-cut plan as it runs, and where as much as fits was saved first. Without room
    each of some 100 collectives is waited for where it starts."""
    peaks = []
    for budget in (1.0, 0.6, 0.3, 0.2):
        model = GPT(num_layers=4, width=96, num_heads=6, vocabulary=64, context=64)
        with imagined_processes(2):
            world = World(0, 2, "shard")
            assume_link(world, ParallelConfig(name="shard"))
            graph, measured = predicted_and_measured(model, world, kernel, {"budget": budget}, (8, 64), deep_loss)
        assert graph.collectives.exposed_s < graph.collectives.link_s / 5 and len(graph.collectives) < 40
        assert graph.kernel == kernel and measured == graph.predicted_peak_bytes
        peaks.append(graph.predicted_peak_bytes)
    assert sorted(peaks, reverse=True) == peaks


def test_the_peak_is_predicted_where_replicas_add_up_what_is_cut():
    with imagined_processes(4), grouped(0, 4, 2, timedelta(minutes=1)) as groups:
        world = World(0, 4, "shard", replicas=2, groups=groups)
        graph, measured = predicted_and_measured(Plain(512), world, "aten", {"partition": "min_cut"}, (2, 4))
    told = [each.call for each in graph.collectives]
    assert any("sum_start" in call and "copies" in call for call in told) and "scatter" in graph.timeline.at
    assert measured == pytest.approx(graph.predicted_peak_bytes, rel=2e-3)


@pytest.mark.parametrize("kernel", ["aten", pytest.param("cpp", marks=WHOLE)])
def test_the_peak_counts_copies_of_what_is_summed_where_weights_are_most(world, kernel):
    """Few tokens and large weights: the peak is where gradients leave, read from a copy until they have arrived."""
    graph, measured = predicted_and_measured(Plain(512), world, kernel, {"partition": "min_cut"}, (2, 4))
    assert "scatter" in graph.timeline.at and measured == graph.predicted_peak_bytes
    assert (sum(graph.timeline.live[0]) > 0) == (kernel == "cpp")  # kernels keep residuals' memory from step to step


def test_between_cpus_the_memory_of_gloo_is_counted(world, monkeypatch):
    """Of a gather under way as much as its result, of gradients that are cut a copy more while they leave."""
    peaks = {}
    for name in ("fake", "cpu:gloo,cuda:nccl"):
        monkeypatch.setattr(torch.distributed, "get_backend", lambda name=name: name)
        for size, plan in (
            ((2, 4), {"partition": "min_cut"}),
            ((8, 32), {"partition": "save_all"}),
            ((1, 4), {"budget": 0.0}),  # one at a time
        ):
            graph, _ = predicted_and_measured(Plain(512), world, "aten", plan, size)
            peaks[name, size] = graph.predicted_peak_bytes, graph.timeline
    less, _ = peaks["fake", (2, 4)]
    more, timeline = peaks["cpu:gloo,cuda:nccl", (2, 4)]
    # What leaves at the peak: one of the two large gradients, of 1024 x 512 float32.
    assert more - less == pytest.approx(1024 * 512 * 4, rel=0.05) and "scatter" in timeline.at
    less, timeline = peaks["fake", (1, 4)]
    assert "scatter_sum" in timeline.at and peaks["cpu:gloo,cuda:nccl", (1, 4)][0] - less == 1024 * 512 * 4
    fake, gloo = (peaks[name, (8, 32)][1].totals[0:] for name in ("fake", "cpu:gloo,cuda:nccl"))
    assert max(b - a for a, b in zip(fake, gloo, strict=True)) >= 2 * 1024 * 512 * 4
    assert all(a <= b for a, b in zip(fake, gloo, strict=True))


def deep_loss(call, batch):
    return call(*batch)


def predicted_and_measured(model, world, kernel, plan, size, loss=loss):
    torch.manual_seed(0)
    module = LossModule(model, loss, world=world)
    module.shards = Shards(model, world)
    options = {"capture": "trace", "on_unsupported": "error", "decisions": "default", "workspaces": True}
    over = world.copies_group if world.num_copies > 1 else None
    call = aottrain.compile(module, kernel=kernel, reduce_over=over, **options, **plan)
    batch = torch.randint(19, size), torch.randint(19, size)
    graph = call.prepare(*batch)

    def step():
        result = call(*batch)
        result.backward()
        return result

    def steps():
        """Two: the second one's peak has what the first one keeps for it."""
        step()
        for parameter in model.parameters():
            parameter.grad = None
        return step()

    gc.collect()  # what dies by chance while events are counted would be taken off the peak
    return graph, measured_peak(steps) + graph.timeline.fixed_bytes
