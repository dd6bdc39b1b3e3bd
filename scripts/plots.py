"""A recorded table of engines, step times and peaks as a picture that stands by itself: scripts/recorded/compare.svg.

It has a ground of its own and follows the scheme of the browser, so that it reads on a light and on a dark page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from aottrain.report.scatter import PlotMark, memory_plot
from aottrain.report.style import DARK, LIGHT, SERIES

WIDTH, TOP = 760, 34
AXES = ("peak memory of a step \u2192", "\u2191 time of a step")
_OURS = "aottrain"
_STYLE = """
text { fill: var(--dim); } text.label, text.axis, text.title { fill: var(--ink); }
text.title { font-weight: 600; font-size: 15px; }
text.label { paint-order: stroke; stroke: var(--card); stroke-width: 3; stroke-linejoin: round; }
.ground { fill: var(--card); stroke: var(--line); } .grid { stroke: var(--line); }
polyline { fill: none; stroke-width: 1.5; opacity: .6; } .whisker { fill: none; stroke-width: 1.5; }
.point { stroke: var(--card); stroke-width: 1; }
"""


def drawn(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """header: first what was measured, as the title. rows: name, `median [fastest, slowest]` in ms, peak in MiB."""
    marks = [_mark(*row) for row in rows]
    marks.sort(key=lambda mark: (mark.series != _OURS, mark.num_bytes))
    plot = memory_plot(marks, [], axes=AXES, width=WIDTH, from_zero=True)
    match = re.fullmatch(r'<svg [^>]*viewBox="0 0 \d+ (\d+)"[^>]*>(.*)</svg>', plot, re.DOTALL)
    assert match is not None
    height = int(match[1]) + TOP
    title = f"A training step: {header[0]}"
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {_variables(DARK, 1)} }} }}"
    schemes = f"svg {{ {_variables(LIGHT, 0)} }}\n{dark}"
    classes = "".join(f".s{i} {{ fill: var(--s{i}); }} .l{i} {{ stroke: var(--s{i}); }} " for i in range(len(SERIES)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="13" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>\n{schemes}{_STYLE}{classes}\n</style>\n"
        f'<rect class="ground" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
        f'<text class="title" x="16" y="26">{escape(title)}</text>\n'
        f'<g transform="translate(0,{TOP})">{match[2]}</g>\n</svg>\n'
    )


def _mark(name: str, spread: str, peak: str) -> PlotMark:
    middle, low, high = (float(value) / 1e3 for value in re.findall(r"[\d.]+", spread))
    series = name.partition(",")[0]
    return PlotMark(series, name, name, float(peak) * 2**20, middle, "", low, high)


def _variables(scheme: dict[str, str], index: int) -> str:
    names = {name: scheme[name] for name in ("ink", "dim", "line", "card")}
    names |= {f"s{i}": pair[index] for i, pair in enumerate(SERIES)}
    return " ".join(f"--{name}: {colour};" for name, colour in names.items())
