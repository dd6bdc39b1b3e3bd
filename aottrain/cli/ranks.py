"""The command line of several processes that torchrun has started: what they may not be asked, and who speaks."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, TextIO

from aottrain.config.launch import place
from aottrain.config.run import RunConfig
from aottrain.config.schema import Mistake, show
from aottrain.ir.settings.devices import is_specified

_WAITS_S = 3.0  # by then torchrun has ended this process, where the first one has ended of the same


def misplaced(config: RunConfig) -> list[Mistake]:
    """What several processes cannot do together, or cannot be told to."""
    size, mode = place().size, config.parallel.name
    if size == 1:
        return _of_parts(config, config.parallel.world or 1) if config.task == "plan" else []
    mistakes = []
    if mode == "none":
        text = f"torchrun has started {size} processes, each of which would train alone; write parallel=ddp or shard"
        mistakes.append(Mistake("parallel", text, mode))
    if config.task != "train":
        mistakes.append(Mistake("task", "runs in one process: start it without torchrun", config.task))
    if config.device.startswith("cuda:"):
        mistakes.append(Mistake("device", "each of several processes takes its own; write device=cuda", config.device))
    return mistakes + _of_parts(config, size)


def _of_parts(config: RunConfig, size: int) -> list[Mistake]:
    """What so many processes cannot be given parts of, here or where they are planned for."""
    mistakes: list[Mistake] = []
    if size == 1:
        return mistakes
    mode = config.parallel.name
    if mode == "shard" and config.engine.name not in ("aot", "eager"):
        mistakes.append(Mistake("engine", "parallel=shard takes aot or eager", config.engine.name))
    if mode == "shard" and config.optimizer.target is not None:
        text = "may look at more than one element of a weight, and parallel=shard has parts; use parallel=ddp"
        mistakes.append(Mistake("optimizer.target", text, config.optimizer.target))
    replicas = config.parallel.replicas
    if mode == "shard" and size % replicas:
        text = f"must divide the {size} processes, as many of which hold each replica"
        mistakes.append(Mistake("parallel.replicas", text, show(replicas)))
    elif mode == "shard" and replicas > 1 and size // replicas < 2:
        text = f"leaves no two of the {size} processes to share a replica's weights; write parallel=ddp"
        mistakes.append(Mistake("parallel.replicas", text, show(replicas)))
    if config.data.batch_size % size:
        text = f"must be a multiple of the {size} processes, each of which takes its part of the batch"
        mistakes.append(Mistake("data.batch_size", text, show(config.data.batch_size)))
    if is_specified(config.device):
        text = "plans for processes of this machine; write plan.world, of devices by their names"
        mistakes.append(Mistake("parallel.world", text, show(size)))
    return mistakes


def quiet_but_first() -> None:
    """The first process prints for all; of the others what goes to stderr is said with their number."""
    if rank := place().rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
        sys.stderr = Numbered(sys.stderr, f"process {rank}: ")  # type: ignore[assignment]


def let_first_speak() -> None:
    """Before what all processes find alike is said: the first one ends with it, and torchrun then ends the others."""
    if place().rank:
        time.sleep(_WAITS_S)


class Numbered:
    """A stream whose lines begin with which process wrote them; no terminal, so that no bar is drawn."""

    def __init__(self, stream: TextIO, prefix: str):
        self.stream, self.prefix, self._begins = stream, prefix, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self.stream.write(self.prefix * self._begins + line)
            self._begins = line.endswith("\n")
        return len(text)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
