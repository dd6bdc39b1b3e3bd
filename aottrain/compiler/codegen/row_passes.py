"""Which values each pass over a row computes, and which are held for a later one. Both renderers follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aottrain.ir.analysis.liveness import last_uses
from aottrain.ir.kernels.kernel import (
    Compute,
    KernelIR,
    Level,
    Load,
    Reduce,
    Store,
    is_run,
    levels,
    operands,
    stages,
)

# Values that cost more than this (in additions) to compute again are held for a later pass.
_HOLD_FROM = 3
# Cost in additions; what is not named costs 1.
_COSTS = {
    "div": 3, "exp": 8, "log": 10, "tanh": 14, "erf": 16, "sin": 9, "cos": 9, "sigmoid": 10, "sqrt": 3, "rsqrt": 6,
    "pow": 40, "power": 40, "reciprocal": 3, "philox": 30, "philox_normal": 60, "cast": 0,
}  # fmt: skip
BEFORE = -1


@dataclass
class PassPlan:
    """How a row is passed over."""

    passes: list[list[int]] = field(default_factory=list)
    """For each pass over the row the elements that it computes or reads back, in order."""
    holds: dict[int, int] = field(default_factory=dict)
    """For each value that is held the pass that computes it; BEFORE for draws that are made for a whole row first."""


def cost_of(op: str) -> int:
    """In additions."""
    return _COSTS.get(op, 1)


def is_element(kernel: KernelIR, value_levels: Sequence[Level], store: Store) -> bool:
    """Whether it stores one value per element of the row, not one per row."""
    if value_levels[store.value] is Level.ELEMENT:
        return True
    return any(loop >= kernel.num_outer for loop in store.address.offset.loops)


def store_stage(value_stages: Sequence[int], store: Store) -> int:
    """The pass that stores it: the first in which all that it needs is known."""
    return max([value_stages[store.value], *(value_stages[v] for v, _, _ in store.address.indirect)])


def plan_passes(kernel: KernelIR, can_hold: bool) -> PassPlan:
    """can_hold: whether a row fits into fast memory. If not, all is computed again from what is in memory."""
    value_levels = levels(kernel)
    plan, first = PassPlan(), {}  # type: tuple[PassPlan, dict[int, int]]
    for number, roots in enumerate(_roots(kernel, value_levels, stages(kernel))):
        needed: set[int] = set()
        chosen = _need(kernel, value_levels, plan, first if can_hold else {}, number, roots, needed)
        for value in sorted(chosen):  # cheap now that others are held: computed again after all
            del plan.holds[value]
            if _cost(kernel, value_levels, value, {}, plan) > _HOLD_FROM:
                plan.holds[value] = first[value]
            else:
                _need(kernel, value_levels, plan, {}, number, operands(kernel.body[value]), needed)
        for value in needed:
            first.setdefault(value, number)
        plan.passes.append(sorted(needed))
    for value in first:
        if can_hold and is_run(kernel, value):
            plan.holds[value] = BEFORE
    return plan


def _need(
    kernel: KernelIR,
    value_levels: Sequence[Level],
    plan: PassPlan,
    first: Mapping[int, int],
    number: int,
    roots: Sequence[int],
    needed: set[int],
) -> list[int]:
    """Add to `needed` what a pass computes or reads back for its roots. Returns what is held from now on: what `first`
    knows an earlier pass of and is dear."""
    costs: dict[int, int] = {}
    chosen: list[int] = []
    stack = [root for root in roots if value_levels[root] is Level.ELEMENT]
    while stack:
        value = stack.pop()
        if value in needed:
            continue
        needed.add(value)
        if value in plan.holds and plan.holds[value] < number:
            continue
        if first.get(value, number) < number and _cost(kernel, value_levels, value, costs, plan) > _HOLD_FROM:
            plan.holds[value] = first[value]
            chosen.append(value)
            continue
        stack += [v for v in operands(kernel.body[value]) if value_levels[v] is Level.ELEMENT]
    return chosen


def row_buffers(kernel: KernelIR, plan: PassPlan) -> dict[int, int]:
    """For each value that is held the number of its buffer: values of one type share it, one after the other.

    In the pass that reads one for the last time another may take its place, where it is computed after that."""
    last = last_uses(plan.passes)
    buffers: dict[int, int] = {}
    users: list[int] = []  # the last value of each buffer
    for value in sorted(plan.holds, key=lambda v: (plan.holds[v], v)):
        begin, dtype = plan.holds[value], kernel.body[value].dtype
        free = [
            number
            for number, user in enumerate(users)
            if (last[user], user) < (begin, value) and kernel.body[user].dtype is dtype
        ]
        buffers[value] = free[0] if free else len(users)
        if free:
            users[free[0]] = value
        else:
            users.append(value)
    return buffers


def _roots(kernel: KernelIR, value_levels: Sequence[Level], value_stages: Sequence[int]) -> list[list[int]]:
    """For each pass the elements that its reductions, stores and columns read."""
    roots: list[list[int]] = [[] for _ in range(max(value_stages, default=0) + 1)]
    for instruction in kernel.body:
        if isinstance(instruction, Reduce):
            roots[value_stages[instruction.value]].append(instruction.value)
    for store in kernel.stores:
        if is_element(kernel, value_levels, store):
            roots[store_stage(value_stages, store)] += [store.value, *(v for v, _, _ in store.address.indirect)]
    for each in kernel.sums:
        roots[value_stages[each.value]].append(each.value)
    return roots


def _cost(kernel: KernelIR, value_levels: Sequence[Level], value: int, costs: dict[int, int], plan: PassPlan) -> int:
    """Of computing an element again in a later pass, from memory and from what is held."""
    if value in costs:
        return costs[value]
    instruction = kernel.body[value]
    cost = 0
    if value not in plan.holds and value_levels[value] is Level.ELEMENT:
        if isinstance(instruction, Load):
            cost = 1 + 4 * bool(instruction.address.indirect or instruction.guard is not None)
        elif isinstance(instruction, Compute):
            cost = cost_of(instruction.op)
            cost += sum(_cost(kernel, value_levels, v, costs, plan) for v in instruction.args)
    costs[value] = cost
    return cost
