"""One process of a group: what people wrap models in already, around and inside what is compiled, against eager PyTorch
on the whole batch. Prints a line of JSON for each case: its name, the largest relative error of a gradient, how many
calls ran eagerly, and why.

    python tests/parallel/wrappers.py case...      # of CASES
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import aottrain


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def compiled(target, capture):
    return aottrain.compile(target, capture=capture, kernel="aten")


def around(capture):
    call = compiled(Model(), capture)
    return DistributedDataParallel(call), [call]


def inside(capture):
    call = compiled(DistributedDataParallel(Model()), capture)
    return call, [call]


def by_block(capture, first: bool):
    """Each block's forward compiled, before it is sharded or after."""
    model, calls = Model(), []
    for block in model.blocks:
        if not first:
            fully_shard(block)
        block.forward = compiled(block.forward, capture)
        calls.append(block.forward)
        if first:
            fully_shard(block)
    fully_shard(model)
    return model, calls


def around_of_block(capture):
    """Blocks compiled, and DDP around the model."""
    model = Model()
    calls = [compiled(block.forward, capture) for block in model.blocks]
    for block, call in zip(model.blocks, calls, strict=True):
        block.forward = call
    return DistributedDataParallel(model), calls


def whole(capture, first: bool):
    """The whole model's forward compiled, before it is sharded as one or after."""
    model = Model()
    if not first:
        fully_shard(model)
    model.forward = compiled(model.forward, capture)
    if first:
        fully_shard(model)
    return model, [model.forward]


def around_parts(capture):
    """The sharded model itself compiled: what the direct trace is given are parts."""
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    call = compiled(model, capture)
    return call, [call]


CASES = {
    "DDP around, dynamo": lambda: around("dynamo"),
    "DDP around, trace": lambda: around("trace"),
    "DDP inside, dynamo": lambda: inside("dynamo"),
    "DDP inside, trace": lambda: inside("trace"),
    "FSDP2 by block, compiled first, trace": lambda: by_block("trace", True),
    "FSDP2 by block, compiled last, dynamo": lambda: by_block("dynamo", False),
    "FSDP2 by block, compiled first, dynamo": lambda: by_block("dynamo", True),
    "FSDP2 by block, compiled last, trace": lambda: by_block("trace", False),
    "DDP around blocks, dynamo": lambda: around_of_block("dynamo"),
    "DDP around blocks, trace": lambda: around_of_block("trace"),
    "FSDP2 whole, compiled first, dynamo": lambda: whole("dynamo", True),
    "FSDP2 whole, compiled first, trace": lambda: whole("trace", True),
    "FSDP2 whole, compiled last, dynamo": lambda: whole("dynamo", False),
    "FSDP2 whole, compiled last, trace": lambda: whole("trace", False),
    "FSDP2 inside, dynamo": lambda: around_parts("dynamo"),
    "FSDP2 inside, trace": lambda: around_parts("trace"),
}


def gradient_of(parameter):
    gradient = parameter.grad
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def main(cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(2 * size, 8, generator=torch.Generator().manual_seed(3))
    reference = Model()
    reference(x).square().mean().backward()
    for case in cases:
        model, calls = CASES[case]()
        model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        pairs = zip(reference.parameters(), model.parameters(), strict=True)
        errors = [(gradient_of(own) - theirs.grad).norm() / theirs.grad.norm() for theirs, own in pairs]
        error = torch.stack(errors).max().item()
        reasons = [fallback.reason for call in calls for fallback in call.report.fallbacks]
        print(json.dumps((case, error, sum(call.report.num_fallbacks for call in calls), reasons)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
