"""A compile report as one page of plain text: what `print(step.report)` shows."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from aottrain.explain.figures import (
    by_size,
    collectives_text,
    gap_text,
    kernel_text,
    memory_rows,
    top_of,
    traffic_text,
    uncounted,
)
from aottrain.explain.report import MEANING_OF_BREAKS, CompileReport, Fallback, GraphReport, ValueRecord
from aottrain.ir.settings.budget import budget_text
from aottrain.ir.units import format_bytes, format_count, format_flops, format_percent, format_seconds, format_shape

WIDTH = 100
_NUM_VALUES = 8
_NUM_STAGES = 5
_NUM_DECISIONS = 12
_NUM_INPUTS = 4
_NUM_LIBRARY_CALLS = 4
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[A-Za-z%])")  # where a line shall not end
_CAPTURES = {"dynamo": "TorchDynamo", "trace": "direct trace"}


def summarise(report: CompileReport) -> str:
    """The figures of the program that saves most, what ran eagerly, the largest saved values, and how to see more."""
    title = f"Compile report of {report.target}" if report.target else "Compile report"
    graph = report.main_graph
    rows = [] if graph is None else _figures(graph, report)
    parts = ["\n".join([title, "=" * len(title), *_aligned([*rows, _fallback_figure(report)])])]
    if report.fallbacks:
        parts.append("\n".join(["Ran eagerly, not compiled", *_fallbacks(report.fallbacks)]))
    if report.graph_breaks:
        parts.append("\n".join(["Where TorchDynamo broke the graph", *_graph_breaks(report)]))
    if graph is not None:
        if graph.decisions.decisions:
            parts.append("\n".join(["Decided by measuring, or by a model in its place", *_decided(graph)]))
        if graph.saved:
            parts.append("\n".join(_largest(by_size(graph.saved))))
        others = [other for other in report.graphs if other is not graph]
        if others:
            parts.append("\n".join(["Other programs", *(f"  {_line(other)}" for other in others)]))
        parts.append(".explain() lists every value; .save(path) writes a page with pictures and the graphs.")
    return "\n\n".join(parts)


def capture_text(graph: GraphReport) -> str:
    """How the program was captured, in words."""
    return _CAPTURES.get(graph.capture, graph.capture)


def inputs_text(graph: GraphReport) -> str:
    """`float32[4 x 128], int64[4] and 3 more; 1.85 M parameters`; "" where neither is known."""
    first = ", ".join(graph.inputs[:_NUM_INPUTS])
    rest = len(graph.inputs) - _NUM_INPUTS
    inputs = f"{first} and {rest} more" if rest > 0 else first
    parameters = f"{format_count(graph.num_parameters)} parameters" if graph.num_parameters else ""
    return "; ".join(filter(None, [inputs, parameters]))


def _figures(graph: GraphReport, report: CompileReport) -> list[tuple[str, str]]:
    count = len(report.graphs)
    programs = "1 program" if count == 1 else f"{count} programs; the one that saves most"
    kind = "forward and backward" if graph.mode == "train" else "forward alone"
    budget = "" if graph.budget is None else f", budget {budget_text(graph.budget)}"
    rows = [("compiled", f"{programs}: {kind}")]
    if inputs_text(graph):
        rows.append(("inputs", inputs_text(graph)))
    if graph.capture:
        rows.append(("captured by", capture_text(graph)))
    rows += [("partition", f"{graph.partition}{budget}"), ("kernels", _kernels(graph))]
    if traffic_text(graph):
        rows.append(("memory traffic", traffic_text(graph)))
    rows += [("collectives", collectives_text(graph))] if graph.collectives.calls else []
    rows += _trained(graph) if graph.mode == "train" else []
    rows.append(("predicted peak", _peak(graph)))
    if graph.memory:
        rows.append(("", ", ".join(f"{name} {format_bytes(size)}" for name, size in memory_rows(graph))))
    rows.append(("compile time", _times(graph, report)))
    return rows + ([("machine", graph.machine)] if graph.machine else [])


def _trained(graph: GraphReport) -> list[tuple[str, str]]:
    beside = f"min_cut {format_bytes(graph.min_cut_saved_bytes)}, save_all {format_bytes(graph.save_all_bytes)}"
    saved = f"{format_bytes(graph.saved_bytes)} in {_counted(graph.saved)}; by {beside}"
    if not graph.recomputed:
        return [("saved", saved), ("recomputed", "nothing")]
    share = graph.recompute_flops / graph.forward_flops if graph.forward_flops else 0.0
    again = f"{format_flops(graph.recompute_flops)}, {format_percent(share)} of the forward"
    size = format_bytes(graph.recomputed_bytes)
    rows = [("saved", saved), ("recomputed", f"{_counted(graph.recomputed)} of {size}; {again}")]
    return rows + ([("", f"of a step's time {gap_text(graph.gap)}")] if graph.gap is not None else [])


def _counted(values: Sequence[ValueRecord]) -> str:
    return f"{len(values)} value{'' if len(values) == 1 else 's'}"


def _kernels(graph: GraphReport) -> str:
    calls = [f"{count} {name.removeprefix('aten.').removesuffix('.default')}" for name, count in _calls(graph)]
    rest = sum(graph.library_calls.values()) - sum(count for _, count in _calls(graph))
    beside = ", ".join([*calls, *([f"{rest} others"] if rest else [])])
    return kernel_text(graph) + (f"; library calls: {beside}" if beside else "")


def _calls(graph: GraphReport) -> list[tuple[str, int]]:
    return list(graph.library_calls.items())[:_NUM_LIBRARY_CALLS]


def _peak(graph: GraphReport) -> str:
    top = f", {top_of(graph.timeline)}" if graph.timeline is not None else ""
    return format_bytes(graph.predicted_peak_bytes) + uncounted(graph) + top


def _times(graph: GraphReport, report: CompileReport) -> str:
    longest = sorted(graph.stages, key=lambda stage: -stage.seconds)[:_NUM_STAGES]
    stages = ", ".join(f"{stage.name} {format_seconds(stage.seconds)}" for stage in longest)
    return format_seconds(report.compile_s) + (f"; of this program: {stages}" if stages else "")


def _fallback_figure(report: CompileReport) -> tuple[str, str]:
    count = report.num_fallbacks
    if not count and report.graph_breaks:
        return "fallbacks", f"none inside the graphs; {breaks_count(report)}, see below"
    if not count:
        return "fallbacks", "none" if report.graphs else "none; nothing was compiled yet"
    return "fallbacks", f"{format_count(count)} call{'' if count == 1 else 's'} ran eagerly, see below"


def breaks_count(report: CompileReport) -> str:
    """How many places TorchDynamo broke the graph at."""
    count = len(report.graph_breaks)
    return f"{count} graph break{'' if count == 1 else 's'}"


def _fallbacks(fallbacks: Iterable[Fallback]) -> list[str]:
    lines = []
    for fallback in fallbacks:
        calls = f"{format_count(fallback.count)} call{'' if fallback.count == 1 else 's'}"
        lines.append(f"  {calls}{f' at {fallback.source}' if fallback.source else ''}")
        lines += _wrapped(fallback.reason, indent=6)
    return lines


def _graph_breaks(report: CompileReport) -> list[str]:
    lines = [
        line
        for graph_break in report.graph_breaks
        for line in _wrapped(f"{graph_break.source}: {graph_break.reason}", indent=2)
    ]
    return lines + _wrapped(MEANING_OF_BREAKS, indent=2)


def _decided(graph: GraphReport) -> list[str]:
    rows = [(f"{question}: {answer}", times, source) for question, answer, times, source in graph.decisions.rows()]
    lines = [line for row in rows[:_NUM_DECISIONS] for line in _wrapped("; ".join(filter(None, row)), 2)]
    return lines + ([f"  and {len(rows) - _NUM_DECISIONS} more"] if len(rows) > _NUM_DECISIONS else [])


def _largest(values: Sequence[ValueRecord]) -> list[str]:
    shown = values[:_NUM_VALUES]
    of = f", {len(shown)} of {len(values)}" if len(values) > len(shown) else ""
    lines = [f"Largest saved values{of}"]
    for value in shown:
        where = ", ".join(filter(None, [value.module, value.source]))
        lines.append(
            f"  {format_bytes(value.num_bytes):>8}  {value.name}  {format_shape(value.shape)} {value.dtype}  {where}"
        )
        lines += _wrapped(value.reason, indent=12)
    return lines


def _line(graph: GraphReport) -> str:
    sizes = f"saved {format_bytes(graph.saved_bytes)}, predicted peak {format_bytes(graph.predicted_peak_bytes)}"
    kind = "training" if graph.mode == "train" else "forward alone"
    return f"{', '.join(filter(None, [kind, inputs_text(graph)]))}: {sizes}"


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """The names in a column, the values beside them, broken into lines that stay in theirs."""
    margin = max(len(name) for name, _ in rows) + 2
    lines = []
    for name, value in rows:
        first, *more = _wrapped(value, indent=margin)
        lines += [name.ljust(margin) + first[margin:], *more]
    return lines


def _wrapped(text: str, indent: int) -> list[str]:
    margin = " " * indent
    joined = _BEFORE_UNIT.sub("\u00a0", text)
    wrapper = textwrap.TextWrapper(WIDTH, margin, margin, break_long_words=False, break_on_hyphens=False)
    lines = wrapper.wrap(joined)
    return [line.replace("\u00a0", " ") for line in lines] or [margin]
