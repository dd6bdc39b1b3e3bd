"""The pipeline: one call of the user's code becomes one compiled program. Stages are in the order in which they run.

capture -> analyse -> trace_joint -> functionalize -> simplify -> chunk_loss_heads -> plan_partition -> apply_partition
-> plan_kernels -> make_kernels -> link
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from aottrain.compiler.analysis import Analysis, CapturedTensors, analyse
from aottrain.compiler.backends import make_kernels, plan_kernels
from aottrain.compiler.capture import CapturedStep, capture
from aottrain.compiler.dynamic import SymbolicSizes
from aottrain.compiler.functional import functionalize
from aottrain.compiler.joint import trace_joint
from aottrain.compiler.linking import link
from aottrain.compiler.loss_head import chunk_loss_heads, find_loss_heads
from aottrain.compiler.options import CompileOptions
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.compiler.replay import replay_of
from aottrain.compiler.reporting import Decided, describe
from aottrain.compiler.simplification import simplify
from aottrain.compiler.stages import StageLog, collection_paused
from aottrain.errors import UnsupportedError
from aottrain.ir.graph import JointGraph
from aottrain.ir.report import GraphReport
from aottrain.ir.verify import verify_functional, verify_joint, verify_partition
from aottrain.runtime.program import Program
from aottrain.runtime.state import StateGuard, check_reachable

_MAX_CAPTURES = 4

__all__ = [
    "apply_partition",
    "capture",
    "chunk_loss_heads",
    "compile_call",
    "functional_joint",
    "functionalize",
    "plan_partition",
    "simplify",
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
    log = StageLog()
    step, analysis = capture_whole(function, module, args, kwargs, guard, options.rng, log, sizes)
    functional = _functional(step, analysis, log)
    joint = log.run("simplify", simplify, functional, check=_verify_whole)
    heads = find_loss_heads(joint) if options.chunks_loss_head else ()
    if heads:
        joint = log.run("chunk_loss_heads", chunk_loss_heads, joint, heads, check=_verify_whole)
    wanted = options.partition, options.budget, options.reserved_bytes, options.cost, options.modules
    plan = log.run("plan_partition", plan_partition, joint, *wanted)
    parts = log.run("apply_partition", apply_partition, joint, plan, check=partial(verify_partition, joint))
    kernels = log.run("schedule", plan_kernels, joint, parts, options)
    fused = log.run("make_kernels", make_kernels, kernels)
    log.annotate(fused[0].note if fused else "")
    program = log.run("link", link, parts, analysis, kernels.kernel, replay_of(step, functional), fused)
    decided = Decided(replace(options, kernel=kernels.kernel), kernels.reason, tuple(fused), tuple(heads))
    return program, step, analysis, describe(joint, plan, parts, decided, log.records)


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
    """Capture and analyse; where the code reads tensors from elsewhere, once more with those as inputs."""
    captured: list[Tensor] = []
    for _ in range(_MAX_CAPTURES):
        known = captured, rng, sizes, guard.watching, guard.seen
        step = log.run("capture", capture, function, module, args, kwargs, *known)
        try:
            return step, log.trace("analyse", analyse, step)
        except CapturedTensors as found:
            check_reachable(guard, found.tensors)
            captured += found.tensors
    raise UnsupportedError("the program reads other tensors each time that it is traced")


def functional_joint(step: CapturedStep, analysis: Analysis, log: StageLog | None = None) -> JointGraph:
    """The joint graph that partitioning starts from: traced, free of mutation, simplified; laws 1 and 2 checked."""
    log = log or StageLog()
    return log.run("simplify", simplify, _functional(step, analysis, log), check=_verify_whole)


def _functional(step: CapturedStep, analysis: Analysis, log: StageLog) -> JointGraph:
    joint = log.trace("trace_joint", trace_joint, step, analysis)
    return log.trace("functionalize", functionalize, joint, check=_verify_whole)


def _verify_whole(joint: JointGraph) -> None:
    verify_joint(joint)
    verify_functional(joint)
