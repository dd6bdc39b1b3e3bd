"""What processes decide together, as one of two sees it: the other's answers are stand-ins."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from aottrain.compat_distributed import imagined_processes
from aottrain.compiler.graphs.under_way import by_gloo
from aottrain.config.parallel import ParallelConfig
from aottrain.config.run import RunConfig
from aottrain.errors import ConfigError, ParallelError
from aottrain.measure import links
from aottrain.trainer.parallel import world as worlds
from aottrain.trainer.parallel.link import take_link
from aottrain.trainer.parallel.replicas import Groups, members
from aottrain.trainer.parallel.world import ALONE, World

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is without gloo")


@pytest.fixture
def told(monkeypatch):
    """The other process gives four times what this one gives, or what is put in here; what was sent is kept."""
    given, sent = {}, []

    def all_reduce(value, op=dist.ReduceOp.SUM, group=None):
        sent.append(value.clone())
        value.mul_(5 if op == dist.ReduceOp.SUM else 4)

    def all_gather_object(values, value, group=None):
        values[:] = [value, given["value"]]

    def broadcast_object_list(values):
        sent.append(list(values))
        values[:] = given.get("list", values)

    def broadcast(value, source):
        assert source == 0 and value.is_contiguous()
        value.mul_(4)

    for function in (all_reduce, all_gather_object, broadcast_object_list, broadcast):
        monkeypatch.setattr(dist, function.__name__, function)
    given["sent"] = sent
    return given


def test_one_alone_asks_nobody():
    assert (ALONE.total(2.5), ALONE.largest(3), ALONE.gather("a")) == (2.5, 3, ["a"])
    assert ALONE.all_hold(True) and not ALONE.all_hold(False) and ALONE.from_first(lambda: 7) == 7
    ALONE.agree("this", "that")
    assert not ALONE.num_agreements


def test_numbers_of_both(told):
    world = World(0, 2)
    assert (world.total(2.5), world.largest(3)) == (12.5, 12)
    assert world.all_hold(True) and not world.all_hold(False)
    told["value"] = "b"
    assert world.gather("a") == ["a", "b"]


def test_what_the_first_makes_is_everyones_and_so_is_its_error(told):
    def fail():
        raise ConfigError("no such file")

    assert World(0, 2).from_first(lambda: 7) == 7 and told["sent"] == [[7, None]]
    with pytest.raises(ConfigError, match="no such file"):
        World(0, 2).from_first(fail)
    told["list"] = [8, None]
    assert World(1, 2).from_first(fail) == 8  # who is not the first makes nothing
    told["list"] = [None, ConfigError("there is none")]
    with pytest.raises(ConfigError, match="there is none"):
        World(1, 2).from_first(lambda: 7)


def test_who_says_something_else_is_named_and_who_says_nothing():
    store = dist.HashStore()
    world = World(0, 2, "ddp", timedelta(seconds=0.2), store)
    store.set("aottrain/1/1", "the program\none\ntwo")
    world.agree("the program", "one\ntwo")
    store.set("aottrain/2/1", "the program\none\nthree\nfour")
    with pytest.raises(ParallelError, match="in the program: process 0 has `two`, process 1 has `three`"):
        world.agree("the program", "one\ntwo")
    with pytest.raises(ParallelError, match=r"process 1 has not come to where process 0 is \(a step\) within 0.2 s"):
        world.agree("a step", "three")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.short = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.plain, self.idle = nn.Parameter(torch.arange(3.0)), nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.arange(4.0).view(2, 2).t())


def test_all_begin_with_the_weights_of_the_first(told):
    model, buffers = Model(), Model()
    World(1, 2).broadcast(model)
    World(1, 2).broadcast_buffers(buffers)
    for (name, value), wanted in zip(model.state_dict().items(), Model().state_dict().values(), strict=True):
        assert torch.equal(value, wanted * 4), name
    assert torch.equal(buffers.count, Model().count * 4) and torch.equal(buffers.plain, Model().plain)


def test_gradients_are_summed_in_buckets_of_one_type(told, monkeypatch):
    """One that this process has none of, and the other has, is the other's."""
    monkeypatch.setattr(worlds, "_BUCKET_BYTES", 24)
    model = Model()
    given = {name: torch.full_like(p, 2.0) for name, p in model.named_parameters() if name != "idle"}
    for name, gradient in given.items():
        model.get_parameter(name).grad = gradient.clone()
    World(0, 2).sum_gradients(list(model.parameters()))
    for name, gradient in given.items():
        assert torch.equal(model.get_parameter(name).grad, gradient * 5), name
    assert model.idle.grad is None
    assert [tuple(value.shape) for value in told["sent"]] == [(4,), (3,), (4,), (6,)]
    model.zero_grad()
    model.plain.grad, model.idle.grad = torch.ones(3), torch.ones(2)
    told["sent"].clear()
    World(0, 2).sum_gradients([model.plain, model.idle, model.turned])
    assert [tuple(value.shape) for value in told["sent"]] == [(3,), (5,)] and model.turned.grad is None


def test_buckets_are_closed_when_they_are_full(monkeypatch):
    monkeypatch.setattr(worlds, "_BUCKET_BYTES", 24)
    weights = [nn.Parameter(torch.ones(size)) for size in (1, 2, 3, 3, 6, 1)]
    assert [[len(p) for p in bucket] for bucket in worlds._buckets(weights)] == [[1, 6], [3, 3], [2, 1]]


def test_a_weight_that_differs_in_a_bit_is_named(told):
    model, other = Model(), Model()
    told["value"] = torch.stack([worlds._checksum(parameter) for parameter in other.parameters()])
    World(0, 2).compare(model, 3)
    with torch.no_grad():
        model.short[2] += 0.0078125  # one bit
        model.idle.copy_(model.idle.flip(0))  # the same
        model.plain.copy_(model.plain.flip(0))  # the same bits elsewhere
    with pytest.raises(ParallelError, match="after step 3 short is another in process 1 .* so are 1 of 3 others"):
        World(0, 2).compare(model, 3)


def test_places_go_on_from_piece_to_piece(monkeypatch):
    value = torch.arange(12.0)
    whole = worlds._checksum(value)
    monkeypatch.setattr(worlds, "_CHUNK", 16)
    assert worlds._checksum(value) == whole
    assert worlds._checksum(torch.cat([value[4:8], value[:4], value[8:]])) != whole


def test_plans_take_the_link_that_is_configured(monkeypatch):
    monkeypatch.setattr(links, "_known", [links.Link()])
    monkeypatch.setattr(links, "_of_groups", {})

    def taken(world, **figures):
        config = RunConfig(parallel=ParallelConfig(**figures))
        return take_link(world, config, "default", torch.device("cpu"))

    assert taken(ALONE, latency=1.0) == "" and links.link() == links.Link()
    line = taken(World(0, 2), latency=0.001, bandwidth=2e9)
    assert links.link() == links.Link(0.001, 2e9, 2)
    assert line.startswith("2 processes, planned for 1.00 ms and 1.86 GiB/s")
    replicas = World(1, 4, "shard", replicas=2, groups=Groups("those of parts", "those of copies"))
    own = {"replica_latency": 0.5, "replica_bandwidth": 1e6}
    line = taken(replicas, latency=0.001, bandwidth=2e9, **own)
    assert links.link("parts") == links.Link(0.001, 2e9, 2) and links.link("copies") == links.Link(0.5, 1e6, 2)
    assert line.startswith("4 processes (2 replicas of 2 parts), planned for 1.00 ms and 1.86 GiB/s between them")
    assert line.endswith("between replicas (parallel.replica_latency, parallel.replica_bandwidth)")
    taken(World(0, 2), latency=0.001, bandwidth=2e9)
    assert links.link("copies") == links.link("parts")  # of the run before nothing is left


def test_processes_that_are_planned_for_are_connected_as_they_would_be():
    """On CPUs by gloo, whose memory plans count; what nothing is said of, by nothing."""
    cpu = torch.device("cpu")
    for size, replicas in ((2, 1), (4, 2)):
        with worlds.imagined(ParallelConfig(name="shard", world=size, replicas=replicas)) as world:
            assert world.size == size and by_gloo(cpu) and not by_gloo(torch.device("cuda"))
        assert not by_gloo(cpu)
    with imagined_processes(2):
        assert not by_gloo(cpu)
    with worlds.imagined(ParallelConfig()) as world:
        assert world is ALONE and not by_gloo(cpu)


def test_replicas_are_held_by_processes_that_follow_each_other():
    assert members(6, 2) == ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]])
    worlds = [World(rank, 6, "shard", replicas=2) for rank in range(6)]
    assert [world.part for world in worlds] == [0, 1, 2, 0, 1, 2]
    assert [world.is_of_first_replica for world in worlds] == [True] * 3 + [False] * 3
    assert (worlds[0].num_parts, worlds[0].num_copies) == (3, 2)
    assert (World(0, 6, "ddp").num_parts, World(0, 6, "ddp").num_copies) == (1, 6)
    assert (World(0, 6, "shard").num_parts, World(0, 6, "shard").num_copies) == (6, 1)


def test_what_replicas_add_up_and_compare_goes_to_those_with_the_same_part(told, monkeypatch):
    """Sums of squares go to those with the other parts, gradients and checks of bits to those with the same."""
    asked = []
    for name in ("all_reduce", "all_gather_object"):
        function = getattr(dist, name)

        def noted(*given, function=function, group=None):
            asked.append(group)
            return function(*given)

        monkeypatch.setattr(dist, name, noted)
    world, model = World(3, 4, "shard", replicas=2, groups=Groups("parts", "copies")), Model()
    world.sum_of_parts(torch.ones(1))
    model.plain.grad = torch.ones(3)
    world.sum_gradients([model.plain])
    told["value"] = torch.stack([worlds._checksum(parameter) for parameter in model.parameters()]) + 1
    with pytest.raises(ParallelError, match="after step 3 turned is another in process 3 than in process 3"):
        world.compare(model, 3)  # the stand-in of the other is the second one
    assert asked == ["parts", "copies", "copies", "copies"]
