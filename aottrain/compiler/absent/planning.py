"""A training step as it would be on a device that may not be there: traced once, planned as often as asked, never run.

The stages are those of `pipeline.compile_call` up to where kernels would be made. What would be measured is answered
by the device's specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from aottrain.compat import FakeTensorMode
from aottrain.compiler.absent.attention import RoutedAttention
from aottrain.compiler.absent.guard import require_cuda
from aottrain.compiler.absent.step_time import StepTime, step_time
from aottrain.compiler.absent.tensors import absent, absent_batch
from aottrain.compiler.capture.capture import CapturedStep
from aottrain.compiler.joint.analysis import Analysis
from aottrain.compiler.joint.links import without_values
from aottrain.compiler.options import CompileOptions
from aottrain.compiler.passes.collectives import placed
from aottrain.compiler.pipeline import (
    Decisions,
    UserCall,
    build,
    capture_whole,
    functional_program,
    passes_for,
    rewrite,
    with_kernel,
)
from aottrain.compiler.reporting import Decided, describe
from aottrain.compiler.schedule.grouping.alike import sharing
from aottrain.compiler.stages import StageLog, collection_paused
from aottrain.errors import UnsupportedError
from aottrain.explain.report import GraphReport, Tangents
from aottrain.guards.state import StateGuard
from aottrain.ir.graph import JointGraph
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.settings.decisions import DEFAULT
from aottrain.ir.settings.devices import Target
from aottrain.measure.decisions import deciding
from aottrain.runtime.faults import Faults


@dataclass(frozen=True)
class TracedStep:
    """A step's program, before anything is decided about it."""

    joint: JointGraph
    decided: Decisions
    target: Target | None
    """The device; None is the CPU at hand."""
    log: StageLog
    guards: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedStep:
    """What one plan of it comes to."""

    report: GraphReport
    joint: JointGraph
    """The program as it was rewritten and planned."""
    plan: PartitionPlan
    time: StepTime | None
    """Of one micro-batch, forward and backward; None of the CPU at hand, which has a clock."""


def trace_step(
    module: nn.Module, batch: Sequence[Tensor], options: CompileOptions, target: Target | None
) -> TracedStep:
    """The program of `module(*batch)` and its backward on the target; None is the CPU at hand.

    Parameters and buffers of the module are fake ones there from now on; it and the batch may be on the meta device. A
    target of the kind cuda makes this process one that plans and can run nothing on CUDA, where there is none.

    Raises UnsupportedError for what cannot be traced, ConfigError where CUDA cannot be stood in for.
    """
    device = torch.device("cpu")
    if target is not None and target.kind == "cuda":
        require_cuda()
        device = torch.device("cuda", 0)
    mode, log = FakeTensorMode(), StageLog()
    absent(module, mode, device)
    inputs = absent_batch(batch, mode, device)
    with deciding(DEFAULT, target), collection_paused(), RoutedAttention():
        try:
            step, analysis, guard = _captured(module, inputs, options, log)
        except UnsupportedError:
            _call_once(module, inputs, mode)
            step, analysis, guard = _captured(module, inputs, options, log)
        whole = placed(functional_program(step, analysis, log, linked=True)[1], options.reduce_over, log.run)
        joint, decided, _ = rewrite(without_values(whole), passes_for(options), log)
    return TracedStep(joint, decided, target, log, guard.told())


def _captured(
    module: nn.Module, inputs: tuple[Tensor, ...], options: CompileOptions, log: StageLog
) -> tuple[CapturedStep, Analysis, StateGuard]:
    guard = StateGuard(module, [])
    return *capture_whole(UserCall(module, module, inputs, {}, guard), options.rng, log), guard


def _call_once(module: nn.Module, inputs: tuple[Tensor, ...], mode: FakeTensorMode) -> None:
    """Some models warn, or write down on themselves what they find out, in their first call alone, which elsewhere has
    been made before one is traced. An error of it comes again there."""
    with suppress(Exception), torch.no_grad(), mode:
        module(*inputs)


def plan_step(traced: TracedStep, options: CompileOptions) -> PlannedStep:
    """Raises BudgetError where no plan is within the budget."""
    log, faults = StageLog(list(traced.log.records), traced.log.num_nodes), Faults()
    with deciding(DEFAULT, traced.target), collection_paused(), sharing():
        options, reason = with_kernel(options, traced.joint, faults)
        built = build(traced.joint, options, log, faults)
        options = replace(options, kernel=built.kernel)
        lines = traced.decided | built.decided
        tangents = Tangents(built.expected.defined)
        decisions = Decided(options, built.reason or reason, tuple(built.fused), lines, None, tangents)
        report = log.run("describe", describe, built.joint, built.plan, built.expected, decisions)
        schedules = [part.schedule for part in built.fused]
        time = None if traced.target is None else step_time(built.expected, schedules, traced.target)
    report = report.changed(stages=tuple(log.records), guards=traced.guards)
    return PlannedStep(report, built.joint, built.plan, time)
