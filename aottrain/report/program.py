"""One compiled program on the page: its memory, what it saves and computes again with the reasons, and its stages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from aottrain.explain.figures import (
    COLLECTIVE_COLUMNS,
    LABELS,
    binned,
    by_cost,
    by_module,
    by_size,
    collective_rows,
    collectives_text,
    kernel_text,
    memory_rows,
    signed_bytes,
    top_of,
    uncounted,
)
from aottrain.explain.report import GraphReport, MemoryTimeline, StageRecord, ValueRecord
from aottrain.explain.summary import inputs_text
from aottrain.ir.units import exact_bytes, format_bytes, format_count, format_flops, format_seconds, format_shape
from aottrain.report.charts import at_each_width, bars, breakable, size, stacked_bar
from aottrain.report.graph.figure import pictures
from aottrain.report.kernels import render_kernels
from aottrain.report.layers import Layers, area_plot
from aottrain.report.page import Column, folded, heading, joined, long_table, mono, pre, table
from aottrain.report.style import MEMORY

NUM_ROWS = 12  # of a long table, before the rest is folded
MOST_ROWS = 300  # of values, on a page
MOST_CHARACTERS = 600_000  # of the graphs' texts, on a page: one of 48 layers stays below 3 MB

# From the bottom of the picture to its top. Each category is drawn as the same colour everywhere.
_ORDER = ("parameters", "optimizer", "buffers", "batch", "reserved", "outputs", "saved", "gradients", "arena")
_COLOURS = {LABELS.get(name, name): f"m-{name}" for name in (*_ORDER, *MEMORY)}


def render_program(graph: GraphReport, number: int, total: int, *, texts: bool) -> str:
    """Program `number` of `total`. texts: with its graphs, node by node."""
    kind = "forward and backward" if graph.mode == "train" else "forward alone"
    name = "The program" if total == 1 else f"Program {number} of {total}"
    inputs = f"inputs {inputs_text(graph)}; " if total > 1 and inputs_text(graph) else ""
    sizes = ", ".join(f"{part} {format_count(count)} nodes" for part, count in graph.num_nodes.items())
    draws = f"{format_count(graph.num_draws)} random draws per call"
    return joined(
        [
            f'<h2>{name}: {kind}</h2><p class="dim">{escape(f"{inputs}{sizes}; {draws}; {_kernels(graph)}.")}</p>',
            _memory(graph),
            pictures(graph.diagrams, f"program{number}"),
            *(f"<p>{escape(text)}.</p>" for text in _decisions(graph)),
            _decided(graph),
            _collectives(graph),
            _saved(graph),
            _recomputed(graph),
            render_kernels(graph, texts=texts),
            _stages(graph, texts=texts),
            *(_graph_texts(graph) if texts else ()),
        ]
    )


def _decisions(graph: GraphReport) -> list[str]:
    replays = [] if graph.cuda_graphs is None else [f"CUDA graphs: {graph.cuda_graphs}"]
    return [*graph.loss_heads, *([graph.layouts] if graph.layouts else []), *replays]


def _decided(graph: GraphReport) -> str:
    """What was measured to decide, or what stood in for it."""
    rows = [[mono(question), *map(escape, row)] for question, *row in graph.decisions.rows()]
    if not rows:
        return ""
    times = Column("times (longest run above the best)", 40)
    columns = [Column("what", 20), Column("choice", 26), times, Column("from", 14)]
    title = heading("Decided by measuring", f"{graph.decisions}; fingerprint {graph.decisions.fingerprint}")
    return f"{title}{long_table(columns, rows, shown=NUM_ROWS, rest=f'{len(rows) - NUM_ROWS} more')}"


def _collectives(graph: GraphReport) -> str:
    """What it says to other processes, and how much of that it waits for."""
    if not graph.collectives.calls:
        return ""
    columns = [Column(name, number=True) for name in COLLECTIVE_COLUMNS[:-1]] + [Column(COLLECTIVE_COLUMNS[-1])]
    rows = [[*map(escape, row[:-1]), mono(row[-1])] for row in collective_rows(graph.collectives)]
    title = heading("Collectives", collectives_text(graph))
    return f"{title}{long_table(columns, rows, shown=NUM_ROWS, rest=f'{len(rows) - NUM_ROWS} more')}"


def _kernels(graph: GraphReport) -> str:
    beside = ", ".join(f"{count} {_short(name)}" for name, count in graph.library_calls.items())
    return f"kernels: {kernel_text(graph)}" + (f"; beside them {beside}" if beside else "")


def _short(op: str) -> str:
    """As the terminal has it."""
    return op.removeprefix("aten.").removesuffix(".default")


def _memory(graph: GraphReport) -> str:
    rows = memory_rows(graph)
    if not rows:
        return ""
    total = format_bytes(sum(num_bytes for _, num_bytes in rows)) + uncounted(graph)
    bar = stacked_bar(rows, title="Memory at the predicted peak, by category", colours=_COLOURS)
    parts = [heading("Memory at the predicted peak", total), f'<div class="panel">{bar}</div>']
    timeline = graph.timeline
    if timeline is not None:
        top = f"{format_bytes(timeline.totals[timeline.peak])} at the top, {top_of(timeline)}"
        parts.append(heading("Memory over the step", top))
        drawn = at_each_width(lambda width: area_plot(_layers(timeline, width // 3), _COLOURS, width=width))
        parts.append(f'<div class="panel">{drawn}{_colour_keys(timeline)}</div>{_alive(timeline)}')
    return "\n".join(parts)


def _layers(timeline: MemoryTimeline, num_columns: int) -> Layers:
    """The timeline in at most so many columns, each as high as the highest of its instants."""
    chosen = binned(timeline.totals, num_columns)
    columns = dict(zip(timeline.categories, zip(*(timeline.live[i] for i in chosen), strict=True), strict=True))
    columns |= {name: (num_bytes,) * len(chosen) for name, num_bytes in timeline.fixed.items()}
    totals = timeline.totals
    return Layers(
        [(LABELS.get(name, name), columns[name]) for name in _drawn(timeline)],
        split=sum(i < timeline.num_forward for i in chosen),
        top=max(range(len(chosen)), key=lambda column: totals[chosen[column]]),
    )


def _drawn(timeline: MemoryTimeline) -> list[str]:
    """The categories that are not empty throughout, from the bottom to the top."""
    most = dict(zip(timeline.categories, map(max, zip(*timeline.live, strict=True)), strict=True)) | timeline.fixed
    order = list(dict.fromkeys([*_ORDER, *most]))
    return [name for name in order if most.get(name)]


def _colour_keys(timeline: MemoryTimeline) -> str:
    names = [LABELS.get(name, name) for name in _drawn(timeline)]
    keys = (f'<li><span class="key {_COLOURS[name]}"></span>{escape(name)}</li>' for name in names)
    return f'<ul class="legend">{"".join(keys)}</ul>'


def _alive(timeline: MemoryTimeline) -> str:
    if not timeline.alive:
        return ""
    columns = [Column("value and op"), Column("module"), Column("shape"), Column("size", number=True), Column("as")]
    rows = [
        [
            f"{mono(record.name)}<small>{mono(_short(record.op))}</small>",
            breakable(record.module),
            escape(format_shape(record.shape)),
            size(record.num_bytes),
            escape(LABELS.get(record.category, record.category)),
        ]
        for record in timeline.alive
    ]
    extent = f"the largest {len(rows)} of {timeline.num_alive}" if timeline.num_alive > len(rows) else str(len(rows))
    return folded("Alive at the top", table(columns, rows), extent)


_PRICES = (
    '<p class="dim">Cost to recompute: what a step would take longer without the value, by the cost model, and below it'
    " the FLOPs of its own op. Peak then: how the step's peak would change; of the largest values.</p>"
)


def _saved(graph: GraphReport) -> str:
    if not graph.saved:
        return ""
    priced = any(value.recompute_s is not None for value in graph.saved)
    return joined(
        [
            heading("Saved for backward", f"{_values_text(graph.saved)}, {format_bytes(graph.saved_bytes)}"),
            _modules(graph.saved),
            _PRICES if priced else "",
            _values(by_size(graph.saved)),
        ]
    )


def _recomputed(graph: GraphReport) -> str:
    if not graph.recomputed:
        return ""
    note = f"{_values_text(graph.recomputed)}, {format_flops(graph.recompute_flops)}"
    return heading("Recomputed in the backward", note) + _values(by_cost(graph.recomputed))


def _values_text(values: Sequence[ValueRecord]) -> str:
    return f"{len(values)} value{'' if len(values) == 1 else 's'}"


def _modules(values: Sequence[ValueRecord]) -> str:
    rows = [(module, num_bytes) for module, _, num_bytes in by_module(values)]
    first = f'<div class="panel">{bars(rows)}</div>'
    return folded("By module", first, str(len(rows)), open_=len(rows) <= NUM_ROWS + 8)


def _values(values: Sequence[ValueRecord]) -> str:
    simulated = any(value.peak_change is not None for value in values)
    columns = [
        Column("value and op", 16),
        Column("module and line", 20),
        Column("shape and type", 15),
        Column("size", 9, number=True),
        Column("cost to recompute", 11, number=True),
        *([Column("peak then", 9, number=True)] if simulated else []),
        Column("reason", 20 if simulated else 29),
    ]
    rest, unlisted = values[NUM_ROWS:], values[MOST_ROWS:]
    total = format_bytes(sum(value.num_bytes for value in rest))
    rows = [_value(value, simulated) for value in values[:MOST_ROWS]]
    listing = long_table(columns, rows, shown=NUM_ROWS, rest=f"{len(rest)} more, {total} together")
    if not unlisted:
        return listing
    total = format_bytes(sum(value.num_bytes for value in unlisted))
    return f'{listing}<p class="dim">Not listed: {len(unlisted)}, {total} together; report.explain(max_rows=None).</p>'


def _value(value: ValueRecord, simulated: bool) -> list[str]:
    time = "" if value.recompute_s is None else format_seconds(value.recompute_s)
    change = ""
    if value.peak_change is not None:
        change = f'<span title="{exact_bytes(value.peak_change)}">{signed_bytes(value.peak_change)}</span>'
    return [
        f"{mono(value.name)}<small>{mono(_short(value.op))}</small>",
        f"{breakable(value.module)}<small>{breakable(value.source)}</small>",
        f"{escape(format_shape(value.shape))}<small>{escape(value.dtype)}</small>",
        size(value.num_bytes),
        f"{time}<small>{format_flops(value.recompute_flops)}</small>",
        *([change] if simulated else []),
        escape(value.reason),
    ]


def _stages(graph: GraphReport, *, texts: bool) -> str:
    longest = max((stage.seconds for stage in graph.stages), default=0.0) or 1.0
    columns = [
        Column("stage", 22),
        Column("time", 22),
        Column("nodes before", 10, number=True),
        Column("nodes after", 10, number=True),
        Column("note", 36),
    ]
    rows = [
        [
            mono(stage.name),
            f'{format_seconds(stage.seconds)}<div class="meter" style="width:{_share(stage, longest)}%"></div>',
            format_count(stage.num_nodes_before),
            format_count(stage.num_nodes_after),
            escape(stage.note),
        ]
        for stage in graph.stages
    ]
    after = _texts_after(graph) if texts else []
    return joined([heading("Stages", format_seconds(graph.compile_s)), table(columns, rows), *after])


def _texts_after(graph: GraphReport) -> list[str]:
    """The graph after each stage, as far as there is room: the two that run come first, then the latest stage's."""
    room = MOST_CHARACTERS - len(graph.forward_text) - len(graph.backward_text)
    shown, left = list[str](), list[str]()
    for stage in reversed([stage for stage in graph.stages if stage.after]):
        room -= len(stage.after)
        if room >= 0:
            shown.append(_graph_text(f"After {stage.name}", stage.after, stage.num_nodes_after))
        else:
            left.append(stage.name)
    where = ".after of report.graphs[...].stages"
    more = f'<p class="dim">Too long for this page: after {", ".join(map(escape, reversed(left)))}; {where}.</p>'
    return [*reversed(shown), more if left else ""]


def _share(stage: StageRecord, longest: float) -> str:
    return f"{max(100 * stage.seconds / longest, 0.5):.1f}"


def _graph_texts(graph: GraphReport) -> list[str]:
    return [
        _graph_text("Forward graph", graph.forward_text, graph.num_nodes.get("forward")),
        _graph_text("Backward graph", graph.backward_text, graph.num_nodes.get("backward")),
    ]


def _graph_text(title: str, text: str, num_nodes: int | None) -> str:
    note = "" if num_nodes is None else f"{format_count(num_nodes)} nodes"
    if len(text) > MOST_CHARACTERS // 2:
        text, note = text[: MOST_CHARACTERS // 2] + "\n...", f"{note}, cut off: all of it is in the report"
    return folded(title, pre(escape(text)), note) if text else ""
