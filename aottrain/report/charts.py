"""The pictures of the reports, as inline SVG: a stacked bar with its legend, bars, memory against time and over a step.

Shapes carry CSS classes only; the colours are in style.py, so that light and dark need no second drawing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from aottrain.ir.units import format_bytes, format_seconds

NUM_COLOURS = 8
WIDTH = 1000


def stacked_bar(
    parts: Sequence[tuple[str, float, str]], *, title: str, colours: Mapping[str, int] | None = None
) -> str:
    """One bar of (label, value, value as text) parts and a legend. colours: of each label, by number; without them in
    order, and parts beyond the eighth share the last one."""
    total = sum(value for _, value, _ in parts)
    if total <= 0:
        return '<p class="dim">nothing to show</p>'
    rectangles, legend, left = [], [], 0.0
    for index, (label, value, text) in enumerate(parts):
        colour = f"c{min(index if colours is None else colours[label], NUM_COLOURS - 1)}"
        width = WIDTH * value / total
        caption = f"<title>{escape(label)}: {escape(text)}</title>"
        rectangles.append(f'<rect class="{colour}" x="{left:.2f}" width="{width:.2f}" height="28">{caption}</rect>')
        legend.append(f'<li><span class="key {colour}"></span>{escape(label)} <b>{escape(text)}</b></li>')
        left += width
    svg = (
        f'<svg class="bar" viewBox="0 0 {WIDTH} 28" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(rectangles)}</svg>'
    )
    return f'{svg}<ul class="legend">{"".join(legend)}</ul>'


def bars(rows: Sequence[tuple[str, float, str]], *, emphasised: str) -> str:
    """Horizontal bars of (label, value, value as text) on one scale; the row labelled `emphasised` stands out."""
    largest = max((value for _, value, _ in rows), default=0) or 1
    lines = []
    for label, value, text in rows:
        mark = "strong" if label == emphasised else "weak"
        rectangle = f'<rect class="{mark}" width="{WIDTH * value / largest:.2f}" height="10"/>'
        lines.append(
            f'<div class="row {mark}"><span>{escape(label)}</span>'
            f'<svg viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none" aria-hidden="true">{rectangle}</svg>'
            f"<b>{escape(text)}</b></div>"
        )
    return f'<div class="bars">{"".join(lines)}</div>'


@dataclass(frozen=True)
class Mark:
    """A point of `memory_plot`. series: shares a colour and a line with others; remark: "" | "beaten" | "knee"."""

    series: str
    name: str
    label: str
    num_bytes: float
    seconds: float
    remark: str = ""


def memory_plot(marks: Sequence[Mark], line: Sequence[tuple[float, float]], *, axes: tuple[str, str]) -> str:
    """Marks, those of a series joined in their order, and behind them a line of (bytes, seconds). Axes are cut off.

    A label stands where it covers no mark and no other label, as far as there is such a place beside its mark.
    """
    if not marks:
        return '<p class="dim">nothing to show</p>'
    area = _Area(marks, line)
    series = list(dict.fromkeys(mark.series for mark in marks))
    drawn = [area.grid()]
    if line:
        drawn.append(f'<polyline class="predicted" points="{area.path(line)}"/>')
    for index, name in enumerate(series):
        places = [(mark.num_bytes, mark.seconds) for mark in marks if mark.series == name]
        drawn.append(f'<polyline class="l{index % NUM_COLOURS}" points="{area.path(places)}"/>' if places[1:] else "")
    taken = [_box(*area.place(mark.num_bytes, mark.seconds), 0) for mark in marks]
    for mark in marks:
        x, y = area.place(mark.num_bytes, mark.seconds)
        classes = f"c{series.index(mark.series) % NUM_COLOURS} {mark.remark}".strip()
        caption = f"{mark.name}: {format_bytes(mark.num_bytes)}, {format_seconds(mark.seconds)}"
        title = f"<title>{escape(caption)}</title>"
        drawn.append(f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="6">{title}</circle>')
        drawn.append(_label(x, y, mark.label, taken))
    drawn.append(f'<text x="{area.right}" y="{area.height - 8}" text-anchor="end">{escape(axes[0])}</text>')
    drawn.append(f'<text x="{area.left + 6}" y="{area.top + 14}">{escape(axes[1])}</text>')
    name = escape(f"{axes[1]} against {axes[0]}", quote=True)
    keys = [f'<li><span class="key c{i % NUM_COLOURS}"></span>{escape(name)}</li>' for i, name in enumerate(series)]
    svg = f'<svg class="plot" viewBox="0 0 {WIDTH} {area.height}" role="img" aria-label="{name}">{"".join(drawn)}</svg>'
    return f'{svg}<ul class="legend">{"".join(keys)}</ul>'


class _Area:
    """Where bytes and seconds lie in the drawing."""

    left, top, right, bottom, height = 90.0, 20.0, WIDTH - 60.0, 400.0, 450

    def __init__(self, marks: Sequence[Mark], line: Sequence[tuple[float, float]]):
        sizes, times = zip(*((mark.num_bytes, mark.seconds) for mark in marks), *line, strict=True)
        self.sizes = _ticks(sizes, 1024.0 ** math.floor(math.log(max(*sizes, 1), 1024)))
        self.times = _ticks(times, 1.0)

    def place(self, size: float, seconds: float) -> tuple[float, float]:
        along = (size - self.sizes[0]) / (self.sizes[-1] - self.sizes[0])
        up = (seconds - self.times[0]) / (self.times[-1] - self.times[0])
        return self.left + (self.right - self.left) * along, self.bottom - (self.bottom - self.top) * up

    def path(self, places: Sequence[tuple[float, float]]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*self.place(*at)) for at in places)

    def grid(self) -> str:
        drawn = []
        for tick in self.sizes:
            x, _ = self.place(tick, self.times[0])
            drawn.append(f'<line class="grid" x1="{x:.1f}" y1="{self.top}" x2="{x:.1f}" y2="{self.bottom}"/>')
            drawn.append(f'<text x="{x:.1f}" y="{self.bottom + 20}" text-anchor="middle">{format_bytes(tick)}</text>')
        for tick in self.times:
            _, y = self.place(self.sizes[0], tick)
            drawn.append(f'<line class="grid" x1="{self.left}" y1="{y:.1f}" x2="{self.right}" y2="{y:.1f}"/>')
            drawn.append(f'<text x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end">{format_seconds(tick)}</text>')
        return "".join(drawn)


Box = tuple[float, float, float, float]


def _box(x: float, y: float, width: float) -> Box:
    """Left, top, right, bottom: of a mark in the middle (width 0), or of a text whose line begins there."""
    return (x - 6, y - 6, x + 6, y + 6) if width == 0 else (x, y - 11, x + width, y + 3)


def _label(x: float, y: float, text: str, taken: list[Box]) -> str:
    """The text beside the mark at (x, y); its box is added to those taken."""
    width = 7.0 * len(text)  # of the font, on the average
    places = [(dx, dy) for dy in (-8, 16, 4, -22, 30) for dx in (8, -8 - width)]

    def overlaps(box: Box) -> int:
        return sum(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken)

    boxes = [_box(x + dx, y + dy, width) for dx, dy in places]
    best = min(boxes, key=overlaps)  # the first of equals
    taken.append(best)
    return f'<text class="label" x="{best[0]:.1f}" y="{best[3] - 3:.1f}">{escape(text)}</text>'


def area_plot(
    layers: Sequence[tuple[str, Sequence[float]]],
    colours: Mapping[str, int],
    *,
    split: int,
    top: int,
    halves: tuple[str, str],
) -> str:
    """Bytes stacked by layer (label, one value for each column), the first at the bottom. split: the column at which
    the second of the two `halves` begins; top: the column that is marked."""
    num_columns = len(layers[0][1]) if layers else 0
    if not num_columns:
        return '<p class="dim">nothing to show</p>'
    left, high, right, bottom, height = 90.0, 24.0, WIDTH - 10.0, 280.0, 310
    sums = [sum(column) for column in zip(*(values for _, values in layers), strict=True)]
    ticks = _ticks([0, max(*sums, 1)], 1024.0 ** math.floor(math.log(max(*sums, 1), 1024)))
    width = (right - left) / num_columns

    def up(size: float) -> float:
        return bottom - (bottom - high) * size / ticks[-1]

    drawn = []
    for tick in ticks:
        drawn.append(f'<line class="grid" x1="{left}" y1="{up(tick):.1f}" x2="{right}" y2="{up(tick):.1f}"/>')
        drawn.append(f'<text x="{left - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{format_bytes(tick)}</text>')
    below = [0.0] * num_columns
    for label, values in layers:
        above = [a + b for a, b in zip(below, values, strict=True)]
        if any(values):
            edges = [*_steps(above, left, width, up), *reversed(_steps(below, left, width, up))]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in edges)
            shape = f'<polygon class="c{colours[label]}" points="{points}">'
            drawn.append(f"{shape}<title>{escape(label)}</title></polygon>")
        below = above
    for column, label in ((0, halves[0]), (split, halves[1])):
        x = left + width * column
        drawn.append(f'<line class="mark" x1="{x:.1f}" y1="{high}" x2="{x:.1f}" y2="{bottom}"/>')
        drawn.append(f'<text x="{x + 4:.1f}" y="{bottom + 18}">{escape(label)}</text>')
    x, y = left + width * (top + 0.5), up(sums[top])
    anchor = "end" if top > num_columns / 2 else "start"
    drawn.append(f'<circle class="knee" cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none"/>')
    text = format_bytes(sums[top])
    drawn.append(f'<text class="label" x="{x:.1f}" y="{y - 9:.1f}" text-anchor="{anchor}">{text}</text>')
    name = f"Bytes alive over the step, {text} at the top"
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">{"".join(drawn)}</svg>'


def _steps(
    values: Sequence[float], left: float, width: float, up: Callable[[float], float]
) -> list[tuple[float, float]]:
    return [(left + width * (i + side), up(value)) for i, value in enumerate(values) for side in (0, 1)]


def _ticks(values: Sequence[float], unit: float) -> list[float]:
    """Around all `values`, in at most nine steps that are round numbers of `unit`."""
    low, high = min(values) / unit, max(values) / unit
    width = max(high - low, 0.1 * high) or 1.0
    power = 10.0 ** math.floor(math.log10(width))
    step = next(power * part for part in (0.2, 0.5, 1.0, 2.0) if width / (power * part) <= 8)
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    return [unit * step * i for i in range(first, last + 1)]
