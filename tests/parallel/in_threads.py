"""Processes of a run as threads of this one, for what they do by files alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from aottrain.config.run import TrainerConfig
from aottrain.trainer.parallel.pieces import FolderOfPieces, state_in_pieces
from aottrain.trainer.parallel.shards import Shards
from aottrain.trainer.parallel.world import World
from tests.parallel.sums import Odd, Tied

WAITS_S = 30.0


@dataclass(eq=False)
class InThread(World):
    """As one thread sees the others."""

    slots: Any = None
    barrier: Any = None
    group = "threads"

    def gather(self, value):
        self.slots[self.rank] = value
        self.barrier.wait(WAITS_S)
        values = list(self.slots)
        self.barrier.wait(WAITS_S)
        return values

    def all_hold(self, flag):
        return all(self.gather(flag))

    def from_first(self, make):
        value = error = None
        if self.is_first:
            try:
                value = make()
            except Exception as raised:
                error = raised
        value, error = self.gather((value, error))[0]
        if error is not None:
            raise error
        return value


def together(size: int, call: Callable[[World], Any], replicas: int = 1) -> list[Any]:
    """What `call(world)` gives in each of so many, by rank; the first error is raised."""
    slots, barrier, store = [None] * size, threading.Barrier(size), dist.HashStore()
    wait = timedelta(seconds=WAITS_S)
    worlds = [
        InThread(rank, size, "shard", wait, store, replicas, slots=slots, barrier=barrier) for rank in range(size)
    ]
    with ThreadPoolExecutor(size) as threads:
        return [future.result() for future in [threads.submit(call, world) for world in worlds]]


def whole_job(step: int, kind: str = "odd") -> SimpleNamespace:
    """Weights, an optimizer's state and means of a run after that step, as one process has them."""
    draw = torch.Generator().manual_seed(step)
    model = Odd() if kind == "odd" else Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    means = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.rand(weight.shape, generator=draw))
            values = {key: torch.rand(weight.shape, generator=draw) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[weight] = {"step": torch.tensor(float(step)), **values}
            means[name] = torch.rand(weight.shape, generator=draw)
    return job_of(model, optimizer, means, None)


def job_of(model, optimizer, means, shards) -> SimpleNamespace:
    beside = {"averages": {"values": means, "num_updates": 3}, "patience": {"best": 1.5}}
    module = SimpleNamespace(model=model, shards=shards)
    return SimpleNamespace(module=module, optimizer=optimizer, state_beside=lambda: dict(beside))


def state_of(job: SimpleNamespace) -> dict[str, Any]:
    model, optimizer = job.module.model.state_dict(), job.optimizer.state_dict()
    return {"model": model, "optimizer": optimizer, **job.state_beside()}


def part_job(step: int, world: World, kind: str = "odd") -> SimpleNamespace:
    """The same of one that holds parts."""
    whole = whole_job(step, kind)
    model, means = whole.module.model, whole.state_beside()["averages"]["values"]
    states = [whole.optimizer.state[weight] for weight in model.parameters()]
    shards = Shards(model, world)
    optimizer = torch.optim.AdamW(model.parameters())
    for weight, state in zip(model.parameters(), states, strict=True):
        cut = {key: shards.cut(value) if key != "step" else value for key, value in state.items()}
        optimizer.state[weight] = cut
    return job_of(model, optimizer, {name: shards.cut(value) for name, value in means.items()}, shards)


def save_steps(
    directory: Path,
    steps: Sequence[int],
    size: int = 2,
    keep: TrainerConfig | None = None,
    kind: str = "odd",
    replicas: int = 1,
    losses: Sequence[float | None] = (),
) -> None:
    """Checkpoints in pieces of these steps, one after the other."""

    def save(world: World) -> None:
        folder = FolderOfPieces(directory, keep or TrainerConfig(keep_last=len(steps)), world)
        for number, step in enumerate(steps):
            state = {**state_in_pieces(part_job(step, world, kind)), "random": (1, [2.5]), "step_of": step}
            folder.begin(step, False)
            folder.save(step, state, losses[number] if losses else None)

    together(size, save, replicas)
