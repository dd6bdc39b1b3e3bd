"""Plans of at most so many saved bytes by a 0/1 knapsack, to compare those of a budget with: see `knapsack_cut`.

The knapsack as pure functions over lists: greedy, by dynamic programming, and as an integer program.

Each takes sizes and values (of at least 0) and a capacity, and gives the indices of the items that it takes, ascending;
their sizes sum to at most the capacity. Items of size 0 are always taken, and all where all fit.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence

import numpy as np
from torch import fx

from aottrain.compiler.partition import strategies
from aottrain.compiler.partition.costs.op_cost import node_seconds
from aottrain.compiler.partition.strategies import Demand
from aottrain.errors import UnsupportedError
from aottrain.ir.graph import spec_of, storage_bytes
from aottrain.ir.plan import PartitionPlan


def greedy(sizes: Sequence[int], values: Sequence[float], capacity: int) -> list[int]:
    """By value for each unit of size, or the single most valuable item that fits: worth at least half of the best
    (Martello and Toth, "Knapsack Problems", 1990, section 2.4). O(n log n)."""
    free, items = _split(sizes, capacity)
    chosen, room = [], capacity
    for i in sorted(items, key=lambda i: (-values[i] / sizes[i], i)):
        if sizes[i] <= room:
            chosen.append(i)
            room -= sizes[i]
    best = max(items, key=lambda i: values[i], default=None)
    if best is not None and values[best] > sum(values[i] for i in chosen):
        chosen = [best]
    return sorted(free + chosen)


def dp(sizes: Sequence[int], values: Sequence[float], capacity: int, resolution: int = 4096) -> list[int]:
    """By dynamic programming (Bellman, "Dynamic Programming", 1957): the most valuable items in units of
    capacity / resolution. Sizes are rounded up to units, so the capacity is never passed; what fits exactly may be
    missed. O(n * resolution)."""
    free, items = _split(sizes, capacity)
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


def ilp(sizes: Sequence[int], values: Sequence[float], capacity: int) -> list[int]:
    """As an integer program, by the branch and cut of HiGHS: the most valuable items. Raises UnsupportedError without
    scipy."""
    free, items = _split(sizes, capacity)
    if sum(sizes[i] for i in items) <= capacity:
        return sorted(free + items)
    try:
        optimize = importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise UnsupportedError("the knapsack as an integer program needs scipy: pip install scipy") from error
    # In units of the capacity and of the largest value: HiGHS takes differences below 1e-6 for none.
    weights, worth = np.array([sizes[i] for i in items], dtype=float), np.array([values[i] for i in items], dtype=float)
    solution = optimize.milp(
        -worth / max(worth.max(), 1e-300),
        constraints=optimize.LinearConstraint(weights[None, :] / capacity, ub=1.0),
        integrality=np.ones(len(items)),
        bounds=optimize.Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    chosen = [i for i, taken in zip(items, solution.x, strict=True) if taken > 0.5]
    while sum(sizes[i] for i in chosen) > capacity:  # by rounding within the solver's tolerance
        chosen.remove(min(chosen, key=lambda i: values[i] / sizes[i]))
    return sorted(free + chosen)


def _split(sizes: Sequence[int], capacity: int) -> tuple[list[int], list[int]]:
    """Items of no size, and those that could fit."""
    return [i for i, size in enumerate(sizes) if size <= 0], [i for i, size in enumerate(sizes) if 0 < size <= capacity]


def knapsack_cut(demand: Demand, capacity: int) -> PartitionPlan:
    """At most `capacity` saved bytes, or what must be saved: a knapsack keeps the products that are worth most.

    Any set of values that is kept from being recomputed is itself a cut (all else follows from the inputs), so the
    minimum cut under that set never holds more bytes than the set: the capacity is kept by construction.
    """
    must = {node for node in demand.region if strategies._must_save(node, demand)}
    room = max(capacity - sum(storage_bytes(node) for node in must), 0)
    once = (node for node in demand.region if strategies._runs_once(node, demand))
    compute = demand.in_order(node for node in once if node not in must)
    sizes, worth = [_output_bytes(node) for node in compute], [node_seconds(node) for node in compute]
    kept = {compute[i] for i in dp(sizes, worth, room)}
    cut = strategies._cut(demand, kept | must)
    why = functools.partial(strategies._cut_reason, demand=demand, banned=kept)
    return strategies._plan(f"knapsack {capacity}", demand, cut, why)


def _output_bytes(node: fx.Node) -> int:
    if spec_of(node) is not None:
        return storage_bytes(node)
    return sum(storage_bytes(user) for user in node.users)
