"""Two processes done by one: torch's collectives, beside another process that gives FACTOR times what this one gives.

What is under way is done when it is waited for, and holds NaN until then; sources are read then, too. So whatever
touches memory too early, or writes it too early, has another result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aottrain.ops.collectives import COPIES, PARTS

FACTOR = 4.0  # a power of two: the sum of both is rounded as once five times the value
BOTH = 1 + FACTOR
GROUP = "0"
GROUPS = (GROUP, PARTS, COPIES)  # in each of which there is one other process


def by_rank(value: Tensor, rank: int) -> list[Tensor]:
    """What each of the two gives."""
    return [value * FACTOR ** (place != rank) for place in range(2)]


class Beside:
    """Stands for torch.ops._c10d_functional."""

    def __init__(self, rank: int = 0):
        self.rank = rank
        self.under_way: dict[int, tuple[Any, Any]] = {}
        self.most = 0
        """Of collectives under way at once."""

    def _start(self, out: Tensor, finish: Any) -> Tensor:
        place = out.untyped_storage().data_ptr()
        assert place not in self.under_way, "two collectives have one memory"
        out.fill_(torch.nan)
        self.under_way[place] = out, finish
        self.most = max(self.most, len(self.under_way))
        return out

    def all_reduce_(self, value: Tensor, op: str, group: str) -> Tensor:
        assert op == "sum" and group in GROUPS and value.is_contiguous()
        total = value * BOTH
        return self._start(value, lambda: total)

    def all_gather_into_tensor_out(self, shard: Tensor, world: int, group: str, *, out: Tensor) -> Tensor:
        assert world == 2 and group in GROUPS and shard.is_contiguous()
        return self._start(out, lambda: torch.cat(by_rank(shard, self.rank)))

    def reduce_scatter_tensor(self, whole: Tensor, op: str, world: int, group: str) -> Tensor:
        assert (op, world) == ("sum", 2) and group in GROUPS and whole.is_contiguous()
        rows = whole.shape[0] // 2
        part = whole[self.rank * rows : (self.rank + 1) * rows]
        return self._start(torch.empty_like(part), lambda: part * BOTH)

    def wait_tensor(self, value: Tensor) -> Tensor:
        """Waits for all that is under way in its memory."""
        out, finish = self.under_way.pop(value.untyped_storage().data_ptr(), (None, None))
        if out is not None:
            out.copy_(finish())
        return value
