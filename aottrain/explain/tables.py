"""A compile report as tables for the terminal: what was saved, what is recomputed, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aottrain.explain.figures import (
    COLLECTIVE_COLUMNS,
    LABELS,
    binned,
    by_cost,
    by_module,
    by_size,
    collective_rows,
    headline,
    memory_rows,
    signed_bytes,
    top_of,
)
from aottrain.explain.report import CompileReport, Fallback, GraphBreak, GraphReport, MemoryTimeline, ValueRecord
from aottrain.ir.units import format_bytes, format_count, format_flops, format_seconds, format_shape

MAX_CELL = 40
_NUM_ALIVE = 10
_MEANING = " (recompute: how much longer a step takes without it; peak then: how its peak changes)"


def explain(report: CompileReport, *, max_rows: int | None = 20) -> str:
    """Every program of `report` with its reasons. `max_rows` bounds each value table; None prints all rows."""
    parts = [_fallbacks(report.fallbacks)] if report.fallbacks else []
    if report.graph_breaks:
        parts += [_graph_breaks(report.graph_breaks), report.breaks_text]
    for number, graph in enumerate(report.graphs, 1):
        title = f"Program {number} of {len(report.graphs)}: {graph.mode}"
        parts.append("\n\n".join([_underline(title), *_sections(graph, max_rows)]))
    return "\n\n".join(parts) if parts else "Nothing was compiled."


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> str:
    """Columns padded to their widest cell, those in `right` aligned to the right. All but the last are clipped."""
    lines = [[*map(_clip, row[:-1]), row[-1]] for row in (header, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    aligned_right = set(right)
    lines.insert(1, ["-" * width for width in widths])
    text = [
        "  ".join(
            cell.rjust(width) if index in aligned_right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in text)


def _sections(graph: GraphReport, max_rows: int | None) -> list[str]:
    figures = headline(graph)
    width = max(len(name) for name, _ in figures)
    sections = ["\n".join(f"{name.ljust(width)}  {value}" for name, value in figures)]
    if graph.timeline is not None:
        sections.append(timeline_text(graph.timeline))
    if graph.memory:
        sizes = [(name, format_bytes(size)) for name, size in memory_rows(graph)]
        sections.append("Memory at the predicted peak\n" + table(("category", "size"), sizes, right=[1]))
    if graph.timeline is not None and graph.timeline.alive:
        sections.append(_alive_table(graph.timeline))
    if graph.collectives.calls:
        rows = [tuple(row) for row in collective_rows(graph.collectives)]
        text = table(COLLECTIVE_COLUMNS, _limit(rows, max_rows), right=range(6))
        sections.append("Collectives, by the cost model\n" + text)
    if graph.saved:
        rows = [(module, str(count), format_bytes(size)) for module, count, size in by_module(graph.saved)]
        modules = table(("module", "values", "size"), _limit(rows, max_rows), right=[1, 2])
        sections.append("Saved for backward, by module\n" + modules)
        meaning = _MEANING if any(value.peak_change is not None for value in graph.saved) else ""
        sections.append(f"Saved for backward{meaning}\n" + _value_table(by_size(graph.saved), max_rows))
    if graph.recomputed:
        sections.append("Recomputed in the backward\n" + _value_table(by_cost(graph.recomputed), max_rows))
    if graph.loss_heads:
        sections.append("Loss heads\n" + "\n".join(graph.loss_heads))
    if graph.layouts:
        sections.append(f"Layouts\n{graph.layouts}")
    if graph.cuda_graphs is not None:
        sections.append(f"CUDA graphs\n{graph.cuda_graphs}")
    stages = [
        (
            stage.name,
            format_seconds(stage.seconds),
            format_count(stage.num_nodes_before),
            format_count(stage.num_nodes_after),
            stage.note,
        )
        for stage in graph.stages
    ]
    header = ("stage", "time", "nodes before", "nodes after", "note")
    sections.append("Stages\n" + table(header, stages, right=[1, 2, 3]))
    return sections


def timeline_text(timeline: MemoryTimeline, width: int = 72, height: int = 8) -> str:
    """Bytes alive against the ops of the step, the largest of each column, in plain characters."""
    totals = timeline.totals
    chosen = binned(totals, width)
    top = max(totals)
    levels = [-(-totals[i] * height // top) if top else 0 for i in chosen]
    labels = {height: format_bytes(top), 1: "0 B"}
    margin = max(map(len, labels.values()))
    lines = [f"Memory over the step: {format_bytes(top)} at its top, {top_of(timeline)}"]
    for row in range(height, 0, -1):
        bars = "".join("#" if level >= row else " " for level in levels)
        lines.append(f"{labels.get(row, '').rjust(margin)} |{bars.rstrip()}")
    split = sum(i < timeline.num_forward for i in chosen)
    halves = "forward".ljust(split, "-")[:split] + "|backward".ljust(len(chosen) - split, "-")[: len(chosen) - split]
    lines.append(f"{' ' * margin} +{halves}")
    return "\n".join(lines)


def _alive_table(timeline: MemoryTimeline) -> str:
    shown = timeline.alive[:_NUM_ALIVE]
    rows = [
        (record.name, record.module, record.op.removeprefix("aten."), format_shape(record.shape))
        + (format_bytes(record.num_bytes), LABELS.get(record.category, record.category))
        for record in shown
    ]
    text = table(("value", "module", "op", "shape", "size", "as"), rows, right=[4])
    rest = timeline.num_alive - len(shown)
    return f"Alive at the top{f', the largest {len(shown)} of {timeline.num_alive}' if rest > 0 else ''}\n{text}"


def _value_table(values: Sequence[ValueRecord], max_rows: int | None) -> str:
    rows: list[tuple[str, ...]] = [
        (
            value.name,
            value.module,
            value.op.removeprefix("aten."),
            format_shape(value.shape),
            value.dtype,
            format_bytes(value.num_bytes),
            "" if value.recompute_s is None else format_seconds(value.recompute_s),
            signed_bytes(value.peak_change),
            value.reason,
        )
        for value in values
    ]
    header = ["value", "module", "op", "shape", "dtype", "size", "recompute", "peak then", "reason"]
    if not any(value.peak_change is not None for value in values):
        header.remove("peak then")
        rows = [(*row[:-2], row[-1]) for row in rows]
    shown = table(header, _limit(rows, max_rows), right=range(5, len(header) - 1))
    if max_rows is None or len(rows) <= max_rows:
        return shown
    rest = values[max_rows:]
    size, cost = sum(value.num_bytes for value in rest), sum(value.recompute_flops for value in rest)
    return f"{shown}\n... and {len(rest)} more: {format_bytes(size)}, {format_flops(cost)} to recompute"


def _fallbacks(fallbacks: Sequence[Fallback]) -> str:
    rows = [(str(fallback.count), fallback.reason, fallback.source) for fallback in fallbacks]
    return "Ran eagerly, not compiled\n" + table(("calls", "reason", "source"), rows, right=[0])


def _graph_breaks(breaks: Sequence[GraphBreak]) -> str:
    rows = [(str(graph_break.count), graph_break.reason, graph_break.source) for graph_break in breaks]
    return "Where TorchDynamo broke the graph\n" + table(("times", "reason", "source"), rows, right=[0])


def _limit(rows: Sequence[Sequence[str]], max_rows: int | None) -> Sequence[Sequence[str]]:
    return rows if max_rows is None else rows[:max_rows]


def _clip(cell: str) -> str:
    return cell if len(cell) <= MAX_CELL else cell[: MAX_CELL - 3] + "..."


def _underline(title: str) -> str:
    return f"{title}\n{'=' * len(title)}"
