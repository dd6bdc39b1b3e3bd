"""The predicted peak of a process that has parts of the weights, against the allocator's events: under a process group
that sends nothing, since gloo's threads hold what has arrived until they have more to do."""

from __future__ import annotations

import pytest
import torch

import aottrain
from aottrain.compat_distributed import imagined_processes
from aottrain.trainer.engines import LossModule
from aottrain.trainer.parallel.shards import Shards
from aottrain.trainer.parallel.world import World
from tests.compiler.link.test_peak import measured_peak
from tests.parallel.sums import Odd, Plain, loss
from tests.sampling import WHOLE


@pytest.fixture
def world():
    with imagined_processes(2):
        yield World(0, 2, "shard")


@pytest.mark.parametrize(("made", "kernel", "plan", "num_gathers"), [
    pytest.param(Plain, "aten", {"partition": "save_all"}, 4, marks=WHOLE),
    (Odd, "aten", {"partition": "min_cut"}, 2),
    (Plain, "cpp", {"budget": 1.0}, 4),
    pytest.param(Plain, "cpp", {"budget": 0.5}, 10, marks=WHOLE),  # no room for any of them
])  # fmt: skip
def test_the_peak_is_predicted_with_joined_gathers_under_way(world, made, kernel, plan, num_gathers):
    torch.manual_seed(0)
    model = Plain(128) if made is Plain else Odd()
    module = LossModule(model, loss, world=world)
    module.shards = Shards(model, world)
    options = {"capture": "trace", "on_unsupported": "error", "decisions": "default", "workspaces": True}
    call = aottrain.compile(module, kernel=kernel, **options, **plan)
    batch = torch.randint(19, (8, 32)), torch.randint(19, (8, 32))
    graph = call.prepare(*batch)

    def step():
        result = call(*batch)
        result.backward()
        return result

    step()
    for parameter in model.parameters():
        parameter.grad = None
    measured = measured_peak(step) + graph.timeline.fixed_bytes
    assert measured == pytest.approx(graph.predicted_peak_bytes, rel=2e-3)
    gathers = [each for each in graph.collectives if "gather" in each.call]
    assert len(gathers) == num_gathers
