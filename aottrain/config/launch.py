"""Which of the processes that torchrun has started this one is, as the environment says it. Imports nothing that takes
time: the command line asks before torch is there."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Of one process among those that do a run together."""

    rank: int = 0
    size: int = 1
    """How many there are."""
    local_rank: int = 0
    """Its number on its machine."""


def place() -> Place:
    """What torchrun has set; the only process where nothing is set."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return Place(rank, size, int(os.environ.get("LOCAL_RANK", rank)))
    except (KeyError, ValueError):
        return Place()
