"""Whether a step fits into the memory that there is, as far as that is known before anything is measured."""

from __future__ import annotations

from aottrain.compiler.link.programs import plan_program
from aottrain.compiler.link.timeline import trace_memory
from aottrain.compiler.options import CompileOptions
from aottrain.errors import SMALLER, CapacityError
from aottrain.ir.graph import JointGraph, PartitionedGraph, calls, storage_bytes
from aottrain.ir.settings.choices import GENERATED
from aottrain.ir.units import format_bytes


def all_bytes(joint: JointGraph) -> int:
    """Of all values of a program, as if none ever died: no plan peaks above it."""
    return sum(spec.spec.at_hand().storage_bytes for spec in joint.signature.inputs) + sum(
        map(storage_bytes, calls(joint.graph))
    )


def peak_without_workspaces(parts: PartitionedGraph, options: CompileOptions) -> int:
    """The step's peak in bytes, but for what libraries need in calls."""
    schedules = [schedule for _, _, schedule in plan_program(parts, True)] if options.kernel in GENERATED else []
    return trace_memory(parts, options.reserved_bytes, schedules=schedules).peak_bytes


def refuse_beyond(limit: int, peak: int) -> None:
    """CapacityError where a peak in bytes is above the limit."""
    if peak > limit:
        has = f"the memory that it may have is {format_bytes(limit)}"
        raise CapacityError(f"a step's predicted peak is {format_bytes(peak)}, {has}: {SMALLER}")
