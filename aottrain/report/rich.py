"""What a notebook shows of the compiler's values: graphs as pictures, a plan as a table, a kernel as its formula."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from aottrain.explain.diagrams import half_diagrams, joint_diagram
from aottrain.ir.graph import JointGraph, PartitionedGraph
from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.kernels.traffic import moved_bytes
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.units import format_bytes
from aottrain.report.graph import figure
from aottrain.report.highlight import STYLE as CODE
from aottrain.report.highlight import highlight
from aottrain.report.page import Column, heading, long_table, mono, pre, within

NUM_ROWS = 20
_STYLE = f"{figure.STYLE}.aottrain {{{CODE}}}\n"


def render(value: Any) -> str:
    """As HTML, to stand within another page."""
    return within([_renderers()[type(value)](value)], style=_STYLE)


def _renderers() -> dict[type, Callable[[Any], str]]:
    return {JointGraph: _joint, PartitionedGraph: _parts, PartitionPlan: _plan, KernelIR: _kernel}


def _joint(joint: JointGraph) -> str:
    return figure.pictures([joint_diagram(joint)], f"joint{id(joint)}")


def _parts(parts: PartitionedGraph) -> str:
    return figure.pictures(half_diagrams(parts), f"parts{id(parts)}")


def _plan(plan: PartitionPlan) -> str:
    rows = [[mono(name), "saved", escape(plan.reasons.get(name, ""))] for name in plan.saved]
    rows += [[mono(name), "recomputed", escape(plan.reasons.get(name, ""))] for name in plan.recomputed]
    note = f"{len(plan.saved)} values saved, {format_bytes(plan.saved_bytes)}; {len(plan.recomputed)} recomputed"
    columns = [Column("value"), Column("is"), Column("reason")]
    listing = long_table(columns, rows, shown=NUM_ROWS, rest=f"{len(rows) - NUM_ROWS} more")
    return heading(f"Partition by {plan.strategy}", note) + listing


def _kernel(kernel: KernelIR) -> str:
    note = f"moves {format_bytes(moved_bytes(kernel))}, each element once"
    return f"{heading(kernel.name, note)}{pre(highlight(str(kernel)), 'code')}"
