"""What the compiler decided, as tables that a dashboard sorts and filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aottrain.explain.report import CompileReport, GraphReport

MOST_ROWS = 1000


@dataclass(frozen=True)
class Table:
    """Rows of plain values."""

    columns: tuple[str, ...]
    rows: list[list[Any]]


def tables(report: CompileReport | None) -> dict[str, Table]:
    """By name, of the program that saves most; none where nothing was compiled. Long ones end after `MOST_ROWS`."""
    graph = None if report is None else report.main_graph
    if graph is None:
        return {}
    found = {"values": _values(graph), "kernels": _kernels(graph), "memory": _memory(graph)}
    return {name: Table(table.columns, table.rows[:MOST_ROWS]) for name, table in found.items() if table.rows}


def _values(graph: GraphReport) -> Table:
    columns = ("value", "is", "op", "module", "source", "type", "shape", "bytes", "recompute_flops", "reason")
    rows = [
        [v.name, is_, v.op, v.module, v.source, v.dtype, list(v.shape), v.num_bytes, v.recompute_flops, v.reason]
        for is_, values in (("saved", graph.saved), ("recomputed", graph.recomputed))
        for v in sorted(values, key=lambda value: -value.num_bytes)
    ]
    return Table(columns, [[str(cell) if isinstance(cell, list) else cell for cell in row] for row in rows])


def _kernels(graph: GraphReport) -> Table:
    rows = [
        [r.names[0], r.ops, ", ".join(r.lines), len(r.names), r.moved_bytes, r.total_bytes, r.formula]
        for r in graph.kernel_records
    ]
    return Table(("kernel", "ops", "source", "calls", "bytes_a_call", "bytes", "formula"), rows)


def _memory(graph: GraphReport) -> Table:
    """Predicted bytes alive at each instant of the step, by category."""
    timeline = graph.timeline
    if timeline is None:
        return Table((), [])
    fixed = list(timeline.fixed.values())
    rows = [
        [i, "forward" if i < timeline.num_forward else "backward", total, *fixed, *live]
        for i, (total, live) in enumerate(zip(timeline.totals, timeline.live, strict=True))
    ]
    stride = -(-len(rows) // MOST_ROWS)
    kept = [max(rows[i : i + stride], key=lambda row: row[2]) for i in range(0, len(rows), stride)]
    return Table(("instant", "half", "total", *timeline.fixed, *timeline.categories), kept)
