"""The pictures of the reports, as inline SVG: a stacked bar with its legend, bars, memory against time and over a step.

Shapes carry CSS classes only; the colours are in style.py, so that light and dark need no second drawing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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


def memory_plot(
    points: Sequence[tuple[str, float, float, str]], line: Sequence[tuple[float, float]], *, axes: tuple[str, str]
) -> str:
    """Points (label, bytes, seconds, CSS classes), and behind them a line of (bytes, seconds). Axes are cut off."""
    if not points:
        return '<p class="dim">nothing to show</p>'
    left, top, right, bottom, height = 90.0, 20.0, WIDTH - 120.0, 400.0, 450
    sizes, times = zip(*(row[1:3] for row in points), *line, strict=True)
    size_ticks = _ticks(sizes, 1024.0 ** math.floor(math.log(max(*sizes, 1), 1024)))
    time_ticks = _ticks(times, 1.0)

    def place(size: float, seconds: float) -> tuple[float, float]:
        along = (size - size_ticks[0]) / (size_ticks[-1] - size_ticks[0])
        up = (seconds - time_ticks[0]) / (time_ticks[-1] - time_ticks[0])
        return left + (right - left) * along, bottom - (bottom - top) * up

    drawn = []
    for tick in size_ticks:
        x, _ = place(tick, 0)
        drawn.append(f'<line class="grid" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>')
        drawn.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{format_bytes(tick)}</text>')
    for tick in time_ticks:
        _, y = place(0, tick)
        drawn.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{format_seconds(tick)}</text>')
    path = " ".join("{:.1f},{:.1f}".format(*place(*at)) for at in line)
    drawn.append(f'<polyline points="{path}"/>' if line else "")
    for label, size, seconds, classes in points:
        x, y = place(size, seconds)
        caption = f"<title>{escape(label)}: {format_bytes(size)}, {format_seconds(seconds)}</title>"
        drawn.append(f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="6">{caption}</circle>')
        drawn.append(f'<text class="label" x="{x + 8:.1f}" y="{y - 8:.1f}">{escape(label)}</text>')
    drawn.append(f'<text x="{right}" y="{height - 8}" text-anchor="end">{escape(axes[0])}</text>')
    drawn.append(f'<text x="{left + 6}" y="{top + 14}">{escape(axes[1])}</text>')
    name = escape(f"{axes[1]} against {axes[0]}", quote=True)
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">{"".join(drawn)}</svg>'


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
