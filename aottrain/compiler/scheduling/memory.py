"""plan_memory: where each buffer of a schedule lives, and at which offset of the arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from aottrain.errors import VerificationError
from aottrain.ir.graph import info, results, spec_of, storage_root
from aottrain.ir.schedule import KernelCall, MemoryPlan, Schedule

# Ops that count positions from the start of a storage: what they read may not lie in the middle of an arena.
_BY_STORAGE = ("aten.as_strided.default", "aten.as_strided_scatter.default", "aten.as_strided_copy.default")
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector


def plan_memory(graph: fx.Graph, schedule: Schedule, num_outputs: int) -> MemoryPlan:
    """num_outputs: how many of the graph's results go to the user; the others are residuals, for the backward alone.

    Temporaries share an arena: each is put, the largest first, at the lowest offset that nothing alive at the same time
    has. What escapes, and all that libraries allocate themselves, is fresh memory.
    """
    values = results(graph)
    escaping = {storage_root(node) for node in values[:num_outputs] if node is not None}
    residuals = {storage_root(node) for node in values[num_outputs:] if node is not None} - escaping
    born, last = _lifetimes(schedule)
    alone = {storage_root(source) for node in graph.nodes if _reads_by_storage(node) for source in node.all_input_nodes}
    temporaries = [node for node in born if node not in escaping and node not in residuals and node not in alone]
    offsets = _first_fit(temporaries, born, last)
    verify_offsets(offsets, born, last)
    size = max((offsets[node] + _bytes(node) for node in temporaries), default=0)
    return MemoryPlan(
        offsets=offsets,
        residuals=frozenset(node for node in born if node in residuals),
        arena_bytes=size,
        max_live_bytes=_max_live(temporaries, born, last),
    )


def verify_offsets(offsets: Mapping[fx.Node, int], born: Mapping[fx.Node, int], last: Mapping[fx.Node, int]) -> None:
    """Law 5. Raises VerificationError where two values that are alive at once overlap."""
    alive: list[fx.Node] = []
    for node in sorted(offsets, key=lambda node: born[node]):
        alive = [other for other in alive if last[other] >= born[node]]
        start, end = offsets[node], offsets[node] + _bytes(node)
        for other in alive:
            if start < offsets[other] + _bytes(other) and offsets[other] < end:
                raise VerificationError(f"{node.name} and {other.name} are alive at once and overlap in the arena")
        alive.append(node)


def _lifetimes(schedule: Schedule) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """For each buffer that our memory holds the call that writes it first, and the last one that touches it."""
    born: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for position, call in enumerate(schedule.calls):
        if isinstance(call, KernelCall):
            touched: Sequence[fx.Node] = call.buffers
            for node in call.writes:
                born[node] = position
        else:
            touched = [call, *(storage_root(source) for source in call.all_input_nodes)]
            if schedule.takes_memory(call) and _is_dense(call):
                born[call] = position
        for node in touched:
            last[node] = position
    return born, last


def _reads_by_storage(node: fx.Node) -> bool:
    return node.op == "call_function" and info(node).name in _BY_STORAGE


def _is_dense(node: fx.Node) -> bool:
    facts = spec_of(node)
    return facts is not None and facts.symbolic is None and facts.numel > 0


def _bytes(node: fx.Node) -> int:
    facts = spec_of(node)
    assert facts is not None
    span = 1 + sum((size - 1) * stride for size, stride in zip(facts.shape, facts.stride, strict=True))
    return -(-span * facts.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _first_fit(nodes: Sequence[fx.Node], born: dict[fx.Node, int], last: dict[fx.Node, int]) -> dict[fx.Node, int]:
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first and last call
    offsets: dict[fx.Node, int] = {}
    for node in sorted(nodes, key=lambda node: (-_bytes(node), born[node])):
        size, first, final = _bytes(node), born[node], last[node]
        offset = 0
        for start, end, other_first, other_last in placed:
            if other_first <= final and first <= other_last:
                if start >= offset + size:
                    break
                offset = max(offset, end)
        offsets[node] = offset
        placed.append((offset, offset + size, first, final))
        placed.sort()
    return offsets


def _max_live(nodes: Sequence[fx.Node], born: dict[fx.Node, int], last: dict[fx.Node, int]) -> int:
    """The lower bound of any arena: the most bytes alive during one call."""
    changes: dict[int, int] = {}
    for node in nodes:
        changes[born[node]] = changes.get(born[node], 0) + _bytes(node)
        changes[last[node] + 1] = changes.get(last[node] + 1, 0) - _bytes(node)
    alive = most = 0
    for position in sorted(changes):
        alive += changes[position]
        most = max(most, alive)
    return most
