"""plan_memory: where each buffer of a schedule lives, and at which offset of the arena."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from aottrain.ir.analysis.liveness import last_uses
from aottrain.ir.analysis.placement import extent, first_fit, verify_offsets
from aottrain.ir.flights import flown, verify_apart
from aottrain.ir.graph import results, spec_of
from aottrain.ir.kernels.alignment import aligned
from aottrain.ir.schedule import KernelCall, MemoryPlan, Schedule, scratch_of, touched_by, unshared_operands
from aottrain.ir.sizes.polynomials import likely

_SMALLEST = 1 << 8  # bytes: an arena of smaller values saves nothing

Buffer = fx.Node | int  # a value, or by its position a call that computes in memory of its own


@dataclass(frozen=True)
class Lives:
    """What of a schedule can live in planned memory, and when: the same for every plan of its memory."""

    schedule: Schedule
    residuals: frozenset[fx.Node]
    """Of what is written here, what goes to the backward alone."""
    sizes: Mapping[Buffer, int]
    """Of temporaries in bytes, and of what calls compute in while they run."""
    born: Mapping[Buffer, int]
    last: Mapping[Buffer, int]


def find_lives(graph: fx.Graph, schedule: Schedule, num_outputs: int) -> Lives:
    """num_outputs: how many of the graph's results go to the user; the others are residuals."""
    values = results(graph)
    memory_of = schedule.memory_of
    escaping = {memory_of(node) for node in values[:num_outputs] if node is not None}
    residuals = frozenset(memory_of(node) for node in values[num_outputs:] if node is not None) - escaping
    written, used = _lifetimes(schedule)
    alone = set(map(memory_of, unshared_operands(graph)))
    temporaries = [node for node in written if node not in escaping and node not in residuals and node not in alone]
    sizes: dict[Buffer, int] = {node: aligned_bytes(node) for node in temporaries}
    born: dict[Buffer, int] = {node: written[node] for node in temporaries}
    last: dict[Buffer, int] = {node: used[node] for node in temporaries}
    for position, call in enumerate(schedule.calls):
        size = aligned(likely(scratch_of(schedule, call)))
        if size > 0:
            sizes[position], born[position], last[position] = size, position, position
    return Lives(schedule, residuals.intersection(written), sizes, born, last)


def plan_memory(graph: fx.Graph, schedule: Schedule, num_outputs: int, largest: int | None = None) -> MemoryPlan:
    """num_outputs: how many of the graph's results go to the user; the others are residuals, for the backward alone.

    Temporaries, and what a call computes in while it runs, share an arena: each is put, the largest first, at the
    lowest offset that nothing alive at the same time has. What escapes, and all that libraries allocate themselves, is
    fresh memory; so are temporaries of more than `largest` bytes. Symbolic sizes are those of `sizes_at`; at another
    size each call plans anew where the same buffers lie (`runtime.open_arena`).
    """
    return memory_for(find_lives(graph, schedule, num_outputs), largest)


def memory_for(lives: Lives, largest: int | None = None) -> MemoryPlan:
    """As `plan_memory`, where it is known what lives when."""
    most = float("inf") if largest is None else largest
    sizes = {buffer: size for buffer, size in lives.sizes.items() if size <= most}
    offsets = first_fit(sizes, lives.born, lives.last)
    verify_offsets(offsets, sizes, lives.born, lives.last)
    in_arena = {buffer: offsets[buffer] for buffer in sizes if isinstance(buffer, fx.Node)}
    verify_apart(lives.schedule.calls, lives.schedule.memory_of, in_arena, aligned_bytes)
    return MemoryPlan(
        offsets=in_arena,
        residuals=lives.residuals,
        arena_bytes=extent(offsets, sizes),
        max_live_bytes=_max_live(sizes, lives.born, lives.last),
        scratch={buffer: (offset, sizes[buffer]) for buffer, offset in offsets.items() if isinstance(buffer, int)},
        spans={buffer: (lives.born[buffer], lives.last[buffer]) for buffer in offsets},
    )


def halved(memory: MemoryPlan) -> int:
    """Bytes of the largest value that an arena of smaller ones would hold; 0 where there should be none."""
    largest = max([*map(aligned_bytes, memory.offsets), *(size for _, size in memory.scratch.values())], default=0)
    return largest // 2 if largest > _SMALLEST else 0


def arena_within(graph: fx.Graph, schedule: Schedule, num_outputs: int, first: MemoryPlan) -> MemoryPlan:
    """As plan_memory, for another backward of a program: in its arena, with the largest values fresh until all fit."""
    lives = find_lives(graph, schedule, num_outputs)
    memory = memory_for(lives)
    while memory.arena_bytes > first.arena_bytes:
        memory = memory_for(lives, halved(memory))
    return replace(memory, holder=first.holder)


def _lifetimes(schedule: Schedule) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """For each buffer that our memory holds the call that writes it first, and the last one that touches it."""
    born: dict[fx.Node, int] = {}
    for position, call in enumerate(schedule.calls):
        if isinstance(call, KernelCall):
            born.update((node, position) for node in call.writes if node not in schedule.in_place)
        elif all(map(_is_dense, written := schedule.written(call))):
            born.update(dict.fromkeys(written, position))
    return born, last_uses(map(schedule.memory_of, (*touched_by(call), *flown(call))) for call in schedule.calls)


def _is_dense(node: fx.Node) -> bool:
    spec = spec_of(node)
    return spec is not None and spec.symbolic is None and spec.numel > 0


def aligned_bytes(node: fx.Node) -> int:
    spec = spec_of(node)
    assert spec is not None
    return aligned(spec.span_bytes)


def _max_live(sizes: Mapping[Buffer, int], born: Mapping[Buffer, int], last: Mapping[Buffer, int]) -> int:
    """The lower bound of any arena: the most bytes alive during one call."""
    changes: dict[int, int] = {}
    for buffer, size in sizes.items():
        changes[born[buffer]] = changes.get(born[buffer], 0) + size
        changes[last[buffer] + 1] = changes.get(last[buffer] + 1, 0) - size
    alive = most = 0
    for position in sorted(changes):
        alive += changes[position]
        most = max(most, alive)
    return most
