"""What of collectives is under way beside other calls within a budget: what planning asks of the programs that a plan
would run as, their peaks and how long they take, and the program that then leaves room for it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import fx

from aottrain.compiler.graphs.measured_calls import Workspace, workspaces_of
from aottrain.compiler.graphs.repetition import SharedValues
from aottrain.compiler.graphs.symbols import size_facts
from aottrain.compiler.link.backends import KernelPlan, plan_kernels
from aottrain.compiler.link.exposure import collectives_of
from aottrain.compiler.link.flights import LEAST_BYTES, is_own, place_flights, usual_window
from aottrain.compiler.link.program_key import schedules_key
from aottrain.compiler.link.programs import plan_program
from aottrain.compiler.link.timeline import least_peak_bytes, trace_memory
from aottrain.compiler.lowering import rules_for
from aottrain.compiler.lowering.pooling import WINDOWED
from aottrain.compiler.options import CompileOptions
from aottrain.compiler.partition.again.quick import is_quick
from aottrain.compiler.partition.costs.kernel_cost import FusionModel, Way
from aottrain.compiler.partition.costs.op_cost import price_of
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.undefined import for_tangents
from aottrain.compiler.passes.collectives import is_gather
from aottrain.compiler.passes.join_casts import is_for_products
from aottrain.compiler.schedule.grouping.fusion import one_kernel
from aottrain.compiler.traffic import bytes_of, working
from aottrain.ir.analysis.unchanged import unchanged
from aottrain.ir.graph import JointGraph, PartitionedGraph, calls, required_spec
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.schedule import Schedule
from aottrain.ir.settings.budget import Budget
from aottrain.ir.settings.choices import GENERATED
from aottrain.ir.sizes.polynomials import within
from aottrain.measure.decisions import note, recorded

Window = tuple[int, bool]  # as `place_flights` takes it
AT_ONCE = 0, False  # each collective is waited for where it starts


def fusion_model(joint: JointGraph, options: CompileOptions, defined: tuple[bool, ...] = ()) -> FusionModel | None:
    """What planning asks of the kernels and of the collectives that the program will run as; None where it will run op
    by op and talk to nobody. defined: as `ir.graph.PartitionedGraph`."""
    windows, fuses = _windows_for(joint, options.budget), options.kernel in GENERATED
    if not windows and not fuses:
        return None
    foreseen = _Foreseen(joint, options, defined)
    peak_bytes = partial(foreseen.peak_bytes, AT_ONCE)
    ways = tuple(
        Way(
            _told(each),
            peak_bytes if each == AT_ONCE else partial(foreseen.peak_bytes, each),
            partial(foreseen.seconds, each),
        )
        for each in windows
    )
    reference = partial(foreseen.peak_op_by_op, _all_of(joint)) if windows else None
    model = FusionModel(None, lambda node: True, peak_bytes, foreseen.least_bytes, ways=ways, reference_bytes=reference)
    if not fuses:
        return model
    facts = size_facts(joint.graph)
    rules = within(facts, rules_for)

    def is_alone(node: fx.Node) -> bool:
        return str(node.target) in WINDOWED or not rules(node) or _is_cast_for_products(node)

    key = cache(partial(schedules_key, joint, options, defined))  # "" where collectives may be under way
    fits, moved = within(facts, one_kernel), foreseen.moved_bytes
    quick = (lambda nodes, _: not any(map(is_alone, nodes))) if options.kernel == "triton" else within(facts, is_quick)
    return replace(model, fits=fits, alone=is_alone, is_quick=quick, moved_bytes=moved, key=key)


def _is_cast_for_products(node: fx.Node) -> bool:
    """Whether a call casts an input, as autocast does a weight, on a GPU for products alone: a kernel of its own, which
    takes a thirtieth of the time of such a product."""
    if node.target is not torch.ops.aten._to_copy.default or not is_for_products(node):
        return False
    return required_spec(node).device.type == "cuda"


class _Foreseen:
    """The programs of one joint graph's plans."""

    def __init__(self, joint: JointGraph, options: CompileOptions, defined: tuple[bool, ...]):
        self.joint, self.options, self.defined = joint, options, defined
        self.fuses = options.kernel in GENERATED
        self.workspace: Workspace | None = None
        """Found when it is first asked for."""
        self.values = SharedValues()
        self.cut: dict[int, tuple[PartitionPlan, PartitionedGraph]] = {}
        """Plans whose peaks may be asked for next."""

    def least_bytes(self, plan: PartitionPlan) -> int:
        parts = apply_partition(self.joint, plan)
        self.cut[id(plan)] = plan, parts
        return least_peak_bytes(for_tangents(parts, self.defined), self.options.reserved_bytes)

    def peak_bytes(self, window: Window, plan: PartitionPlan) -> int:
        """Where it runs as small kernels, if it does as kernels; or as large ones where it also runs without a budget
        and they peak lower."""
        parts = self.halves(plan, window)
        sizes = (True, False) if self.fuses and plan.runs_without_a_budget else (True,)
        return min(self.peak(parts, self.schedules(parts, local)) for local in sizes)

    def peak_op_by_op(self, window: Window, plan: PartitionPlan) -> int:
        return self.peak(self.halves(plan, window), ())

    def seconds(self, window: Window, plan: PartitionPlan) -> float:
        """Of a step by the cost model, with what it waits."""
        parts = self.halves(plan, window)
        found = collectives_of(parts, self.schedules(parts), price_of("roofline"))
        return found.forward_s + found.backward_s

    def moved_bytes(self, plan: PartitionPlan) -> int:
        with unchanged():
            planned = plan_program(for_tangents(apply_partition(self.joint, plan), self.defined))
        return sum(bytes_of(call) for _, _, schedule in planned for call in working(schedule))

    def halves(self, plan: PartitionPlan, window: Window) -> PartitionedGraph:
        known = self.cut.pop(id(plan), None)
        parts = apply_partition(self.joint, plan) if known is None else known[1]
        return for_tangents(parts if window == AT_ONCE else place_flights(parts, *window, self.values), self.defined)

    def schedules(self, parts: PartitionedGraph, local: bool = True) -> Sequence[Schedule]:
        if not self.fuses:
            return ()
        with unchanged():
            return [schedule for _, _, schedule in plan_program(parts, local)]

    def peak(self, parts: PartitionedGraph, schedules: Sequence[Schedule]) -> int:
        if self.workspace is None:
            self.workspace = workspaces_of(self.joint.graph)
        return trace_memory(parts, self.options.reserved_bytes, self.workspace, schedules).peak_bytes


def plan_in_flight(
    joint: JointGraph, plan: PartitionPlan, parts: PartitionedGraph, defined: tuple[bool, ...], options: CompileOptions
) -> tuple[PartitionedGraph, PartitionedGraph, KernelPlan]:
    """Both halves with their collectives placed, these for the tangents that are expected, and their kernels.

    Under a budget less is under way at once where the peak would be above it, down to one collective at a time. What it
    was is a decision, which the other processes take from the first one, whose kernels may be others.
    """
    if plan.limit is None:
        most, joins = next(_attempts(parts))
        return _in_flight(joint, plan, parts, defined, options, most, joins)
    question = _question(joint, plan.budget, "placed")
    decided = recorded(*question)
    attempts = list(_attempts(parts))
    text = plan.under_way if decided is None else str(decided.choice)
    if decided is not None or text not in ("", _told(AT_ONCE)):  # no more than the plan leaves room for
        first = _window_told(text)
        attempts = [first, *(each for each in attempts if each < first)]
    for most, joins in attempts:
        placed, expected, kernels = _in_flight(joint, plan, parts, defined, options, most, joins)
        if placed is parts:
            break
        if kernels.kernel == options.kernel and (kernels.planned or _peak(joint, expected, options) <= plan.limit):
            break
    if len(attempts) > 1:
        source = "model" if decided is None else decided.source
        note(*question, _told((most, joins)), source)
        if plan.under_way:
            note(*_question(joint, plan.budget, "planned"), plan.under_way, source)
    return placed, expected, kernels


def _in_flight(
    joint: JointGraph,
    plan: PartitionPlan,
    parts: PartitionedGraph,
    defined: tuple[bool, ...],
    options: CompileOptions,
    most: int,
    joins: bool,
) -> tuple[PartitionedGraph, PartitionedGraph, KernelPlan]:
    placed = place_flights(parts, most, joins) if most else parts
    expected = for_tangents(placed, defined)
    return placed, expected, plan_kernels(joint, plan, expected, options)


def _told(window: Window) -> str:
    most, joins = window
    return f"{most} B{', small gathers joined' * joins}"


def _window_told(text: str) -> Window:
    most, _, rest = text.partition(" B")
    return int(most), bool(rest)


def _question(joint: JointGraph, budget: Budget | None, what: str) -> tuple[str, str]:
    """The same whatever the program's other calls run as."""
    own = filter(is_own, calls(joint.graph))
    texts = sorted(f"{node.target} {required_spec(node)} {node.args[1:]}" for node in own)
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
    return "under way", f"{len(texts)} collectives {digest} {what} within {budget}"


def _attempts(parts: PartitionedGraph) -> Iterator[Window]:
    """Less and less."""
    graphs = [graph for graph in (parts.forward, parts.backward) if graph is not None]
    usual = [usual_window(calls(graph)) for graph in graphs if any(map(is_own, calls(graph)))]
    gathers = any(is_gather(node) for graph in graphs for node in calls(graph))
    most = max(usual, default=0)
    while most:
        if gathers:
            yield most, True
        yield most, False
        most = most // 2 if most >= LEAST_BYTES else 0
    yield AT_ONCE


def _all_of(joint: JointGraph) -> Window:
    """Where nothing bounds it."""
    return usual_window(calls(joint.graph)), True


def _windows_for(joint: JointGraph, budget: Budget | None) -> list[Window]:
    """What plans within a budget are tried with: all that is under way where nothing bounds it, half as much, with
    small gathers joined and without, and nothing; or what another process has decided. None where the program talks to
    nobody."""
    nodes = calls(joint.graph)
    if not any(map(is_own, nodes)):
        return []
    if (decided := recorded(*_question(joint, budget, "planned"))) is not None:
        return [_window_told(str(decided.choice))]
    half = usual_window(nodes) // 2
    return [_all_of(joint), (half, True), (half, False), AT_ONCE]


def _peak(joint: JointGraph, parts: PartitionedGraph, options: CompileOptions) -> int:
    """Op by op."""
    workspace = workspaces_of(joint.graph, measured=options.counts_workspaces)
    return trace_memory(parts, options.reserved_bytes, workspace).peak_bytes
