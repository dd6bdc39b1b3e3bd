"""A compile report as one HTML page: nothing loaded from elsewhere, the same bytes for the same report. Without its
script, which zooms and searches the pictures, it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from aottrain.explain.figures import with_optimizer
from aottrain.explain.report import MEANING_OF_BREAKS, CompileReport, GraphReport, StageRecord
from aottrain.explain.summary import breaks_count, capture_text, inputs_text
from aottrain.ir.settings.budget import budget_text
from aottrain.ir.units import format_bytes, format_count, format_flops, format_percent, format_seconds
from aottrain.report.charts import bars, breakable, size
from aottrain.report.graph import figure
from aottrain.report.graph.script import SCRIPT
from aottrain.report.highlight import STYLE as CODE
from aottrain.report.page import Column, card, heading, mono, page, table, within
from aottrain.report.program import render_program

STYLE = f"{figure.STYLE}.aottrain {{{CODE}}}\n"


def render(report: CompileReport, summary: Mapping[str, Any] | None = None) -> str:
    """The page as text. `summary` is the run's summary.json: it adds measured figures and the optimizer."""
    body = _body(report, summary or {}, texts=True)
    drawn = any(graph.diagrams for graph in report.graphs)
    return page("compile report", body, script=SCRIPT if drawn else "", style=STYLE)


def fragment(report: CompileReport) -> str:
    """The page without the graphs' text, to stand within another one: what a notebook shows."""
    return within(_body(report, {}, texts=False), style=STYLE)


def _body(report: CompileReport, summary: Mapping[str, Any], *, texts: bool) -> list[str]:
    report = with_optimizer(report, summary.get("optimizer_bytes") or 0)
    body = [_header(report, summary), _fallbacks(report), _graph_breaks(report)]
    main = report.main_graph
    if main is not None:
        body += [_cards(main, report, summary), _saved_comparison(main, summary)]
    count = len(report.graphs)
    return body + [render_program(graph, i, count, texts=texts) for i, graph in enumerate(report.graphs, 1)]


def _header(report: CompileReport, summary: Mapping[str, Any]) -> str:
    graph = report.main_graph
    target = summary.get("recipe") or report.target
    lines = [[f"{name} {summary[name]}" for name in ("device", "precision") if summary.get(name)]]
    if graph is not None:
        budget = "" if graph.budget is None else f", budget {budget_text(graph.budget)}"
        lines[0] += [f"partition {graph.partition}{budget}", f"kernels {graph.kernel}"]
        lines[0] += [f"captured by {capture_text(graph)}"] if graph.capture else []
    if summary.get("optimizer_kernel"):
        lines[0].append(f"optimizer {summary['optimizer']}, kernels {summary['optimizer_kernel']}")
    count = len(report.graphs)
    lines[0].append(f"{count} program{'' if count == 1 else 's'} compiled in {format_seconds(report.compile_s)}")
    if graph is not None:
        lines.append([f"inputs {inputs_text(graph)}"] if inputs_text(graph) else [])
        lines.append([f"times are of {graph.machine}"] if graph.machine else [])
    shown = (f'<p class="dim">{escape(" · ".join(texts))}</p>' for texts in lines if texts)
    return "\n".join([f"<h1>Compile report{escape(f' of {target}' if target else '')}</h1>", *shown])


def _fallbacks(report: CompileReport) -> str:
    if not report.fallbacks:
        text = "Everything ran compiled: no fallbacks to eager." if report.graphs else "Nothing was compiled yet."
        if report.graph_breaks:
            text = f"No fallbacks to eager inside the graphs; {breaks_count(report)}, between which Python runs: below."
        return f'<p class="good">{text}</p>'
    rows = [[format_count(f.count), escape(f.reason), mono(f.source)] for f in report.fallbacks]
    count = report.num_fallbacks
    columns = [Column("calls", number=True), Column("why"), Column("where")]
    return (
        f'<section class="alarm"><h2>{format_count(count)} call{"" if count == 1 else "s"} ran eagerly</h2>'
        f"<p>These calls were not compiled; their results are eager PyTorch's own.</p>"
        f"{table(columns, rows)}</section>"
    )


def _graph_breaks(report: CompileReport) -> str:
    """Where TorchDynamo cut the target into several graphs; a budget is of each."""
    if not report.graph_breaks:
        return ""
    rows = [[format_count(broken.count), escape(broken.reason), mono(broken.source)] for broken in report.graph_breaks]
    columns = [Column("times", number=True), Column("why"), Column("where")]
    return f"{heading('Graph breaks', MEANING_OF_BREAKS)}{table(columns, rows)}"


def _cards(graph: GraphReport, report: CompileReport, summary: Mapping[str, Any]) -> str:
    cards = []
    if graph.mode == "train":
        count = len(graph.saved)
        note = f"{count} value{'' if count == 1 else 's'} saved, {len(graph.recomputed)} recomputed"
        cards.append(card("Saved for backward", size(graph.saved_bytes), note))
    cards.append(card("Predicted peak", size(graph.predicted_peak_bytes), escape(_measured_note(graph, summary))))
    cards.append(card("Compile time", format_seconds(report.compile_s), _slowest_stage(graph.stages)))
    if graph.mode == "train":
        total = graph.forward_flops + graph.backward_flops
        share = f"{format_percent(graph.recompute_flops / total)} on top of {format_flops(total)}" if total else ""
        cards.append(card("Recomputed per call", format_flops(graph.recompute_flops), escape(share)))
    if summary.get("step_ms_median"):
        step_s, p90_s = summary["step_ms_median"] / 1e3, summary.get("step_ms_p90")
        note = f"p90 {format_seconds(p90_s / 1e3)}" if p90_s else ""
        cards.append(card("Step, median", format_seconds(step_s), note))
    return f'<div class="cards">{"".join(cards)}</div>'


def _measured_note(graph: GraphReport, summary: Mapping[str, Any]) -> str:
    measured = summary.get("peak_bytes")
    if not measured:
        return "not measured in this run"
    error = graph.predicted_peak_bytes / measured - 1
    if error == 0:
        return "measured: the same, to the byte"
    side = "too high" if error > 0 else "too low"
    return f"measured {format_bytes(measured)}: the prediction is {format_percent(abs(error))} {side}"


def _slowest_stage(stages: Sequence[StageRecord]) -> str:
    slowest = max(stages, key=lambda stage: stage.seconds, default=None)
    return f"longest stage: {breakable(slowest.name)}, {format_seconds(slowest.seconds)}" if slowest else ""


def _saved_comparison(graph: GraphReport, summary: Mapping[str, Any]) -> str:
    """Our residual bytes beside the other ways to choose them."""
    if graph.mode != "train":
        return ""
    ours = f"this plan ({graph.partition})"
    rows = [(ours, graph.saved_bytes), ("min_cut", graph.min_cut_saved_bytes), ("save_all", graph.save_all_bytes)]
    if summary.get("eager_saved_bytes"):
        rows.append(("eager PyTorch", summary["eager_saved_bytes"]))
    title = heading("Bytes kept between forward and backward", "without parameters, buffers and the batch")
    return f'{title}<div class="panel">{bars(rows, emphasised=ours)}</div>'
