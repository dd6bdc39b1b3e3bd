"""A compile report as one HTML page: no scripts, nothing loaded from elsewhere, the same bytes for the same report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from aottrain.ir.budget import budget_text
from aottrain.ir.figures import (
    LABELS,
    binned,
    by_cost,
    by_module,
    by_size,
    kernel_text,
    memory_rows,
    signed_bytes,
    top_of,
    uncounted,
    with_optimizer,
)
from aottrain.ir.report import CompileReport, Fallback, GraphReport, MemoryTimeline, StageRecord, ValueRecord
from aottrain.ir.units import (
    format_bytes,
    format_count,
    format_flops,
    format_percent,
    format_seconds,
    format_shape,
)
from aottrain.report.charts import area_plot, bars, stacked_bar
from aottrain.report.style import CSS


def write(report: CompileReport, path: str | Path, summary: Mapping[str, Any] | None = None) -> None:
    """Write the page to `path`. `summary` is the run's summary.json: it adds measured figures and the optimizer."""
    Path(path).write_text(render(report, summary), encoding="utf-8")


def render(report: CompileReport, summary: Mapping[str, Any] | None = None) -> str:
    """The page as text; see `write`."""
    summary = summary or {}
    report = with_optimizer(report, summary.get("optimizer_bytes") or 0)
    body = [_header(report, summary), _fallbacks(report)]
    main = _main_graph(report)
    if main is not None:
        body += [_cards(main, report, summary), _saved_comparison(main, summary)]
    for number, graph in enumerate(report.graphs, 1):
        body.append(_program(graph, number, len(report.graphs)))
    return _page("compile report", body)


def render_curve(
    facts: str, plot: str, header: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str]
) -> str:
    """A page about memory against speed. plot: as SVG; the first column of the rows is text, as is the last."""
    numbers = range(1, len(header) - 1)
    cells = [_row(*(_cell(text, "number" if i in numbers else "") for i, text in enumerate(row))) for row in rows]
    body = [
        f'<h1>Memory against speed</h1>\n<p class="dim">{escape(facts)}</p>',
        f'<div class="panel">{plot}</div>',
        _table(header, cells, numbers=numbers),
        *(f"<p>{escape(note)}</p>" for note in notes),
    ]
    return _page("memory against speed", body)


def _page(title: str, body: Iterable[str]) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>aottrain: {title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{CSS}</style></head>\n'
        f"<body><main>\n{chr(10).join(part for part in body if part)}\n</main></body></html>\n"
    )


def _main_graph(report: CompileReport) -> GraphReport | None:
    """The program that the headline is about: the training program that saves most."""
    return max(report.graphs, key=lambda graph: (graph.mode == "train", graph.saved_bytes), default=None)


def _header(report: CompileReport, summary: Mapping[str, Any]) -> str:
    graph = _main_graph(report)
    facts = []
    if graph is not None:
        budget = "" if graph.budget is None else f", budget {budget_text(graph.budget)}"
        facts = [f"partition {graph.partition}{budget}", f"kernels {graph.kernel}"]
    if summary.get("optimizer_kernel"):
        facts.append(f"optimizer {summary['optimizer']}, kernels {summary['optimizer_kernel']}")
    facts += [f"{name} {summary[name]}" for name in ("recipe", "device", "precision") if summary.get(name)]
    count = len(report.graphs)
    facts.append(f"{count} program{'' if count == 1 else 's'} compiled in {format_seconds(report.compile_s)}")
    return f'<h1>Compile report</h1>\n<p class="dim">{escape(" · ".join(facts))}</p>'


def _fallbacks(report: CompileReport) -> str:
    if not report.fallbacks:
        return '<p class="good">Everything ran compiled: no fallbacks to eager.</p>'
    rows = [
        _row(_cell(format_count(fallback.count), "number"), _cell(fallback.reason), _source(fallback))
        for fallback in report.fallbacks
    ]
    count = report.num_fallbacks
    return (
        f'<section class="alarm"><h2>{format_count(count)} call{"" if count == 1 else "s"} ran eagerly</h2>'
        f"<p>These calls were not compiled; their results are eager PyTorch's own.</p>"
        f"{_table(('calls', 'why', 'where'), rows, numbers=(0,))}</section>"
    )


def _source(fallback: Fallback) -> str:
    return _cell(fallback.source, "mono")


def _cards(graph: GraphReport, report: CompileReport, summary: Mapping[str, Any]) -> str:
    cards = []
    if graph.mode == "train":
        note = f"{len(graph.saved)} values saved, {len(graph.recomputed)} recomputed"
        cards.append(_card("Saved for backward", format_bytes(graph.saved_bytes), note))
    cards.append(_card("Predicted peak", format_bytes(graph.predicted_peak_bytes), _measured_note(graph, summary)))
    cards.append(_card("Compile time", format_seconds(report.compile_s), _slowest_stage(graph.stages)))
    if graph.mode == "train":
        total = graph.forward_flops + graph.backward_flops
        share = f"{format_percent(graph.recompute_flops / total)} on top of {format_flops(total)}" if total else ""
        cards.append(_card("Recomputed per call", format_flops(graph.recompute_flops), share))
    if summary.get("step_ms_median"):
        step_s, p90_s = summary["step_ms_median"] / 1e3, summary.get("step_ms_p90")
        note = f"p90 {format_seconds(p90_s / 1e3)}" if p90_s else ""
        cards.append(_card("Step, median", format_seconds(step_s), note))
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(title: str, figure: str, note: str) -> str:
    return (
        f'<div class="card"><h3>{escape(title)}</h3><div class="figure">{escape(figure)}</div>'
        f"<p>{escape(note)}</p></div>"
    )


def _measured_note(graph: GraphReport, summary: Mapping[str, Any]) -> str:
    measured = summary.get("peak_bytes")
    if not measured:
        return "not measured in this run"
    error = graph.predicted_peak_bytes / measured - 1
    side = "too high" if error >= 0 else "too low"
    return f"measured {format_bytes(measured)}: the prediction is {format_percent(abs(error))} {side}"


def _slowest_stage(stages: Sequence[StageRecord]) -> str:
    slowest = max(stages, key=lambda stage: stage.seconds, default=None)
    return f"longest stage: {slowest.name}, {format_seconds(slowest.seconds)}" if slowest else ""


def _saved_comparison(graph: GraphReport, summary: Mapping[str, Any]) -> str:
    """Our residual bytes beside the other ways to choose them."""
    if graph.mode != "train":
        return ""
    ours = f"this plan ({graph.partition})"
    rows = [(ours, graph.saved_bytes), ("min_cut", graph.min_cut_saved_bytes), ("save_all", graph.save_all_bytes)]
    if summary.get("eager_saved_bytes"):
        rows.append(("eager PyTorch", summary["eager_saved_bytes"]))
    drawn = bars([(label, size, format_bytes(size)) for label, size in rows], emphasised=ours)
    return (
        f"<h3>Bytes kept between forward and backward<small>without parameters, buffers and the batch</small></h3>"
        f'<div class="panel">{drawn}</div>'
    )


def _decisions(graph: GraphReport) -> list[str]:
    replays = [] if graph.cuda_graphs is None else [f"CUDA graphs: {graph.cuda_graphs}"]
    return [*graph.loss_heads, *([graph.layouts] if graph.layouts else []), *replays]


def _program(graph: GraphReport, number: int, total: int) -> str:
    kind = "forward and backward" if graph.mode == "train" else "forward alone"
    name = "The program" if total == 1 else f"Program {number} of {total}"
    sizes = ", ".join(f"{part} {format_count(size)} nodes" for part, size in graph.num_nodes.items())
    parts = [
        f'<h2>{name}: {kind}</h2><p class="dim">{escape(sizes)}; {format_count(graph.num_draws)} random draws per '
        f"call; {_kernels(graph)}.</p>",
        _memory(graph),
        *(f"<p>{escape(text)}.</p>" for text in _decisions(graph)),
    ]
    if graph.saved:
        count = f"{len(graph.saved)} values, {format_bytes(graph.saved_bytes)}"
        parts += [
            f"<h3>Saved for backward<small>{count}</small></h3>",
            _modules(graph.saved),
            _PRICES if any(value.recompute_s is not None for value in graph.saved) else "",
            _values(by_size(graph.saved)),
        ]
    if graph.recomputed:
        count = f"{len(graph.recomputed)} values, {format_flops(graph.recompute_flops)}"
        parts.append(f"<h3>Recomputed in the backward<small>{count}</small></h3>{_values(by_cost(graph.recomputed))}")
    parts += [
        _stages(graph),
        _graph_text("Forward graph", graph.forward_text, graph.num_nodes.get("forward")),
        _graph_text("Backward graph", graph.backward_text, graph.num_nodes.get("backward")),
    ]
    return "\n".join(part for part in parts if part)


_PRICES = (
    '<p class="dim">Cost to recompute: what a step would take longer without the value, by the cost model, and below it'
    " the FLOPs of its own op. Peak then: how the step's peak would change; of the largest values.</p>"
)


def _kernels(graph: GraphReport) -> str:
    beside = ", ".join(f"{count} {name}" for name, count in graph.library_calls.items())
    return escape(f"kernels: {kernel_text(graph)}" + (f"; beside them {beside}" if beside else ""))


def _memory(graph: GraphReport) -> str:
    parts = [(name, size, format_bytes(size)) for name, size in memory_rows(graph)]
    if not parts:
        return ""
    total = format_bytes(sum(size for _, size, _ in parts)) + uncounted(graph)
    bar = stacked_bar(parts, title="Memory at the predicted peak, by category", colours=_COLOURS)
    found = [f'<h3>Memory at the predicted peak<small>{total}</small></h3><div class="panel">{bar}</div>']
    timeline = graph.timeline
    if timeline is not None:
        top = f"{format_bytes(timeline.totals[timeline.peak])} at the top, {top_of(timeline)}"
        found.append(f"<h3>Memory over the step<small>{escape(top)}</small></h3>")
        found.append(f'<div class="panel">{_timeline(timeline)}</div>{_alive(timeline)}')
    return "\n".join(found)


# By category; they keep their colours from picture to picture.
_COLOURS = {
    "parameters": 0,
    "optimizer": 4,
    "buffers": 7,
    "batch": 7,
    LABELS["reserved"]: 7,
    "outputs": 7,
    LABELS["saved"]: 1,
    "gradients": 2,
    LABELS["arena"]: 3,
    "temporaries": 3,
    "workspaces": 5,
}
_MAX_COLUMNS = 400


def _timeline(timeline: MemoryTimeline) -> str:
    chosen = binned(timeline.totals, _MAX_COLUMNS)
    columns = dict(zip(timeline.categories, zip(*(timeline.live[i] for i in chosen), strict=True), strict=True))
    columns |= {name: (size,) * len(chosen) for name, size in timeline.fixed.items()}
    named = {LABELS.get(name, name): values for name, values in columns.items()}
    totals = timeline.totals
    return area_plot(
        [(name, named[name]) for name in _COLOURS if name in named],
        _COLOURS,
        split=sum(i < timeline.num_forward for i in chosen),
        top=max(range(len(chosen)), key=lambda column: totals[chosen[column]]),
        halves=("forward", "backward"),
    )


def _alive(timeline: MemoryTimeline) -> str:
    if not timeline.alive:
        return ""
    rows = [
        _row(
            f'<td><span class="mono">{escape(record.name)}</span><small class="mono">{escape(record.op)}</small></td>',
            _cell(record.module or "\u2013"),
            f'<td class="keep">{escape(format_shape(record.shape))}</td>',
            _cell(format_bytes(record.num_bytes), "number"),
            _cell(LABELS.get(record.category, record.category)),
        )
        for record in timeline.alive
    ]
    some = f"the largest {len(rows)} of {timeline.num_alive}" if timeline.num_alive > len(rows) else str(len(rows))
    shown = _table(("value and op", "module", "shape", "size", "as"), rows, numbers=(3,))
    return f"<details><summary>Alive at the top<small>{some}</small></summary>{shown}</details>"


def _modules(values: Sequence[ValueRecord]) -> str:
    rows = by_module(values)
    drawn = bars([(module, size, format_bytes(size)) for module, _, size in rows], emphasised="")
    return (
        f"<details open><summary>By module<small>{len(rows)}</small></summary>"
        f'<div class="panel long">{drawn}</div></details>'
    )


def _values(values: Sequence[ValueRecord]) -> str:
    simulated = any(value.peak_change is not None for value in values)
    rows = [
        _row(
            f'<td><span class="mono">{escape(value.name)}</span><small class="mono">{escape(value.op)}</small></td>',
            f"<td>{escape(value.module) or '&ndash;'}<small>{escape(value.source)}</small></td>",
            f'<td class="keep">{escape(format_shape(value.shape))}<small>{escape(value.dtype)}</small></td>',
            _cell(format_bytes(value.num_bytes), "number"),
            f'<td class="number">{_time(value)}<small>{escape(format_flops(value.recompute_flops))}</small></td>',
            *([_cell(signed_bytes(value.peak_change), "number")] if simulated else []),
            _cell(value.reason),
        )
        for value in values
    ]
    header = ["value and op", "module and line", "shape and type", "size", "cost to recompute", "peak then", "reason"]
    if not simulated:
        header.remove("peak then")
    return _table(header, rows, numbers=(3, 4, 5) if simulated else (3, 4))


def _time(value: ValueRecord) -> str:
    return "&ndash;" if value.recompute_s is None else escape(format_seconds(value.recompute_s))


def _stages(graph: GraphReport) -> str:
    parts = [(stage.name, stage.seconds, format_seconds(stage.seconds)) for stage in graph.stages]
    rows = [
        _row(
            _cell(stage.name),
            _cell(format_seconds(stage.seconds), "number"),
            _cell(format_count(stage.num_nodes_before), "number"),
            _cell(format_count(stage.num_nodes_after), "number"),
            _cell(stage.note),
        )
        for stage in graph.stages
    ]
    header = ("stage", "time", "nodes before", "nodes after", "note")
    texts = [_graph_text(f"After {stage.name}", stage.after, stage.num_nodes_after) for stage in graph.stages]
    return (
        f"<h3>Stages<small>{format_seconds(graph.compile_s)}</small></h3>"
        f'<div class="panel">{stacked_bar(parts, title="Compile time by stage")}</div>'
        f"{_table(header, rows, numbers=(1, 2, 3))}{''.join(texts)}"
    )


def _graph_text(title: str, text: str, num_nodes: int | None) -> str:
    if not text:
        return ""
    size = "" if num_nodes is None else f"<small>{format_count(num_nodes)} nodes</small>"
    return f"<details><summary>{escape(title)}{size}</summary><pre>{escape(text)}</pre></details>"


def _table(header: Sequence[str], rows: Iterable[str], *, numbers: Sequence[int] = ()) -> str:
    cells = (
        f'<th class="number">{escape(name)}</th>' if index in numbers else f"<th>{escape(name)}</th>"
        for index, name in enumerate(header)
    )
    return f'<div class="scroll"><table><thead>{_row(*cells)}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(*cells: str) -> str:
    return f"<tr>{''.join(cells)}</tr>\n"


def _cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"
