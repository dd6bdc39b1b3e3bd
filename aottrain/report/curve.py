"""The page about memory against speed: the plot, how to read it, the table, the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from aottrain.report.charts import at_each_width
from aottrain.report.page import Column, heading, page, table
from aottrain.report.runs.drawing.look import STYLE
from aottrain.report.scatter import Place, PlotMark, memory_legend, memory_plot

NONE = "-"  # of a cell of the rows, which are a terminal's, too
AXES = ("peak memory of a step \u2192", "\u2191 time of a step")
_READING = (
    "To the left is less memory, further down is faster; an axis need not begin at zero. A mark is the median of the "
    "rounds, its whisker reaches from the fastest to the slowest round; with an arrow it goes on beyond the plot. Pale "
    "marks are dominated, the ringed one is the knee. Dotted: what the compiler predicts for every plan that a budget "
    "could choose, from the measured step of the roomiest one on."
)


def render_curve(
    subtitles: Sequence[str],
    marks: Sequence[PlotMark],
    line: Sequence[Place],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    verdict: str = "",
) -> str:
    """The page as text. subtitles: under the title. verdict: what it comes to, as HTML. line: the predicted curve, as
    (bytes, seconds). The first column of the rows is text, as is the last."""
    columns = [Column(name, number=0 < i < len(header) - 1) for i, name in enumerate(header)]
    drawn = at_each_width(lambda width: memory_plot(marks, line, axes=AXES, width=width))
    body = [
        "<h1>Memory against speed</h1>",
        *(f'<p class="dim">{escape(subtitle)}</p>' for subtitle in subtitles),
        verdict,
        f'<div class="panel">{drawn}{memory_legend(marks)}</div>',
        f'<p class="dim">{escape(_READING)}</p>',
        heading("All runs"),
        table(columns, [["" if text == NONE else escape(text) for text in row] for row in rows]),
        *(f"<p>{escape(note)}</p>" for note in notes),
    ]
    return page("memory against speed", body, style=STYLE)
