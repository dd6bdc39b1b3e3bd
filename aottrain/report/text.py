"""A compile report as tables for the terminal: what was saved, what is recomputed, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aottrain.ir.report import CompileReport, Fallback, GraphReport, ValueRecord
from aottrain.report.units import (
    format_bytes,
    format_count,
    format_flops,
    format_percent,
    format_seconds,
    format_shape,
)

MAX_CELL = 40


def explain(report: CompileReport, *, max_rows: int | None = 20) -> str:
    """Every program of `report` with its reasons. `max_rows` bounds each value table; None prints all rows."""
    parts = [_fallbacks(report.fallbacks)] if report.fallbacks else []
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
    text = ["  ".join(cell.rjust(width) if index in aligned_right else cell.ljust(width)
                      for index, (cell, width) in enumerate(zip(line, widths, strict=True))) for line in lines]
    return "\n".join(line.rstrip() for line in text)


def by_module(values: Iterable[ValueRecord]) -> list[tuple[str, int, int]]:
    """(module path, number of values, bytes), largest first; values outside any module are under "(no module)"."""
    totals: dict[str, tuple[int, int]] = {}
    for value in values:
        count, num_bytes = totals.get(value.module, (0, 0))
        totals[value.module] = (count + 1, num_bytes + value.num_bytes)
    rows = [(module or "(no module)", count, num_bytes) for module, (count, num_bytes) in totals.items()]
    return sorted(rows, key=lambda row: (-row[2], row[0]))


def headline(graph: GraphReport) -> list[tuple[str, str]]:
    """The figures that one looks at first, as (name, value)."""
    figures = [
        ("partition", graph.partition if graph.budget is None else f"{graph.partition}, budget {graph.budget:g}"),
        ("kernels", f"{graph.kernel}, {format_count(len(graph.kernels))} generated" if graph.kernels else graph.kernel),
        ("forward", format_flops(graph.forward_flops)),
    ]
    if graph.mode == "train":
        share = f" ({format_percent(graph.recompute_flops / graph.forward_flops)} of the forward)"
        figures += [
            ("backward", format_flops(graph.backward_flops)),
            ("recompute", format_flops(graph.recompute_flops) + (share if graph.forward_flops else "")),
            ("saved for backward", format_bytes(graph.saved_bytes)),
            ("  min_cut would save", format_bytes(graph.min_cut_saved_bytes)),
            ("  save_all would save", format_bytes(graph.save_all_bytes)),
        ]
    return [
        *figures,
        ("predicted peak", format_bytes(graph.predicted_peak_bytes)),
        ("arena", format_bytes(graph.arena_bytes) if graph.arena_bytes else "none"),
        ("random draws per call", format_count(graph.num_draws)),
        ("graph sizes", ", ".join(f"{name} {format_count(size)} nodes" for name, size in graph.num_nodes.items())),
        ("compile time", format_seconds(graph.compile_s)),
    ]


def memory_rows(graph: GraphReport) -> list[tuple[str, int]]:
    """(category, bytes) at the predicted peak, largest first, without the empty ones."""
    return sorted(((name, size) for name, size in graph.memory.items() if size), key=lambda row: (-row[1], row[0]))


def _sections(graph: GraphReport, max_rows: int | None) -> list[str]:
    figures = headline(graph)
    width = max(len(name) for name, _ in figures)
    sections = ["\n".join(f"{name.ljust(width)}  {value}" for name, value in figures)]
    if graph.memory:
        rows = [(name, format_bytes(size)) for name, size in memory_rows(graph)]
        sections.append("Memory at the predicted peak\n" + table(("category", "size"), rows, right=[1]))
    if graph.saved:
        rows = [(module, str(count), format_bytes(size)) for module, count, size in by_module(graph.saved)]
        modules = table(("module", "values", "size"), _limit(rows, max_rows), right=[1, 2])
        sections.append("Saved for backward, by module\n" + modules)
        sections.append("Saved for backward\n" + _value_table(by_size(graph.saved), max_rows))
    if graph.recomputed:
        sections.append("Recomputed in the backward\n" + _value_table(by_cost(graph.recomputed), max_rows))
    stages = [(stage.name, format_seconds(stage.seconds), format_count(stage.num_nodes_before),
               format_count(stage.num_nodes_after), stage.note) for stage in graph.stages]
    header = ("stage", "time", "nodes before", "nodes after", "note")
    sections.append("Stages\n" + table(header, stages, right=[1, 2, 3]))
    return sections


def by_size(values: Iterable[ValueRecord]) -> list[ValueRecord]:
    """Saved values: the largest first."""
    return sorted(values, key=lambda value: (-value.num_bytes, -value.recompute_flops, value.name))


def by_cost(values: Iterable[ValueRecord]) -> list[ValueRecord]:
    """Recomputed values: the dearest first, and so the views, which cost nothing, last."""
    return sorted(values, key=lambda value: (-value.recompute_flops, -value.num_bytes, value.name))


def _value_table(values: Sequence[ValueRecord], max_rows: int | None) -> str:
    rows = [(value.name, value.module, value.op.removeprefix("aten."), format_shape(value.shape), value.dtype,
             format_bytes(value.num_bytes), format_flops(value.recompute_flops), value.reason) for value in values]
    header = ("value", "module", "op", "shape", "dtype", "size", "recompute", "reason")
    shown = table(header, _limit(rows, max_rows), right=[5, 6])
    if max_rows is None or len(rows) <= max_rows:
        return shown
    rest = values[max_rows:]
    size, cost = sum(value.num_bytes for value in rest), sum(value.recompute_flops for value in rest)
    return f"{shown}\n... and {len(rest)} more: {format_bytes(size)}, {format_flops(cost)} to recompute"


def _fallbacks(fallbacks: Sequence[Fallback]) -> str:
    rows = [(str(fallback.count), fallback.reason, fallback.source) for fallback in fallbacks]
    return "Ran eagerly, not compiled\n" + table(("calls", "reason", "source"), rows, right=[0])


def _limit(rows: list[tuple[str, ...]], max_rows: int | None) -> list[tuple[str, ...]]:
    return rows if max_rows is None else rows[:max_rows]


def _clip(cell: str) -> str:
    return cell if len(cell) <= MAX_CELL else cell[: MAX_CELL - 3] + "..."


def _underline(title: str) -> str:
    return f"{title}\n{'=' * len(title)}"
