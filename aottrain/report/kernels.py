"""The generated kernels on the page: what each computes, for which lines, what it moves, and its text; and what was not
fused, and why."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from aottrain.explain.figures import traffic_text
from aottrain.explain.records import KernelRecord
from aottrain.explain.report import GraphReport
from aottrain.ir.units import format_bytes, format_count, format_percent
from aottrain.report.charts import breakable, size
from aottrain.report.highlight import highlight
from aottrain.report.page import Column, folded, heading, joined, long_table, mono, pre

NUM_ROWS = 12
_SAME = 1.005  # a ratio up to which two figures are written alike
NUM_TEXTS = 60  # kernels whose code is on the page: those that move most


def render_kernels(graph: GraphReport, *, texts: bool) -> str:
    """texts: with formulas and code."""
    return joined([_kernels(graph, texts=texts), _refused(graph), _guards(graph)])


def _kernels(graph: GraphReport, *, texts: bool) -> str:
    records = graph.kernel_records
    if not records:
        return ""
    total = sum(record.total_bytes for record in records) or 1
    calls = sum(len(record.names) for record in records)
    columns = [
        Column("kernel and what it computes", 32),
        Column("lines of the program", 24),
        Column("calls", 7, number=True),
        Column("moves in a call", 12, number=True),
        Column("in a step", 12, number=True),
        Column("at least", 13, number=True),
    ]
    rows = [
        [
            f"{mono(record.names[0])}<small>{escape(record.ops)}</small>",
            breakable(", ".join(record.lines)),
            format_count(len(record.names)),
            size(record.moved_bytes),
            f"{size(record.total_bytes)}<small>{format_percent(record.total_bytes / total)} of all</small>",
            f"{size(record.needed_bytes)}<small>{_times(record)}</small>",
        ]
        for record in records
    ]
    note = f"{format_count(len(records))} functions, called {format_count(calls)} times a step"
    meaning = (
        '<p class="dim">Bytes are counted, not measured: each element that a kernel reads or writes moves once. At '
        "least: without what goes from one generated kernel to another, which is all that joining more of them could "
        f"save.{escape(_whole(graph))}</p>"
    )
    listing = long_table(columns, rows, shown=NUM_ROWS, rest=f"{len(rows) - NUM_ROWS} more")
    return joined([heading("Generated kernels", note), meaning, listing, _texts(records) if texts else ""])


def _times(record: KernelRecord) -> str:
    """What it moves over that, where it is more."""
    ratio = record.total_bytes / record.needed_bytes if record.needed_bytes else 0.0
    return f"moves {ratio:,.0f}x" if ratio >= 100 else f"moves {ratio:.3g}x" if ratio > _SAME else ""


def _whole(graph: GraphReport) -> str:
    """The same of the program, library calls and all. Of many saved values its least is known no better than what is
    moved: then nothing is said."""
    told = graph.traffic is not None and graph.traffic.least < graph.traffic.moved
    return f" The whole program, library calls among it: {traffic_text(graph)}." if told else ""


def _texts(records: Sequence[KernelRecord]) -> str:
    shown = [
        folded(
            record.names[0],
            f"<h4>Formula</h4>{pre(highlight(record.formula), 'code')}"
            f"<h4>Code</h4>{pre(highlight(record.code), 'code')}",
            f"{record.ops}; {format_bytes(record.moved_bytes)} a call",
        )
        for record in records[:NUM_TEXTS]
    ]
    left = len(records) - len(shown)
    more = f'<p class="dim">{left} more are in report.graphs[...].kernel_records.</p>' if left > 0 else ""
    return folded("Formulas and code", "".join(shown) + more, f"{len(shown)} kernels")


def _refused(graph: GraphReport) -> str:
    if not graph.refusals:
        return ""
    columns = [Column("call", 24), Column("alike", 10, number=True), Column("why it is not one kernel with it", 66)]
    rows = [[mono(refusal.op), format_count(refusal.count), escape(refusal.reason)] for refusal in graph.refusals]
    count = sum(refusal.count for refusal in graph.refusals)
    listing = long_table(columns, rows, shown=NUM_ROWS, rest=f"{len(rows) - NUM_ROWS} more")
    return folded("Fusions that were not made", listing, format_count(count))


def _guards(graph: GraphReport) -> str:
    if not graph.guards:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in graph.guards)
    inputs = f"<li>inputs: {escape(', '.join(graph.inputs))}</li>" if graph.inputs else ""
    return folded("Guards", f"<ul>{inputs}{lines}</ul>", "compared before each call of this program")
