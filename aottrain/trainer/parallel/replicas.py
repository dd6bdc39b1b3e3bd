"""Replicas of parts: of the processes of a run so many together hold all weights, in parts, and others hold the same
again (Zhang et al., 2022, "MiCS", https://arxiv.org/abs/2205.00119; hybrid sharding in Zhao et al., 2023, "PyTorch
FSDP", https://arxiv.org/abs/2304.11277).

Processes that follow each other hold a replica together, as those of one machine do: they gather weights and cut sums
of gradients among themselves. Those that hold the same part add up what they have got.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from aottrain.ops.collectives import COPIES, PARTS, groups_named


@dataclass(frozen=True)
class Groups:
    """The two process groups of torch.distributed that a process is in."""

    parts: Any
    """Of those that hold a replica together."""
    copies: Any
    """Of those that hold the same part."""


def members(size: int, replicas: int) -> tuple[list[list[int]], list[list[int]]]:
    """Of so many processes those that hold each replica, and those that hold each part."""
    count = size // replicas
    return (
        [list(range(first, first + count)) for first in range(0, size, count)],
        [list(range(part, size, count)) for part in range(count)],
    )


@contextmanager
def grouped(rank: int, size: int, replicas: int, timeout: timedelta) -> Iterator[Groups | None]:
    """Inside, the groups of this process are there, and programs may name them; None where there is one replica. All
    processes make all groups, in one order."""
    if replicas == 1:
        yield None
        return
    made = [[torch.distributed.new_group(ranks, timeout) for ranks in alike] for alike in members(size, replicas)]
    count = size // replicas
    groups = Groups(made[0][rank // count], made[1][rank % count])
    with groups_named({PARTS: groups.parts.group_name, COPIES: groups.copies.group_name}):
        yield groups
