"""What the loop of each process does together with the others', between two steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aottrain.errors import ResumeError
from aottrain.trainer.checkpoint import CheckpointFolder, Loaded, find, load
from aottrain.trainer.job import Job
from aottrain.trainer.meters import StepMeter
from aottrain.trainer.parallel.world import World
from aottrain.trainer.reliability.signals import Stop
from aottrain.trainer.reliability.streams import random_state

if TYPE_CHECKING:
    from aottrain.config.parallel import ParallelConfig


def agree(job: Job, config: ParallelConfig, step: int, stop: Stop) -> None:
    """After a step: a signal that one process has heard is heard by all. ParallelError: the weights differ."""
    world = job.world
    if world.size == 1:
        return
    heard = torch.tensor(stop.takes_heard(), dtype=torch.int64)
    torch.distributed.all_reduce(heard, torch.distributed.ReduceOp.MAX)
    signum, asked = heard.tolist()
    stop.signum, stop.is_save_asked = signum or None, bool(asked)
    if world.num_copies > 1 and config.compare_every and step % config.compare_every == 0:
        world.compare(job.module, step)


def is_ending(world: World, stop: Stop) -> bool:
    """Amid an evaluation: whether a signal that one process has heard is to end the run, of which all hear then."""
    if world.size > 1 and stop.signum is None:
        stop.signum = world.largest(stop.heard or 0) or None
    return stop.signum is not None


def random_states(world: World) -> dict[str, Any]:
    """For a checkpoint: the random streams of the first process, and those of the others."""
    first, *others = world.gather(random_state())
    return {"random": first, **({"random_of_others": others} if others else {})}


def own_state(job: Job) -> dict[str, Any]:
    """Model, optimizer and what is beside them, as this process has them."""
    return {"model": job.module.model.state_dict(), "optimizer": job.optimizer.state_dict(), **job.state_beside()}


def whole_state(job: Job) -> dict[str, Any]:
    """For a checkpoint: model, optimizer and what is beside them, as one process has them. Where each holds parts of
    the weights the first one gets all, on the CPU; all take part."""
    state = own_state(job)
    if (shards := job.module.shards) is not None:
        state = through(job, state, lambda value, name, _: shards.consolidated(value, name))
    return state


def part_of_state(job: Job, loaded: Loaded) -> Loaded:
    """The checkpoint with this process's part of each weight; what is on the disk is read, no more rows of it than
    these. ResumeError: it has weights of other shapes, or cannot be read."""
    if (shards := job.module.shards) is None:
        return loaded
    try:
        state = through(job, loaded.state, lambda value, name, _: shards.part_of(value, name))
    except ResumeError as error:
        raise ResumeError(f"{loaded.path}: {error}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise ResumeError(f"{loaded.path}: is not of this model or optimizer") from error
    return replace(loaded, state={**loaded.state, **state})


def through(job: Job, state: Mapping[str, Any], change: Callable[[Any, str, tuple[Any, ...]], Any]) -> dict[str, Any]:
    """What `change(value, name, place)` makes of all values that weights have, by the names of the weights. place: the
    keys that lead to it."""
    shards = job.module.shards
    assert shards is not None

    def changed(values: Mapping[str, Any], names: Mapping[Any, str], *place: Any) -> dict[Any, Any]:
        return {
            key: change(value, names[key], (*place, key)) if key in names else value for key, value in values.items()
        }

    of_model = OrderedDict(changed(state["model"], {place.key: place.name for place in shards.places}, "model"))
    vars(of_model).update(getattr(state["model"], "__dict__", {}))  # a state_dict has its modules' versions there
    name_of = {parameter: name for name, parameter in job.module.model.named_parameters()}
    members = [name_of[parameter] for group in job.optimizer.param_groups for parameter in group["params"]]
    optimizer = dict(state["optimizer"])
    optimizer["state"] = {
        number: changed(values, {key: members[number] for key in values if key != "step"}, "optimizer", "state", number)
        for number, values in sorted(state["optimizer"]["state"].items())
    }
    result = {"model": of_model, "optimizer": optimizer, "averages": state["averages"], "patience": state["patience"]}
    if state["averages"] is not None:
        values = state["averages"]["values"]
        means = changed(values, {name: name for name in values}, "averages", "values")
        result["averages"] = {**state["averages"], "values": means}
    return result


def share_peak(world: World, meter: StepMeter) -> None:
    """The run's peak is that of the process that needs the most."""
    if world.size > 1:
        meter.highest = world.largest(meter.peak_bytes or 0) or None


def found_by_first(
    world: World, resume: str | None, folder: CheckpointFolder, say: Callable[[str], None]
) -> Loaded | None:
    """What `resume` names, as the first process finds it: `auto` is that one's folder. See `checkpoint.find`. Where
    processes hold parts, what is in pieces stays on the disk; the first one compares their checksums."""
    if world.size == 1:
        return find(resume, folder, say)
    lazily = world.num_parts > 1
    kept: list[Loaded] = []

    def path() -> str | None:
        kept.extend(filter(None, [find(resume, folder, say, lazily=lazily)]))
        return str(kept[0].path) if kept else None

    found = world.from_first(path)
    if found is None or kept:
        return kept[0] if kept else None
    return load(Path(found), lazily, checks=not lazily)


class NoCheckpoints(CheckpointFolder):
    """Of a process that writes none: the first one does."""

    def save(self, step: int, state: Any, held_out_loss: float | None = None, say: Any = print) -> Any:
        return self.directory
