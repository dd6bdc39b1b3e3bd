"""One process of a group: gradients and losses of small models, each with its part of a batch, against eager PyTorch on
the whole batch. Prints a line of JSON for each case, (its name, relative error of loss and gradients, eager calls).

    python tests/parallel/sums.py case...      # mode/kernel/partition/model, as ddp/cpp/save_all/tied

mode: ddp, shard, or replicas, two of parts, of four processes. A model's name may end in "-bf16".
"""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta

import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.config.parallel import ParallelConfig
from aottrain.config.run import RunConfig
from aottrain.ops.random.mode import philox_eager
from aottrain.trainer.engines import LossModule, ModuleStep
from aottrain.trainer.parallel.replicas import grouped
from aottrain.trainer.parallel.shards import Shards
from aottrain.trainer.parallel.world import joined

PARTITIONS = {"save_all": {"partition": "save_all"}, "min_cut": {"partition": "min_cut"}, "budget": {"budget": 0.3}}


class Plain(nn.Module):
    def __init__(self, width: int = 24):
        super().__init__()
        self.embedding = nn.Embedding(19, width)
        self.norm = nn.LayerNorm(width)
        self.expand, self.contract = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 19, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.contract(F.gelu(self.expand(self.norm(x))))
        return self.head(x)


class Tied(Plain):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight


class Odd(Plain):
    """Rows that no number of processes divides, and a number."""

    def __init__(self):
        super().__init__(23)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


class Unused(Plain):
    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(3, 3)


class Dropping(Plain):
    def forward(self, tokens):
        x = F.dropout(self.embedding(tokens), 0.3)
        return self.head(x + self.contract(F.dropout(F.gelu(self.expand(self.norm(x))), 0.2)))


MODELS = {"plain": Plain, "tied": Tied, "odd": Odd, "unused": Unused, "accumulated": Plain, "weighted": Plain,
          "eager": Plain, "empty": Plain, "dropout": Dropping}  # fmt: skip


def loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)


def weight(batch):
    return (batch[1] != -100).sum()


def batches_of(name: str, size: int):
    """Whole batches; some targets count for nothing where the model is a weighted one."""
    generator = torch.Generator().manual_seed(3)
    count = 2 if name == "accumulated" else 1
    whole = []
    for _ in range(count):
        tokens, targets = (torch.randint(19, (2 * size, 6), generator=generator) for _ in range(2))
        if name == "weighted":
            targets[0, :5] = -100
        if name == "empty":
            targets[:2] = -100  # all of the first process's part
        whole.append((tokens, targets))
    return whole


def expected(reference, name: str, whole, world):
    """The loss and gradients of one process on the whole batch. Where numbers are drawn each process has others: of all
    parts one after the other, each drawn for as its process does."""
    if name != "dropout":
        losses = [reference(*batch) for batch in whole]
        total = sum(losses) / len(whole)
        total.backward()
        return total.detach()
    alone = torch.zeros(())
    for rank in range(world.size):
        torch.manual_seed(100 + rank)
        with philox_eager():
            part = reference(*(t[2 * rank : 2 * rank + 2] for t in whole[0])) / world.size
        part.backward()
        alone += part.detach()
    torch.manual_seed(100 + world.rank)
    return alone


def errors(case: str, world) -> tuple[float, int]:
    mode, kernel, partition, name = case.split("/")
    name, _, precision = name.partition("-")
    precision = precision or "fp32"
    world.mode = "ddp" if mode == "ddp" else "shard"
    world.replicas = 2 if mode == "replicas" else 1
    with grouped(world.rank, world.size, world.replicas, timedelta(seconds=60)) as world.groups:
        return _errors(kernel, partition, name, precision, world)


def _errors(kernel: str, partition: str, name: str, precision: str, world) -> tuple[float, int]:
    torch.manual_seed(0)
    reference, model = MODELS[name](), MODELS[name]()
    model.load_state_dict(reference.state_dict())
    whole = batches_of(name, world.size)
    own = [tuple(t[2 * world.rank : 2 * world.rank + 2].clone() for t in batch) for batch in whole]
    weighs = weight if name in ("weighted", "empty") else None
    wanted_loss = expected(LossModule(reference, loss, precision), name, whole, world)
    module = LossModule(model, loss, precision, weight=weighs, world=world)
    if world.mode == "shard":
        module.shards = Shards(model, world)
    reduces = len(whole) == 1 and world.num_copies > 1
    counts = {"tokens_per_batch": 0, "shares": module.shares, "module": module}
    if name == "eager":
        step = ModuleStep("eager", module, **counts)
    else:
        over = world.copies_group if reduces else None
        options = {**PARTITIONS[partition], "kernel": kernel, "capture": "trace", "on_unsupported": "error"}
        compiled = aottrain.compile(module, reduce_over=over, **options)
        more = {"compile_for": lambda batch: compiled.prepare(*batch), "report": compiled.report, "reduces": reduces}
        step = ModuleStep("aot", compiled, **counts, **more)
    result = step(own)
    assert result.num_samples == 2 * world.size * len(whole)
    found = [(result.loss - wanted_loss).abs() / wanted_loss.abs()]
    for (what, theirs), ours in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert (theirs.grad is None) == (ours.grad is None), what
        if theirs.grad is not None:
            wanted = theirs.grad if module.shards is None else module.shards.cut(theirs.grad)
            found.append((ours.grad - wanted).norm() / wanted.norm().clamp(1e-9))
    # Of tensors the largest is NaN where one is; Python's own max passes over it.
    return torch.stack(found).max().item(), sum(result.ran_eagerly)


def main(cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = RunConfig(parallel=ParallelConfig(name="ddp", timeout=60.0), output_dir="out")
    with joined(config) as (world, _):
        for case in cases:
            print(json.dumps((case, *errors(case, world))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
