"""The pipeline: one call of the user's code becomes one compiled program. Stages are in the order in which they run.

capture -> analyse -> trace_joint -> functionalize -> simplify -> chunk_loss_heads -> join_sums -> share_heads
-> fuse_attention -> order_scatters -> split_norms -> choose_layouts -> plan_partition -> apply_partition -> schedule
-> make_kernels -> link
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from aottrain.compiler.capture.capture import CapturedStep, capture
from aottrain.compiler.capture.dynamic import SymbolicSizes
from aottrain.compiler.graphs.measured_calls import kept_by_libraries
from aottrain.compiler.graphs.rewriting import verify_views
from aottrain.compiler.graphs.simplification import simplify
from aottrain.compiler.joint.analysis import Analysis, CapturedTensors, analyse
from aottrain.compiler.joint.functional import functionalize
from aottrain.compiler.joint.joint import trace_joint
from aottrain.compiler.joint.links import without_links, without_values
from aottrain.compiler.joint.replay import replay_of
from aottrain.compiler.link.backends import choose_kernel, fused_by, make_kernels, plan_kernels
from aottrain.compiler.link.linking import link, plan_replays
from aottrain.compiler.link.programs import FusedGraph
from aottrain.compiler.options import GENERATED, CompileOptions, Kernel
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import find_demand, plan_partition
from aottrain.compiler.partition.undefined import expected_tangents, for_tangents, with_tangents
from aottrain.compiler.passes.choose_layouts import LayoutChoice, choose_layouts
from aottrain.compiler.passes.chunk_loss_heads import chunk_loss_heads, find_loss_heads
from aottrain.compiler.passes.fuse_attention import fuse_attention
from aottrain.compiler.passes.join_sums import join_sums
from aottrain.compiler.passes.order_scatters import order_scatters
from aottrain.compiler.passes.share_heads import share_heads
from aottrain.compiler.passes.split_norms import split_norms
from aottrain.compiler.reporting import Decided, describe
from aottrain.compiler.stages import StageLog, collection_paused
from aottrain.errors import BudgetError, CompilerError, UnsupportedError
from aottrain.explain.report import GraphReport, Tangents
from aottrain.guards.state import StateGuard, check_reachable
from aottrain.ir.graph import JointGraph, PartitionedGraph
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.verify import verify_functional, verify_joint, verify_partition
from aottrain.measure.decisions import deciding
from aottrain.runtime.faults import Faults
from aottrain.runtime.program import Program
from aottrain.toolchain.cache import say_once

_MAX_CAPTURES = 4

__all__ = [
    "apply_partition",
    "capture",
    "choose_layouts",
    "chunk_loss_heads",
    "compile_call",
    "functional_joint",
    "functionalize",
    "fuse_attention",
    "join_sums",
    "order_scatters",
    "plan_partition",
    "share_heads",
    "simplify",
    "split_norms",
    "trace_joint",
]


@collection_paused()
def compile_call(
    function: Callable[..., Any],
    module: nn.Module | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: CompileOptions,
    guard: StateGuard,
    sizes: SymbolicSizes | None = None,
) -> tuple[Program, CapturedStep, Analysis, GraphReport]:
    """Compile what `function(*args, **kwargs)` does, for all sizes that `sizes` leaves open.

    Raises UnsupportedError for what is not proven equal to eager.
    """
    with deciding(options.decisions) as ledger:
        program, step, analysis, report = _compile(function, module, args, kwargs, options, guard, sizes)
        return program, step, analysis, replace(report, decisions=ledger.record(step.device))


def _compile(
    function: Callable[..., Any],
    module: nn.Module | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: CompileOptions,
    guard: StateGuard,
    sizes: SymbolicSizes | None,
) -> tuple[Program, CapturedStep, Analysis, GraphReport]:
    log = StageLog()
    step, analysis = capture_whole(function, module, args, kwargs, guard, options.rng, log, sizes)
    functional = _functional(step, analysis, log, linked=True)
    joint = log.run("simplify", simplify, without_values(functional), check=_verify_whole)
    heads = find_loss_heads(joint) if options.chunks_loss_head else ()
    if heads:
        joint = log.run("chunk_loss_heads", chunk_loss_heads, joint, heads, check=_verify_whole)
    faults = Faults()
    try:
        kernel, reason = choose_kernel(options.kernel, joint)
    except Exception as error:
        kernel, reason = "aten", faults.note("choose_kernel", error)
    options = replace(options, kernel=kernel)
    if options.counts_workspaces:
        options = replace(options, reserved_bytes=options.reserved_bytes + kept_by_libraries(joint))
    try:
        built = _build(joint, options, log, faults)
    except CompilerError as error:  # the plan and its budget hold without kernels too
        say_once(f"this program runs op by op: {error}")
        options, reason = replace(options, kernel="aten"), str(error)
        built = _build(joint, options, log, faults)
    chosen = replace(options, kernel=built.kernel)
    replays = plan_replays(built.parts, chosen)
    tangents = Tangents(built.expected.defined)
    replay = replay_of(step, functional)
    known = built.parts, analysis, built.kernel, replay, built.fused, replays, faults, tangents
    program = log.run("link", link, *known, built.linked)
    reason, fused = built.reason or reason, tuple(built.fused)
    decided = Decided(chosen, reason, fused, tuple(heads), built.layouts, replays, tangents)
    return program, step, analysis, describe(built.joint, built.plan, built.expected, decided, log.records)


def rewrites(kernel: Kernel) -> tuple[Callable[[JointGraph], JointGraph], ...]:
    """What changes a program for generated kernels alone, in order."""
    attention = (fuse_attention,) if kernel == "cpp" else ()
    return (join_sums, share_heads, *attention, order_scatters, split_norms)


@dataclass(frozen=True)
class _Built:
    """A program cut in two, and its kernels. linked: the whole program, where gradients of some results pass through
    others, with tangents for those; joint: the program as it was planned, without them; expected: `parts` for the
    tangents that are expected to come, as kernels are made and the peak is predicted; layouts: what was decided about
    them."""

    linked: JointGraph
    joint: JointGraph
    plan: PartitionPlan
    parts: PartitionedGraph
    expected: PartitionedGraph
    kernel: Kernel
    reason: str
    fused: list[FusedGraph]
    layouts: str = ""


def _build(joint: JointGraph, options: CompileOptions, log: StageLog, faults: Faults) -> _Built:
    """From the whole program to kernels; where their making fails, a fault of ours, op by op under the same options."""
    if options.kernel not in GENERATED:
        return _plan(joint, options, log)
    try:
        return _generate(joint, options, log)
    except Exception as error:
        reason = faults.note("kernels", error)
        return replace(_plan(joint, replace(options, kernel="aten"), log), reason=reason)


def _generate(joint: JointGraph, options: CompileOptions, log: StageLog) -> _Built:
    """What rounds otherwise than eager is rewritten for generated kernels alone: where a budget then leaves no room for
    them, the program is as it was."""
    ready = joint
    for rewrite in rewrites(options.kernel):
        ready = log.run(rewrite.__name__, rewrite, ready, check=_verify_whole)
    choice = log.run("choose_layouts", choose_layouts, ready) if options.kernel == "cpp" else LayoutChoice()
    if choice.graph is not None:
        ready = joint.with_graph(choice.graph)
        _verify_whole(ready)
    with suppress(BudgetError):
        built = _plan(ready, options, log)
        if built.kernel == options.kernel or ready is joint:
            return replace(built, layouts=choice.reason)
    if choice.graph is not None:
        return replace(_plan(joint, options, log), layouts="as the program has them: the budget has no room")
    return _plan(joint, options, log)


def _plan(linked: JointGraph, options: CompileOptions, log: StageLog) -> _Built:
    joint = without_links(linked)
    if options.kernel in GENERATED:
        verify_views(joint)
    wanted = options.partition, options.budget, options.reserved_bytes, options.cost, options.modules
    defined = expected_tangents(joint)
    running = _planned(joint, defined)
    plan = log.run("plan_partition", plan_partition, running, *wanted, fused_by(joint, options, defined))
    parts = log.run("apply_partition", apply_partition, joint, plan, check=partial(verify_partition, joint))
    expected = for_tangents(parts, defined)
    kernels = log.run("schedule", plan_kernels, joint, plan, expected, options)
    fused = log.run("make_kernels", make_kernels, kernels)
    log.annotate(fused[0].note if fused else "")
    return _Built(linked, running, plan, parts, expected, kernels.kernel, kernels.reason, fused)


def _planned(joint: JointGraph, defined: tuple[bool, ...]) -> JointGraph:
    """The program that a plan is made for: the one for these tangents, where that plan serves all other calls, too."""
    running = with_tangents(joint, defined)
    if running is joint:
        return joint
    calls_of = [{node.name for node in each.graph.nodes} for each in (running, joint)]
    demanded = [{node.name for node in find_demand(each).demanded} for each in (joint, running)]
    return running if calls_of[0] <= calls_of[1] and demanded[0] <= demanded[1] else joint


def capture_whole(
    function: Callable[..., Any],
    module: nn.Module | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    guard: StateGuard,
    rng: str,
    log: StageLog,
    sizes: SymbolicSizes | None = None,
) -> tuple[CapturedStep, Analysis]:
    """Capture and analyse; where the code reads tensors from elsewhere, once more with those as inputs.

    Raises UnsupportedError at once where it changes Python state: a second trace would not start where this one did,
    and may well end there.
    """
    captured: list[Tensor] = []
    for _ in range(_MAX_CAPTURES):
        known = captured, rng, sizes, guard.watching, guard.seen
        step = log.run("capture", capture, function, module, args, kwargs, *known)
        try:
            analysis = log.trace("analyse", analyse, step)
            guard.check_unchanged()
            return step, analysis
        except CapturedTensors as found:
            check_reachable(guard, found.tensors)
            captured += found.tensors
    raise UnsupportedError("the program reads other tensors each time that it is traced")


def functional_joint(step: CapturedStep, analysis: Analysis, log: StageLog | None = None) -> JointGraph:
    """The joint graph that partitioning starts from: traced, free of mutation, simplified; laws 1 and 2 checked."""
    log = log or StageLog()
    return log.run("simplify", simplify, _functional(step, analysis, log), check=_verify_whole)


def _functional(step: CapturedStep, analysis: Analysis, log: StageLog, linked: bool = False) -> JointGraph:
    joint = log.trace("trace_joint", trace_joint, step, analysis, linked)
    return log.trace("functionalize", functionalize, joint, check=_verify_whole)


def _verify_whole(joint: JointGraph) -> None:
    verify_joint(joint)
    verify_functional(joint)
