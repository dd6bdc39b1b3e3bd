"""The memory of one call and its backward, op by op and by category: what the report draws and explains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from aottrain.compiler.graphs.measured_calls import Workspace, no_workspace
from aottrain.compiler.graphs.under_way import copies_at_start, held_under_way
from aottrain.compiler.partition.policy import forward_value
from aottrain.explain.report import AliveRecord, MemoryTimeline
from aottrain.ir.analysis.gradients import copied_gradient_bytes
from aottrain.ir.analysis.liveness import freed_after, last_uses
from aottrain.ir.graph import (
    InputKind,
    OutputKind,
    PartitionedGraph,
    allocations,
    is_tuple,
    placeholders,
    results,
    storage_bytes,
    storage_root,
    value_of,
    view_source,
)
from aottrain.ir.schedule import WRITTEN, KernelCall, MemoryPlan, Schedule, copied_bytes, scratch_of
from aottrain.ir.sizes.polynomials import likely
from aottrain.ir.tensor import TensorSpec
from aottrain.measure.decisions import gradients_are_shared

CATEGORIES = ("saved", "gradients", "outputs", "temporaries", "workspaces")
_NUM_ALIVE = 24
Span = tuple[int, int]  # a live range: its first instant, and the first after it


def trace_memory(
    parts: PartitionedGraph,
    reserved_bytes: int = 0,
    workspace: Workspace = no_workspace,
    schedules: Sequence[Schedule] = (),
    memories: Sequence[MemoryPlan | None] = (),
    courses: Sequence[Course] = (),
) -> MemoryTimeline:
    """Parameters, buffers, batch and `reserved_bytes` are alive throughout; outputs and residuals from the forward on;
    gradients until the end of the backward; `workspace(node)` bytes while the call runs.

    schedules: of the forward and the backward, where they run as generated kernels; else they run op by op. memories:
    the plans of each, where memory is used again from step to step: then one arena for the temporaries of both, and
    the blocks of residuals, are alive throughout. courses: `courses_of` these, where they are known.
    """
    fixed = _fixed(parts, reserved_bytes)
    if arena_bytes := max((memory.arena_bytes for memory in memories if memory is not None), default=0):
        fixed["arena"] = arena_bytes
    sweeps, producers = _sweeps(parts, workspace, schedules, memories, courses)
    top = max(sweeps, key=lambda sweep: sweep.peak_bytes)
    num_forward = len(sweeps[0].live)
    return MemoryTimeline(
        fixed=fixed,
        categories=CATEGORIES,
        live=tuple(instant for sweep in sweeps for instant in sweep.live),
        num_forward=num_forward,
        peak=top.peak + (0 if top is sweeps[0] else num_forward),
        at="" if top.peak_node is None else forward_value(top.peak_node).op,
        at_module="" if top.peak_node is None else forward_value(top.peak_node).module,
        alive=tuple(_alive(producers.get(node, node), size, name) for node, size, name in top.alive[:_NUM_ALIVE]),
        num_alive=len(top.alive),
    )


def lifetimes(
    parts: PartitionedGraph, workspace: Workspace, schedules: Sequence[Schedule], courses: Sequence[Course] = ()
) -> tuple[list[int], list[dict[fx.Node, Span]]]:
    """Where all memory is fresh: bytes at each instant beside what is alive throughout, and for each graph the live
    range of each of its storages. A residual is a node of its own in the forward, an input in the backward."""
    sweeps, _ = _sweeps(parts, workspace, schedules, (), courses)
    starts = (0, len(sweeps[0].live))
    spans = [
        {node: (first + start, end + start) for node, (first, end) in sweep.spans.items()}
        for sweep, start in zip(sweeps, starts, strict=False)
    ]
    return [sum(instant) for sweep in sweeps for instant in sweep.live], spans


def courses_of(parts: PartitionedGraph, schedules: Sequence[Schedule] = ()) -> list[Course]:
    """Of the forward and, where there is one, the backward: the same wherever their memory lies."""
    forward, backward = (*schedules, None, None)[:2]
    courses = [_course(parts.forward, forward)]
    return courses if parts.backward is None else [*courses, _course(parts.backward, backward)]


def _sweeps(
    parts: PartitionedGraph,
    workspace: Workspace,
    schedules: Sequence[Schedule],
    memories: Sequence[MemoryPlan | None],
    courses: Sequence[Course],
) -> tuple[list[_Sweep], dict[fx.Node, fx.Node]]:
    """Of both graphs; and the forward's node behind each residual that the backward is given."""
    forward, backward = (*schedules, None, None)[:2]
    first, second = (*memories, None, None)[:2]
    count, num_sizes = parts.num_forward_outputs, parts.signature.num_sizes
    values = results(parts.forward)
    outputs, residuals = _roots(values[:count], forward), _roots(values[count:], forward)
    outliving = {**dict.fromkeys(outputs, "outputs"), **dict.fromkeys(residuals, "saved")}
    blocks = frozenset() if first is None else first.residuals
    block_bytes = sum(map(storage_bytes, blocks))
    reused = blocks.union(() if first is None else first.offsets)
    courses = courses or courses_of(parts, schedules)
    sweeps = [_sweep(_in_memory(courses[0], first), {}, outliving, (0, block_bytes), workspace, reused)]
    if parts.backward is None:
        return sweeps, {}
    owned_inputs, passed = _between(parts)
    inputs = placeholders(parts.backward)
    producers = {node: value for node, value in zip(inputs[num_sizes:], values[count:], strict=False) if value}
    gradients = dict.fromkeys(_roots(results(parts.backward), backward), "gradients")
    reused = frozenset(
        node for node in owned_inputs if node in producers and _memory(producers[node], forward) in blocks
    )
    reused = reused.union(() if second is None else second.offsets)
    steps = _in_memory(courses[1], second)
    copied = 0 if gradients_are_shared() else copied_gradient_bytes(parts.signature, results(parts.backward))
    sweeps.append(_sweep(steps, owned_inputs, gradients, (passed, block_bytes), workspace, reused, copied))
    return sweeps, producers


def least_peak_bytes(parts: PartitionedGraph, reserved_bytes: int) -> int:
    """What is alive between forward and backward, however each of them runs: no schedule where memory is fresh peaks
    below that."""
    fixed = sum(_fixed(parts, reserved_bytes).values())
    if parts.backward is None:
        return fixed
    saved, passed = _between(parts)
    return fixed + sum(saved.values()) + passed


def _between(parts: PartitionedGraph) -> tuple[dict[fx.Node, int], int]:
    """The backward's inputs that the forward made, with their bytes; and bytes of outputs and tangents."""
    assert parts.backward is not None
    inputs = placeholders(parts.backward)[parts.signature.num_sizes :]
    saved = {
        node: storage_bytes(node) for node, (_, primal) in zip(inputs, parts.residuals, strict=False) if primal is None
    }
    outputs = len(parts.signature.output_indices(OutputKind.OUTPUT, OutputKind.REPLACEMENT))
    returned = _roots(results(parts.forward)[:outputs])
    return saved, sum(map(storage_bytes, [*returned, *parts.tangents]))


def _held_bytes(spec: TensorSpec) -> int:
    """Of an input's memory. Where a view starts in it may be a symbol that no input of the program says: as traced."""
    try:
        return spec.at_hand().storage_bytes
    except NameError:
        return spec.storage_bytes


def _fixed(parts: PartitionedGraph, reserved_bytes: int) -> dict[str, int]:
    """Bytes of what the caller holds, by category."""
    sizes = {kind: 0 for kind in InputKind}
    for value in parts.signature.inputs:
        sizes[value.kind] += _held_bytes(value.spec)
    return {
        "parameters": sizes[InputKind.PARAMETER],
        "buffers": sizes[InputKind.BUFFER],
        "batch": sizes[InputKind.BATCH] + (sizes[InputKind.RNG] if parts.num_draws else 0),  # a seed for each call
        "reserved": reserved_bytes,
    }


@dataclass(frozen=True)
class _Sweep:
    """The live memory of one graph over time."""

    live: list[tuple[int, ...]]
    """Bytes by category before the graph starts and while each op runs; of a backward whose gradients are copied at
    last, then, too."""
    peak: int
    """The position of the peak in `live`."""
    peak_node: fx.Node | None
    """The op that runs at the peak; None before and after all."""
    alive: list[tuple[fx.Node, int, str]]
    """The storages at the peak, with bytes and category, the largest first."""
    spans: dict[fx.Node, Span]
    """The live range of each storage."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.live[self.peak])


def _memory(node: fx.Node, schedule: Schedule | None) -> fx.Node:
    return storage_root(node) if schedule is None else schedule.memory_of(node)


def _roots(nodes: Iterable[fx.Node | None], schedule: Schedule | None = None) -> set[fx.Node]:
    roots = {_memory(node, schedule) for node in nodes if node is not None}
    return {node for node in roots if node.op != "placeholder"}


@dataclass(frozen=True)
class _Step:
    """One call."""

    node: fx.Node
    allocated: list[tuple[fx.Node, int]]
    """Storages that it allocates, with their bytes."""
    touched: list[fx.Node]
    """Storages that it reads or writes."""
    scratch_bytes: int = 0
    """Bytes that it needs while it runs, besides the workspace of its operator."""
    no_workspace: bool = False
    """Its operator has no workspace."""


@dataclass(frozen=True)
class Course:
    """What one graph does to memory, wherever that lies."""

    steps: Sequence[_Step]
    """Its calls, or its schedule's, between its inputs and its output."""
    num_inputs: int
    last: Mapping[fx.Node, int]
    """The last step that needs each storage."""


def _course(graph: fx.Graph, schedule: Schedule | None) -> Course:
    steps = _steps(graph, schedule)
    return Course(steps, len(placeholders(graph)), _last_steps(steps))


def _steps(graph: fx.Graph, schedule: Schedule | None) -> list[_Step]:
    if schedule is None:
        return [_library_step(node) for node in graph.nodes]
    steps = [_library_step(node) for node in placeholders(graph)]
    for call in schedule.calls:
        if isinstance(call, fx.Node):
            library = schedule.library(call)
            steps.append(_library_step(call, schedule, 0 if library in WRITTEN else copied_bytes(call, library)))
        else:
            allocated = [(node, storage_bytes(node)) for node in call.writes if node not in schedule.in_place]
            touched = [schedule.memory_of(node) for node in call.buffers]
            steps.append(_Step(call.writes[0], allocated, touched, _scratch_bytes(schedule, call), True))
    return [*steps, _library_step(graph.output_node(), schedule)]


def _in_memory(course: Course, memory: MemoryPlan | None) -> Course:
    """What a call computes in lies in the arena, where that is planned, and so does what its operator needs."""
    if memory is None or not memory.scratch:
        return course
    steps = list(course.steps)
    for position in memory.scratch:
        place = course.num_inputs + position
        own = 0 if steps[place].no_workspace else copies_at_start(steps[place].node)  # of a kernel there are none
        steps[place] = replace(steps[place], scratch_bytes=own, no_workspace=True)
    return replace(course, steps=steps)


def _scratch_bytes(schedule: Schedule, call: KernelCall) -> int:
    """What a kernel allocates for itself: for each thread, or on a device for all programs together."""
    if value_of(call.writes[0]).device.type == "cpu":
        return likely(scratch_of(schedule, call))
    from aottrain.compiler.codegen.triton.render import partial_bytes  # here: a program of a CPU need not load it

    return partial_bytes(call.kernel)


def _library_step(node: fx.Node, schedule: Schedule | None = None, scratch_bytes: int = 0) -> _Step:
    touched = [_memory(source, schedule) for source in (*node.all_input_nodes, node)]
    allocated = [] if schedule is not None and node in schedule.in_place else allocations(node)
    held, num_bytes = held_under_way(node)
    if num_bytes:
        allocated = [*allocated, *((key, num_bytes) for key in held[:1])]
    touched += [*held[:1], *(_memory(source, schedule) for source in held[1:])]
    return _Step(node, allocated, touched, scratch_bytes + copies_at_start(node))


def _sweep(
    course: Course,
    owned_inputs: dict[fx.Node, int],
    outliving: dict[fx.Node, str],
    throughout: tuple[int, int],
    workspace: Workspace,
    reused: frozenset[fx.Node],
    copied: int = 0,
) -> _Sweep:
    """owned_inputs: those that die at their last use. outliving: storages that outlive the graph, with their category.
    throughout: bytes of outputs and tangents, and of blocks of residuals. reused: storages in such a block, or in the
    arena. copied: bytes that are allocated once the graph has run, by what is given its results."""
    dying = freed_after(course.last, outliving)
    alive = dict(owned_inputs)
    if gradients_are_shared():
        reused |= {node for node, name in outliving.items() if name == "gradients"}
    totals = dict.fromkeys(CATEGORIES, 0)
    totals["outputs"] = throughout[0]
    totals["saved"] = throughout[1] + sum(size for node, size in owned_inputs.items() if node not in reused)

    def category(root: fx.Node) -> str:
        return "saved" if root in owned_inputs else outliving.get(root, "temporaries")

    live = [tuple(totals.values())]
    born, ends = dict.fromkeys(owned_inputs, 0), dict[fx.Node, int]()
    peak, peak_bytes, peak_node, sizes_at_peak = 0, sum(live[0]), None, dict(alive)
    for i, step in enumerate(course.steps):
        node = step.node
        for root, size in step.allocated:
            alive[root], born[root] = size, len(live)
            totals[category(root)] += 0 if root in reused else size
        if step.allocated:
            totals["workspaces"] = step.scratch_bytes + (0 if step.no_workspace else workspace(node))
            live.append(tuple(totals.values()))
            if sum(live[-1]) > peak_bytes:
                peak, peak_bytes, peak_node, sizes_at_peak = len(live) - 1, sum(live[-1]), node, dict(alive)
        for root in dying.get(i, []):
            size, ends[root] = alive.pop(root, 0), len(live)
            totals[category(root)] -= 0 if root in reused else size
    if copied:
        live.append(tuple({**totals, "workspaces": copied}.values()))
        if sum(live[-1]) > peak_bytes:
            peak, peak_node, sizes_at_peak = len(live) - 1, None, dict(alive)
    alive_at_peak = sorted(sizes_at_peak.items(), key=lambda pair: -pair[1])
    spans = {root: (first, ends.get(root, len(live))) for root, first in born.items()}
    return _Sweep(live, peak, peak_node, [(node, size, category(node)) for node, size in alive_at_peak if size], spans)


def _last_steps(steps: Sequence[_Step]) -> dict[fx.Node, int]:
    """The last step that needs each storage."""
    last = last_uses(step.touched for step in steps)
    for node in [step.node for step in steps if is_tuple(step.node)]:
        for user in node.users if view_source(node) is None else ():
            # A tuple holds all its items until the last of them is taken.
            last[user] = max(last.get(user, 0), last[node])
    return last


def _alive(node: fx.Node, size: int, category: str) -> AliveRecord:
    value = forward_value(node)
    return AliveRecord(value.name, value.op, value.module, value.shape, size, category)
