"""The first gradients leave while most of the backward is still to be computed, however weights are held."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import aottrain
from aottrain.compat_distributed import imagined_processes
from aottrain.config.parallel import ParallelConfig
from aottrain.explain.records import BACKWARD
from aottrain.trainer.engines import LossModule
from aottrain.trainer.parallel.link import assume_link
from aottrain.trainer.parallel.replicas import grouped
from aottrain.trainer.parallel.shards import Shards
from aottrain.trainer.parallel.world import World
from scripts.bench_models import GPT

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is without gloo")


def report_of(mode: str, size: int, replicas: int, **options):
    """Of the program that the first of so many processes runs."""
    with imagined_processes(size), grouped(0, size, replicas, timedelta(minutes=1)) as groups:
        world = World(0, size, mode, replicas=replicas, groups=groups)
        assume_link(world, ParallelConfig(name=mode))
        torch.manual_seed(0)
        model = GPT(num_layers=4, width=96, num_heads=6, vocabulary=64, context=64)
        module = LossModule(model, lambda call, batch: call(*batch), world=world)
        if mode == "shard":
            module.shards = Shards(model, world)
        over = world.copies_group if world.num_copies > 1 else None
        options = {"capture": "trace", "on_unsupported": "error", "decisions": "default", **options}
        call = aottrain.compile(module, reduce_over=over, **options)
        return call.prepare(*(torch.zeros(2, 64, dtype=torch.int64) for _ in range(2)))


@pytest.mark.parametrize("kernel", ["aten", "cpp"])
@pytest.mark.parametrize(("mode", "size", "replicas"), [("ddp", 2, 1), ("shard", 8, 1), ("shard", 64, 8)])
def test_the_first_gradients_leave_early(mode, size, replicas, kernel):
    found = report_of(mode, size, replicas, kernel=kernel, partition="min_cut").collectives
    assert found.first_sum < 0.2
    sums = [each for each in found if each.half == BACKWARD and each.is_sum]
    assert len(sums) > 4 and sum(each.start_s < found.backward_s / 2 for each in sums) >= 2
