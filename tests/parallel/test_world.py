"""What processes decide together, as one of two sees it: the other's answers are stand-ins."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from aottrain.config.run import ParallelConfig, RunConfig
from aottrain.errors import ConfigError, ParallelError
from aottrain.measure import links
from aottrain.trainer.parallel import world as worlds
from aottrain.trainer.parallel.link import take_link
from aottrain.trainer.parallel.world import ALONE, World

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is without gloo")


@pytest.fixture
def told(monkeypatch):
    """The other process gives four times what this one gives, or what is put in here; what was sent is kept."""
    given, sent = {}, []

    def all_reduce(value, op=dist.ReduceOp.SUM):
        sent.append(value.clone())
        value.mul_(5 if op == dist.ReduceOp.SUM else 4)

    def all_gather_object(values, value):
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

    def taken(world, **figures):
        config = RunConfig(parallel=ParallelConfig(**figures))
        return take_link(world, config, "default", torch.device("cpu"))

    assert taken(ALONE, latency=1.0) == "" and links.link() == links.Link()
    line = taken(World(0, 2), latency=0.001, bandwidth=2e9)
    assert links.link() == links.Link(0.001, 2e9, 2)
    assert line.startswith("2 processes, planned for 1.00 ms and 1.86 GiB/s")
