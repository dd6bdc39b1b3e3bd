"""0/1 knapsack by dynamic programming (Bellman, "Dynamic Programming", 1957), as a pure function over lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def knapsack(sizes: Sequence[int], values: Sequence[float], capacity: int, resolution: int = 4096) -> list[int]:
    """Indices of the most valuable items whose sizes sum to at most `capacity`, ascending.

    Sizes are rounded up to capacity / resolution, so the capacity is never passed; what fits exactly by a coarser unit
    may be missed. Items of size 0 are always taken. O(len(sizes) * resolution) time.
    """
    free = [i for i, size in enumerate(sizes) if size <= 0]
    items = [i for i, size in enumerate(sizes) if 0 < size <= capacity]
    if not items:
        return free
    if sum(sizes[i] for i in items) <= capacity:
        return sorted(free + items)
    unit = max(1, -(-capacity // resolution))
    slots = capacity // unit
    best = np.zeros(slots + 1)
    taken = np.zeros((len(items), slots + 1), dtype=bool)
    for row, i in enumerate(items):
        width = -(-sizes[i] // unit)
        if width > slots:
            continue
        with_item = best[: slots + 1 - width] + values[i]
        better = with_item > best[width:]
        taken[row, width:] = better
        best[width:] = np.where(better, with_item, best[width:])
    chosen, slot = [], slots
    for row in range(len(items) - 1, -1, -1):
        if taken[row, slot]:
            chosen.append(items[row])
            slot -= -(-sizes[items[row]] // unit)
    return sorted(free + chosen)
