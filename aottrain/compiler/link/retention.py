"""keep_memory: what a program keeps from step to step, so that it takes no fresh pages, within the peak of its step.

Where all memory is fresh and dies at its last use, a step peaks at its lowest. What is kept is there throughout: an
arena of temporaries, and blocks of residuals. It has to fit below that peak at every instant. Where activations make
the peak there is room once they have died, where gradients do there is none, and what has no room is fresh (law 7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import fx

from aottrain.compiler.graphs.measured_calls import Workspace
from aottrain.compiler.link.timeline import Course, Span, courses_of, lifetimes, trace_memory
from aottrain.compiler.schedule.memory import find_lives, halved, memory_for
from aottrain.ir.graph import PartitionedGraph, placeholders, results, storage_bytes
from aottrain.ir.schedule import MemoryPlan, Schedule

# What the peak may rise by for the sake of what is kept: a share of what a step allocates, or some pages.
_SHARE = 0.001
_PAGES = 1 << 16
# Where not all temporaries have room, an arena of fewer bytes is left out: such small pieces the allocator has at hand
# anyway, and 138 KiB of them lifted GPT-2's peak of 820 MiB above torch.compile's.
_SMALLEST_ARENA = 1 << 20

Planned = tuple[fx.Graph, int, Schedule]
Bytes = npt.NDArray[np.int64]


def keep_memory(parts: PartitionedGraph, planned: Sequence[Planned], workspace: Workspace) -> list[MemoryPlan]:
    """A memory plan for each of the program's graphs, `planned`."""
    schedules = [schedule for _, _, schedule in planned]
    courses = courses_of(parts, schedules)
    live, spans = lifetimes(parts, workspace, schedules, courses)
    limit = max(live) + max(int(max(live) * _SHARE), _PAGES)
    memories = _largest_arena(parts, planned, workspace, limit, courses)
    blocks = _blocks(parts, schedules[0], memories[0].residuals, spans)
    holder = memories[0].holder
    memories = [replace(memory, residuals=frozenset(), holder=holder) for memory in memories]
    timeline = trace_memory(parts, 0, workspace, schedules, memories, courses)
    free = limit - np.array(timeline.totals, np.int64) + timeline.fixed_bytes - timeline.fixed.get("arena", 0)
    kept = set()
    for node, (first, end) in sorted(blocks.items(), key=lambda block: -block[1][1]):  # least idle first
        size = storage_bytes(node)
        if min(free[:first].min(initial=size), free[end:].min(initial=size)) >= size:
            free[:first] -= size
            free[end:] -= size
            kept.add(node)
    return [replace(memories[0], residuals=frozenset(kept)), *memories[1:]]


def _largest_arena(
    parts: PartitionedGraph,
    planned: Sequence[Planned],
    workspace: Workspace,
    limit: int,
    courses: Sequence[Course],
) -> list[MemoryPlan]:
    """Plans with the largest arena that fits: of all temporaries, else of those up to a size that is halved; none where
    that is too small to be of use."""
    schedules = [schedule for _, _, schedule in planned]
    lives = [find_lives(graph, schedule, count) for graph, count, schedule in planned]
    memories = [memory_for(each) for each in lives]
    while largest := max(map(halved, memories)):
        arenas_only = [replace(memory, residuals=frozenset()) for memory in memories]
        timeline = trace_memory(parts, 0, workspace, schedules, arenas_only, courses)
        if timeline.peak_bytes - timeline.fixed_bytes + timeline.fixed.get("arena", 0) <= limit:
            break
        memories = [memory_for(each, largest) for each in lives]
        if max(memory.arena_bytes for memory in memories) < _SMALLEST_ARENA:
            return [memory_for(each, 0) for each in lives]
    return memories


def _blocks(
    parts: PartitionedGraph, forward: Schedule, residuals: frozenset[fx.Node], spans: Sequence[Mapping[fx.Node, Span]]
) -> dict[fx.Node, Span]:
    """For each residual that may lie in a block the instants from its first to its last in the step."""
    count = parts.num_forward_outputs
    inputs = placeholders(parts.backward)[parts.signature.num_sizes :] if parts.backward is not None else []
    spans_by_root: dict[fx.Node, Span] = {}
    for value, node in zip(results(parts.forward)[count:], inputs, strict=False):
        root = None if value is None else forward.memory_of(value)
        if root in residuals:
            first, end = spans[0][root][0], spans[1][node][1]
            spans_by_root[root] = (first, max(end, spans_by_root.get(root, (0, 0))[1]))
    return spans_by_root
