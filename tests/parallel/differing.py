"""One process of a group that differs from the other in what it is told. Prints what it raises."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import aottrain
from aottrain.config.parallel import ParallelConfig
from aottrain.config.run import RunConfig
from aottrain.errors import ParallelError
from aottrain.trainer.engines import LossModule, ModuleStep
from aottrain.trainer.parallel.world import joined


def loss(model, batch):
    return model(*batch).square().mean()


def main(what: str) -> None:
    torch.set_num_threads(1)
    config = RunConfig(parallel=ParallelConfig(name="ddp", timeout=30.0), output_dir="out")
    with joined(config) as (world, _):
        start_s = time.monotonic()
        try:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=what != "program" or world.is_first))
            module = LossModule(model, loss, world=world)
            call = aottrain.compile(module, capture="trace", kernel="aten", reduce_over=world.group)
            prepare = call.prepare
            if what == "eager" and not world.is_first:
                prepare = lambda *batch: None  # noqa: E731
            more = {"compile_for": lambda batch: prepare(*batch), "report": call.report, "reduces": True}
            step = ModuleStep("aot", call, tokens_per_batch=0, shares=module.shares, module=module, **more)
            if what == "weights":
                world.broadcast(module)
                world.compare(module, 1)
                if not world.is_first:
                    model[1].bias.data[2] += 1e-7
                world.compare(module, 2)
            step([(torch.ones(2, 4),)])
            if what == "shape":
                step([(torch.ones(2 if world.is_first else 3, 4),)])
        except ParallelError as error:
            print(error, flush=True)
        assert time.monotonic() - start_s < 10


if __name__ == "__main__":
    main(sys.argv[1])
