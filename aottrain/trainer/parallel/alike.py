"""What the processes of a run must have alike before they do anything together: settings, and what is made of them.

One that was told something else, or finds other data, would train something else, or wait for what the others never do.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import nn

from aottrain.config.run import RunConfig
from aottrain.errors import ConfigError

if TYPE_CHECKING:
    from aottrain.trainer.parallel.world import World

_OTHERS_READ_WITHIN = timedelta(seconds=5)
_NOTHING = "nothing"


def check_settings(world: World, config: RunConfig) -> None:
    """ConfigError, in all processes, names each setting that another process was given otherwise. Folders may lie
    elsewhere on each machine: what is read there is compared by `World.agree` once it is read."""
    if world.size == 1:
        return
    own = dict(_flat("", dataclasses.asdict(config)))
    del own["output_dir"]  # which the first process makes and the others are told
    keys = [f"settings/{rank}" for rank in range(world.size)]
    world.store.set(keys[world.rank], json.dumps(own))
    world.store.wait(keys, world.timeout)
    everyones = [json.loads(world.store.get(key)) for key in keys]
    mistakes = list(_differences(everyones))
    if mistakes:
        world.store.set(f"read/{world.rank}", "")
        if world.is_first:  # with it the store may end, which the others are still to read
            with suppress(Exception):
                world.store.wait([f"read/{rank}" for rank in range(world.size)], _OTHERS_READ_WITHIN)
        raise ConfigError(mistakes)


def shapes_of(model: nn.Module) -> str:
    """Its parameters and buffers, a line each, to compare."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return "\n".join(f"{name}: {value.dtype} {list(value.shape)}" for name, value in named)


def _differences(everyones: list[dict[str, str]]) -> Iterator[str]:
    """Of each setting the first process that has another one. Where some that all have differ, as the recipe's name,
    those that others are without follow from it."""
    first = everyones[0]
    keys = sorted({key for theirs in everyones for key in theirs})
    of_all = [key for key in keys if all(key in theirs for theirs in everyones)]
    for some in (of_all, keys):
        found = False
        for key in some:
            here = first.get(key, _NOTHING)
            others = ((rank, theirs.get(key, _NOTHING)) for rank, theirs in enumerate(everyones))
            rank, there = next(((rank, there) for rank, there in others if there != here), (0, here))
            if rank:
                found = True
                yield f"{key}: process 0 was given {here}, process {rank} {there}; all must be given the same"
        if found:
            return


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each setting as text."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", "a path" if isinstance(value, str) and os.path.isabs(value) else repr(value)
