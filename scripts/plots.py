"""A recorded table as a picture that stands by itself, as scripts/recorded/compare.svg: engines by step time and peak,
or lines.

It has a ground of its own and follows the scheme of the browser, so that it reads on a light and on a dark page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from aottrain.report.charts import ticks
from aottrain.report.scatter import PlotMark, memory_plot
from aottrain.report.style import DARK, LIGHT, SERIES

WIDTH, TOP = 760, 34
AXES = ("peak memory of a step \u2192", "\u2191 time of a step")
_OURS = "aottrain"
LINES = "lines"
_STYLE = """
text { fill: var(--dim); } text.label, text.axis, text.title { fill: var(--ink); }
text.title { font-weight: 600; font-size: 15px; }
text.label { paint-order: stroke; stroke: var(--card); stroke-width: 3; stroke-linejoin: round; }
.ground { fill: var(--card); stroke: var(--line); } .grid { stroke: var(--line); }
polyline { fill: none; stroke-width: 1.5; opacity: .6; } .whisker { fill: none; stroke-width: 1.5; }
.point { stroke: var(--card); stroke-width: 1; }
"""


def drawn(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """header: first what was measured, as the title. rows: name, `median [fastest, slowest]` in ms, peak in MiB.

    Where the header's second word is LINES, its others name the axes, and a row is a name with `x:y x:y ...`.
    """
    if header[1] == LINES:
        return _framed(header[0], *_lines(header[2:], [(name, points_of(text)) for name, text in rows]))
    marks = [_mark(*row) for row in rows]
    marks.sort(key=lambda mark: (mark.series != _OURS, mark.num_bytes))
    plot = memory_plot(marks, [], axes=AXES, width=WIDTH, from_zero=True)
    match = re.fullmatch(r'<svg [^>]*viewBox="0 0 \d+ (\d+)"[^>]*>(.*)</svg>', plot, re.DOTALL)
    assert match is not None
    return _framed(f"A training step: {header[0]}", int(match[1]), match[2])


def points_of(text: str) -> list[tuple[float, float]]:
    """Of `x:y x:y ...`."""
    return [(float(x), float(y)) for x, _, y in (pair.partition(":") for pair in text.split())]


def _lines(axes: Sequence[str], series: Sequence[tuple[str, list[tuple[float, float]]]]) -> tuple[int, str]:
    """Height and content. A line is thicker by each later one that lies over it, so that all are seen."""
    left, right, bottom, height = 64, WIDTH - 16, 252, 318
    every = [point for _, points in series for point in points]
    xs, ys = ticks([x for x, _ in every], 1.0, 8), ticks([0.0, *(y for _, y in every)], 1.0, 6)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (right - left) * (x - xs[0]) / (xs[-1] - xs[0]),
            bottom - (bottom - 24) * (y - ys[0]) / (ys[-1] - ys[0]),
        )

    parts = []
    for y in ys:
        _, at = place(xs[0], y)
        parts.append(f'<path class="grid" d="M{left} {at:.1f}H{right}"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in xs:
        parts.append(f'<text x="{place(x, ys[0])[0]:.1f}" y="{bottom + 18}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text class="axis" x="{left - 8}" y="14" text-anchor="end">{escape(axes[1])}</text>')
    parts.append(f'<text class="axis" x="{right}" y="{bottom + 36}" text-anchor="end">{escape(axes[0])}</text>')
    legend = float(left)
    for index, (name, points) in enumerate(series):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        width = 1.8 + 2.6 * sum(_covers(other, points, (ys[-1] - ys[0]) / 100) for _, other in series[index + 1 :])
        look = f'class="l{index % len(SERIES)}" style="stroke-width:{width};opacity:1"'
        parts.append(f'<polyline {look} points="{path}"/>')
        at = bottom + 54
        parts.append(f'<polyline {look} points="{legend:.0f},{at - 4} {legend + 18:.0f},{at - 4}"/>')
        parts.append(f'<text class="axis" x="{legend + 24:.0f}" y="{at}">{escape(name)}</text>')
        legend += 44 + 7.2 * len(name)
    return height, "".join(parts)


def _covers(line: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], near: float) -> bool:
    """Whether most points of `other` lie as near as that to those of `line`."""
    at = dict(line)
    close = [abs(at[x] - y) <= near for x, y in other if x in at]
    return sum(close) > 0.8 * len(other)


def _framed(title: str, height: int, content: str) -> str:
    height += TOP
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {_variables(DARK, 1)} }} }}"
    schemes = f"svg {{ {_variables(LIGHT, 0)} }}\n{dark}"
    classes = "".join(f".s{i} {{ fill: var(--s{i}); }} .l{i} {{ stroke: var(--s{i}); }} " for i in range(len(SERIES)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="13" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>\n{schemes}{_STYLE}{classes}\n</style>\n"
        f'<rect class="ground" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
        f'<text class="title" x="16" y="26">{escape(title)}</text>\n'
        f'<g transform="translate(0,{TOP})">{content}</g>\n</svg>\n'
    )


def _mark(name: str, spread: str, peak: str) -> PlotMark:
    middle, low, high = (float(value) / 1e3 for value in re.findall(r"[\d.]+", spread))
    series = name.partition(",")[0]
    return PlotMark(series, name, name, float(peak) * 2**20, middle, "", low, high)


def _variables(scheme: dict[str, str], index: int) -> str:
    names = {name: scheme[name] for name in ("ink", "dim", "line", "card")}
    names |= {f"s{i}": pair[index] for i, pair in enumerate(SERIES)}
    return " ".join(f"--{name}: {colour};" for name, colour in names.items())


if __name__ == "__main__":
    print("A part of another command: python scripts/figures.py --help")
