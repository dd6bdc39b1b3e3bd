"""The pipeline: one call of the user's code becomes one compiled program.

`compile_call` has the stages in the order in which they run. `PASSES` has the rewrites of the joint graph: to add one
is a file in `passes/` and a line here; bisect, the report, the documentation and the tests read the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from aottrain.compat import disable_autocast
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
from aottrain.compiler.link.backends import choose_kernel, make_kernels
from aottrain.compiler.link.capacity import all_bytes, peak_without_workspaces, refuse_beyond
from aottrain.compiler.link.linking import link, plan_replays
from aottrain.compiler.link.programs import FusedGraph
from aottrain.compiler.link.room import fusion_model, plan_in_flight
from aottrain.compiler.link.size_bounds import at_planned_sizes, bound_sizes
from aottrain.compiler.options import CompileOptions, Kernel
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import find_demand, plan_partition
from aottrain.compiler.partition.undefined import expected_tangents, for_tangents, with_tangents
from aottrain.compiler.passes.choose_layouts import choose_layouts
from aottrain.compiler.passes.chunk_loss_heads import with_chunked_heads
from aottrain.compiler.passes.collectives import placed
from aottrain.compiler.passes.fuse_attention import fuse_attention
from aottrain.compiler.passes.join_casts import join_casts
from aottrain.compiler.passes.join_sums import join_sums
from aottrain.compiler.passes.pair_complex import pair_complex
from aottrain.compiler.passes.rows.classes_last import classes_last
from aottrain.compiler.passes.rows.order_scatters import order_scatters
from aottrain.compiler.passes.rows.sum_messages import sum_messages
from aottrain.compiler.passes.share_heads import share_heads
from aottrain.compiler.passes.splits.biases import split_biases
from aottrain.compiler.passes.splits.complexes import split_complex
from aottrain.compiler.passes.splits.losses import split_losses
from aottrain.compiler.passes.splits.norms import split_norms
from aottrain.compiler.passes.splits.pools import scatter_pools, split_pools
from aottrain.compiler.passes.splits.products import split_products
from aottrain.compiler.passes.splits.softmaxes import split_softmaxes
from aottrain.compiler.passes.splits.written_out import write_out
from aottrain.compiler.passes.views_first import views_first
from aottrain.compiler.passes.widen_convolutions import widen_convolutions
from aottrain.compiler.passes.widen_products import widen_products
from aottrain.compiler.reporting import Decided, describe
from aottrain.compiler.schedule.grouping.alike import sharing
from aottrain.compiler.stages import StageLog, collection_paused
from aottrain.errors import BudgetError, CompilerError, ConfigError, UnsupportedError
from aottrain.explain.report import GraphReport, Tangents
from aottrain.guards.ownership import check_reachable
from aottrain.guards.state import StateGuard
from aottrain.ir.graph import JointGraph, PartitionedGraph
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.settings.budget import unmet_by_all
from aottrain.ir.settings.choices import GENERATED
from aottrain.ir.settings.decisions import DEFAULT
from aottrain.ir.verify import verify_functional, verify_joint, verify_partition
from aottrain.measure.decisions import deciding
from aottrain.measure.workspaces import without_workspaces
from aottrain.runtime.faults import Faults
from aottrain.runtime.program import Program
from aottrain.toolchain.cache import say_once
from aottrain.toolchain.frames import roomy

__all__ = [
    "PASSES", "apply_partition", "capture", "compile_call", "functional_joint", "functionalize", "fuse_attention",
    "join_sums", "plan_partition", "share_heads", "simplify", "split_pools", "trace_joint",
]  # fmt: skip

_MAX_CAPTURES = 4
Decisions = dict[str, tuple[str, ...]]  # by pass, a line each
Both = tuple[JointGraph, JointGraph]  # as it was traced, and without mutation
BITWISE, ROUNDING = "every bit", "up to rounding"  # what a pass keeps of every value that the program gives
_NO_ROOM = "as the program has them: the budget has no room"


class Rewritten(NamedTuple):
    """What a pass gives."""

    joint: JointGraph
    """The program; the pass's own argument where there is nothing to rewrite."""
    decided: tuple[str, ...] = ()
    """What was decided about it, a line each, for the report."""

    @property
    def graph(self) -> fx.Graph:
        return self.joint.graph


@dataclass(frozen=True)
class Pass:
    """One rewrite of the joint graph. Laws 1 and 2 are checked after it."""

    name: str
    """Its stage in the report."""
    result: str
    """What bisect calls the program that it gives."""
    run: Callable[[JointGraph], JointGraph | tuple[JointGraph, tuple[str, ...]]]
    keeps: str
    """BITWISE or ROUNDING."""
    kernels: tuple[str, ...] = ()
    """The generated kernels that it is made for; none: it is made whatever the program runs as."""
    when: Callable[[CompileOptions], bool] = lambda options: True
    """Whether the caller wants it."""

    def __call__(self, joint: JointGraph) -> Rewritten:
        out = self.run(joint)
        return Rewritten(out) if isinstance(out, JointGraph) else Rewritten(*out)


def _lay_out(joint: JointGraph) -> Rewritten:
    choice = choose_layouts(joint)
    rewritten = joint if choice.graph is None else joint.with_graph(choice.graph)
    return Rewritten(rewritten, (choice.reason,) if choice.reason else ())


_CPP = ("cpp",)
PASSES = (
    Pass("simplify", "simplified", simplify, BITWISE),
    Pass("chunk_loss_heads", "chunked loss head", with_chunked_heads, ROUNDING, when=lambda o: o.chunks_loss_head),
    Pass("classes_last", "losses of rows", classes_last, ROUNDING, GENERATED),
    Pass("split_complex", "split complex products", split_complex, ROUNDING, GENERATED),
    Pass("pair_complex", "pairs of reals", pair_complex, ROUNDING, GENERATED),
    Pass("join_sums", "joined sums", join_sums, ROUNDING, GENERATED),
    Pass("write_out", "written out", write_out, ROUNDING, GENERATED),
    Pass("share_heads", "shared heads", share_heads, ROUNDING, GENERATED),
    Pass("fuse_attention", "fused attention", fuse_attention, ROUNDING, _CPP),
    Pass("split_products", "split products", split_products, ROUNDING, GENERATED),
    Pass("widen_products", "wide products", widen_products, ROUNDING, ("triton",)),
    Pass("order_scatters", "ordered scatters", order_scatters, ROUNDING, GENERATED),
    Pass("sum_messages", "summed messages", sum_messages, BITWISE, _CPP),
    Pass("split_losses", "split losses", split_losses, ROUNDING, GENERATED),
    Pass("split_softmaxes", "split softmaxes", split_softmaxes, ROUNDING, GENERATED),
    Pass("split_norms", "split norms", partial(split_norms, sums_in_rows=True), ROUNDING, _CPP),
    Pass("split_norms", "split norms", split_norms, ROUNDING, ("triton",)),
    Pass("views_first", "views first", views_first, ROUNDING, GENERATED),
    Pass("split_biases", "split biases", split_biases, ROUNDING, ("triton",)),
    Pass("widen_convolutions", "wide convolutions", widen_convolutions, ROUNDING, _CPP),
    Pass("choose_layouts", "layouts", _lay_out, ROUNDING, GENERATED),
    Pass("split_pools", "split pools", split_pools, BITWISE, GENERATED),
    Pass("scatter_pools", "scattered pools", scatter_pools, BITWISE, _CPP),
)


def passes_for(options: CompileOptions) -> tuple[Pass, ...]:
    """The rewrites that are made whatever the program runs as."""
    return tuple(each for each in PASSES if not each.kernels and each.when(options))


@dataclass(frozen=True)
class Target:
    """One way to run a program."""

    kernel: Kernel
    """What its graphs run as."""
    passes: tuple[Pass, ...] = ()
    """The rewrites that are made for it alone."""


def targets_for(kernel: Kernel, symbolic: bool = False) -> tuple[Target, ...]:
    """The ways to run a program whose kernel is chosen, in the order in which they are tried.

    Generated kernels have rewrites of their own, which round otherwise than eager. Where a budget leaves no room for
    them, the program is as it was. Where kernels cannot be made, operators run one by one: plan and budget hold.
    symbolic: whether sizes are; these rewrites are proven for numbers alone.
    """
    if kernel not in GENERATED:
        return (Target(kernel),)
    rewritten = Target(kernel, tuple(each for each in PASSES if kernel in each.kernels))
    return (*([] if symbolic else [rewritten]), Target(kernel), Target("aten"))


@dataclass(frozen=True)
class UserCall:
    """The call that is compiled: `function(*args, **kwargs)`, for all sizes that `sizes` leaves open."""

    function: Callable[..., Any]
    module: nn.Module | None
    """The function itself where it is a module, whose parameters and buffers are then inputs."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    guard: StateGuard
    """Of the Python state that the function reads."""
    sizes: SymbolicSizes | None = None


@roomy
@collection_paused()
@sharing()
def compile_call(call: UserCall, options: CompileOptions) -> tuple[Program, CapturedStep, Analysis, GraphReport]:
    """The program that does what the call does, with its report.
    Raises UnsupportedError (not proven equal to eager), BudgetError (no plan is within the budget), CapacityError (it
    needs more memory than there is). An allocator's error passes as it is: it says nothing about the program.
    """
    log, faults = StageLog(), Faults()
    with deciding(options.decisions) as ledger, ExitStack() as rest:
        step, analysis = capture_whole(call, options.rng, log)
        traced, functional = functional_program(step, analysis, log, linked=True)
        rest.enter_context(disable_autocast())  # its casts are in the graph: what is tried or timed is as it will run
        functional = placed(functional, options.reduce_over, log.run)
        joint, decided, _ = rewrite(without_values(functional), passes_for(options), log)
        options, reason = with_kernel(options, joint, faults)
        if options.memory_bytes is not None:
            log.run("check_memory", check_memory, joint, options)
        built = build(joint, options, log, faults)
        options, reason = replace(options, kernel=built.kernel), built.reason or reason
        replays, tangents = plan_replays(built.parts, options), Tangents(built.expected.defined)
        running = partial(link, fused=built.fused, replays=replays, faults=faults, tangents=tangents)
        replay = replay_of(step, traced, functional)
        program = log.run("link", running, built.parts, analysis, built.kernel, replay, built.linked)
        decisions = Decided(options, reason, tuple(built.fused), decided | built.decided, replays, tangents)
        report = log.run("describe", describe, built.joint, built.plan, built.expected, decisions)
        told = (*call.guard.told(), *built.held)
        report = report.changed(stages=tuple(log.records), decisions=ledger.record(step.device), guards=told)
    return program, step, analysis, report


def with_kernel(options: CompileOptions, joint: JointGraph, faults: Faults) -> tuple[CompileOptions, str]:
    """With the kernel that this program runs as, the reason for it, and the memory that libraries keep for it."""
    try:
        kernel, reason = choose_kernel(options.kernel, joint)
    except Exception as error:
        kernel, reason = "aten", faults.note("choose_kernel", error)
    kept = kept_by_libraries(joint) if options.counts_workspaces else 0
    return replace(options, kernel=kernel, reserved_bytes=options.reserved_bytes + kept), reason


def rewrite(joint: JointGraph, passes: Sequence[Pass], log: StageLog) -> tuple[JointGraph, Decisions, Decisions]:
    """The program after all passes, what each of them decided, and what is said where the program stays as it was."""
    decided: Decisions = {}
    undone: Decisions = {}
    for each in passes:
        before = joint
        joint, decided[each.name] = log.run(each.name, each, before, check=lambda made: _verify_whole(made.joint))
        if decided[each.name] and joint is not before:
            undone[each.name] = (_NO_ROOM,)
    return joint, decided, undone


@dataclass(frozen=True)
class Built:
    """A program cut in two, and its kernels."""

    linked: JointGraph
    """The whole program. Where gradients of some results pass through others, it has tangents for those."""
    joint: JointGraph
    """The program as it was planned, without such tangents."""
    plan: PartitionPlan
    parts: PartitionedGraph
    expected: PartitionedGraph
    """`parts` for the tangents that are expected to come: for them kernels are made and the peak is predicted."""
    kernel: Kernel
    reason: str  # why not as its target says
    fused: list[FusedGraph]
    held: tuple[str, ...]  # what is known of the peak at other sizes, where these are symbolic
    decided: Decisions = field(default_factory=dict)


def build(joint: JointGraph, options: CompileOptions, log: StageLog, faults: Faults) -> Built:
    """The program as the first target that can run it within the budget."""
    targets = list(targets_for(options.kernel, joint.signature.num_sizes > 0))
    reason, undone, refused = "", dict[str, Any](), list[BudgetError]()
    while True:
        target = targets.pop(0)
        try:
            ready, decided, would_undo = rewrite(joint, target.passes, log)
            built = _plan(ready, replace(options, kernel=target.kernel), log)
            if built.kernel == target.kernel or ready is joint:
                return replace(built, reason=built.reason or reason, decided=undone | decided)
        except ConfigError:  # the caller's: no other way to run the program mends it
            raise
        except BudgetError as error:
            refused.append(error)
            if not target.passes:
                raise unmet_by_all(refused) from error
        except Exception as error:
            if not targets:
                raise
            if isinstance(error, CompilerError):
                reason = str(error)
                say_once(f"this program runs op by op: {error}")
            else:
                reason = faults.note("kernels", error)
            targets = targets[-1:]
            continue
        undone = would_undo


def _plan(linked: JointGraph, options: CompileOptions, log: StageLog) -> Built:
    joint = without_links(linked)
    if options.kernel in GENERATED:
        verify_views(joint)
    running, plan, parts, expected = _cut(joint, options, log)
    with at_planned_sizes(joint, options):
        parts, expected, kernels = log.run("schedule", plan_in_flight, joint, plan, parts, expected.defined, options)
    held = bound_sizes(joint, plan, expected, kernels, options)
    fused = log.run("make_kernels", make_kernels, kernels)
    log.annotate(fused[0].note if fused else "")
    return Built(linked, running, plan, parts, expected, kernels.kernel, kernels.reason, fused, held)


def _cut(
    joint: JointGraph, options: CompileOptions, log: StageLog
) -> tuple[JointGraph, PartitionPlan, PartitionedGraph, PartitionedGraph]:
    """The program that is planned, its plan, both halves, and these for the tangents that are expected to come."""
    running = _planned(joint, defined := expected_tangents(joint))
    plan = log.run("plan_partition", plan_for, running, options, defined)
    parts = log.run("apply_partition", apply_partition, joint, plan, check=(law := partial(verify_partition, joint)))
    if options.kernel == "triton" and plan.limit is None:
        parts = log.run("join_casts", join_casts, parts, check=law)
    return running, plan, parts, for_tangents(parts, defined)


def check_memory(joint: JointGraph, options: CompileOptions) -> None:
    """CapacityError where the peak is above `options.memory_bytes`, before calls of such a size are measured: each
    takes as long as in a step, and this step cannot run. What else goes wrong here does so again where it is built."""
    assert options.memory_bytes is not None
    if all_bytes(joint) + options.reserved_bytes > options.memory_bytes:
        with deciding(DEFAULT), without_workspaces():
            try:
                target, *_ = targets_for(options.kernel, joint.signature.num_sizes > 0)
                linked, _, _ = rewrite(joint, target.passes, StageLog())
                *_, expected = _cut(without_links(linked), options, StageLog())
                peak = peak_without_workspaces(expected, options)
            except Exception:  # the next target may do without, and a fault is counted there
                return
        refuse_beyond(options.memory_bytes, peak)


def plan_for(joint: JointGraph, options: CompileOptions, defined: tuple[bool, ...] = ()) -> PartitionPlan:
    """The plan that these options ask for. defined: as `ir.graph.PartitionedGraph`."""
    asked = options.partition, options.budget, options.reserved_bytes, options.cost, options.modules
    with at_planned_sizes(joint, options):
        return plan_partition(joint, *asked, fusion_model(joint, options, defined))


def _planned(joint: JointGraph, defined: tuple[bool, ...]) -> JointGraph:
    """The program that a plan is made for: the one for these tangents, where that plan serves all other calls, too."""
    running = with_tangents(joint, defined)
    if running is joint:
        return joint
    calls_of = [{node.name for node in each.graph.nodes} for each in (running, joint)]
    demanded = [{node.name for node in find_demand(each).demanded} for each in (joint, running)]
    return running if calls_of[0] <= calls_of[1] and demanded[0] <= demanded[1] else joint


def capture_whole(call: UserCall, rng: str, log: StageLog) -> tuple[CapturedStep, Analysis]:
    """Capture and analyse; where the code reads tensors from elsewhere, once more with those as inputs.

    Raises UnsupportedError at once where it changes Python state: a second trace would not start where this one did,
    and may well end there.
    """
    guard, captured = call.guard, list[Tensor]()
    for _ in range(_MAX_CAPTURES):
        guarded = partial(capture, watching=guard.watching, containers=guard.seen, run=guard.run)
        made_pure = partial(guarded, captured=captured, rng=rng, sizes=call.sizes)
        step = log.run("capture", made_pure, call.function, call.module, call.args, call.kwargs)
        try:
            analysis = log.trace("analyse", analyse, step)
            guard.check_unchanged()
            return step, analysis
        except CapturedTensors as read:
            check_reachable(guard.reachable, read.tensors)
            if guard.assigned is not None:
                guard.assigned.forget()
            captured += read.tensors
    raise UnsupportedError("the program reads other tensors each time that it is traced")


def functional_joint(step: CapturedStep, analysis: Analysis, log: StageLog | None = None) -> JointGraph:
    """The joint graph that partitioning starts from: traced, free of mutation, simplified; laws 1 and 2 checked."""
    log = log or StageLog()
    return log.run("simplify", simplify, functional_program(step, analysis, log)[1], check=_verify_whole)


def functional_program(step: CapturedStep, analysis: Analysis, log: StageLog, linked: bool = False) -> Both:
    traced = log.trace("trace_joint", trace_joint, step, analysis, linked)
    return traced, log.trace("functionalize", functionalize, traced, check=_verify_whole)


def _verify_whole(joint: JointGraph) -> None:
    verify_joint(joint)
    verify_functional(joint)
