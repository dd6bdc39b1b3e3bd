"""What the loop of each process does together with the others', between two steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aottrain.trainer.checkpoint import CheckpointFolder, Loaded, find, load, random_state
from aottrain.trainer.job import Job
from aottrain.trainer.meters import StepMeter
from aottrain.trainer.parallel.world import World
from aottrain.trainer.signals import Stop

if TYPE_CHECKING:
    from aottrain.config.run import ParallelConfig


def agree(job: Job, config: ParallelConfig, step: int, stop: Stop) -> None:
    """After a step: a signal that one process has heard is heard by all. ParallelError: the weights differ."""
    world = job.world
    if world.size == 1:
        return
    heard = torch.tensor([stop.signum or 0, int(stop.is_save_asked)])
    torch.distributed.all_reduce(heard, torch.distributed.ReduceOp.MAX)
    signum, asked = heard.tolist()
    stop.signum, stop.is_save_asked = signum or None, bool(asked)
    if config.compare_every and step % config.compare_every == 0:
        world.compare(job.module, step)


def random_states(world: World) -> dict[str, Any]:
    """For a checkpoint: the random streams of the first process, and those of the others."""
    first, *others = world.gather(random_state())
    return {"random": first, **({"random_of_others": others} if others else {})}


def share_peak(world: World, meter: StepMeter) -> None:
    """The run's peak is that of the process that needs the most."""
    if world.size > 1:
        meter.highest = world.largest(meter.peak_bytes or 0) or None


def found_by_first(
    world: World, resume: str | None, folder: CheckpointFolder, say: Callable[[str], None]
) -> Loaded | None:
    """What `resume` names, as the first process finds it: `auto` is that one's folder. See `checkpoint.find`."""
    if world.size == 1:
        return find(resume, folder, say)
    kept: list[Loaded] = []

    def path() -> str | None:
        kept.extend(filter(None, [find(resume, folder, say)]))
        return str(kept[0].path) if kept else None

    found = world.from_first(path)
    if found is None or kept:
        return kept[0] if kept else None
    return load(Path(found))


class NoCheckpoints(CheckpointFolder):
    """Of a process that writes none: the first one does."""

    def save(self, step: int, state: Any, held_out_loss: float | None = None, say: Any = print) -> Any:
        return self.directory
