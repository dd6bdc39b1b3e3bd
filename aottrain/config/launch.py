"""What a process is told by the one that started it: which of torchrun's processes it is, and whether it ends with a
sweep. Imports nothing that takes time: the command line asks before torch is there."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass

SWEEP = "AOTTRAIN_SWEEP_PROCESS"
"""In the environment of a job: the process of its sweep."""
_PR_SET_PDEATHSIG = 1


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


def end_with_parent() -> None:
    """Ask the system for SIGTERM when the process that started this one is gone, however that ended. Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with_sweep() -> None:
    """Of a sweep's job `end_with_parent`, also where the sweep has gone before that was asked for. What the job starts
    is told nothing of it."""
    told = os.environ.pop(SWEEP, "")
    if not told.isdecimal() or sys.platform != "linux":
        return
    end_with_parent()
    try:
        os.kill(int(told), 0)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGTERM)
