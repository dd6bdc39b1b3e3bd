"""The simple pictures of the reports: a stacked bar with its legend, bars; and what the plots share.

Shapes carry CSS classes only; the colours are in style.py, so that light and dark need no second drawing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape

from aottrain.ir.units import exact_bytes, format_bytes

NOTHING = '<p class="dim">nothing to show</p>'
WIDTH = 1000
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

# A plot is drawn once for each of these widths; the page shows the one that fits, so that text keeps its size.
WIDTHS = {"narrow": 340, "middle": 640, "wide": 1060}


def at_each_width(draw: Callable[[int], str]) -> str:
    """`draw(width)` for a phone, a small window and a large one, of which one is seen."""
    drawn = (f'<div class="{name}">{draw(width)}</div>' for name, width in WIDTHS.items())
    return f'<div class="chart">{"".join(drawn)}</div>'


def stacked_bar(parts: Sequence[tuple[str, int]], *, title: str, colours: Mapping[str, str]) -> str:
    """One bar of (label, bytes) parts and a legend. colours: the CSS class of each label."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return NOTHING
    rectangles, legend, left = [], [], 0.0
    for label, value in parts:
        colour = colours[label]
        width = WIDTH * value / total
        caption = f"<title>{escape(label)}: {format_bytes(value)}</title>"
        rectangles.append(f'<rect class="{colour}" x="{left:.2f}" width="{width:.2f}" height="28">{caption}</rect>')
        legend.append(f'<li><span class="key {colour}"></span>{escape(label)} <b>{size(value)}</b></li>')
        left += width
    svg = (
        f'<svg class="bar" viewBox="0 0 {WIDTH} 28" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(rectangles)}</svg>'
    )
    return f'{svg}<ul class="legend">{"".join(legend)}</ul>'


def bars(rows: Sequence[tuple[str, int]], *, emphasised: str = "") -> str:
    """Horizontal bars of (label, bytes) on one scale; the row labelled `emphasised` stands out."""
    largest = max((value for _, value in rows), default=0) or 1
    lines = []
    for label, value in rows:
        mark = "strong" if label == emphasised else "weak"
        rectangle = f'<rect class="{mark}" width="{WIDTH * value / largest:.2f}" height="10"/>'
        lines.append(
            f'<div class="row {mark}"><span>{breakable(label)}</span>'
            f'<svg viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none" aria-hidden="true">{rectangle}</svg>'
            f"<b>{size(value)}</b></div>"
        )
    return f'<div class="bars">{"".join(lines)}</div>'


def size(num_bytes: int) -> str:
    """Bytes in three digits; every digit is in the title."""
    return f'<span title="{exact_bytes(num_bytes)}">{format_bytes(num_bytes)}</span>'


def breakable(text: str) -> str:
    """A path of names, escaped, in which a line may end after a dot or an underscore, but not within `file.py`."""
    return re.sub(r"\.(?!pyi?\b)|_", lambda found: f"{found[0]}<wbr>", escape(text))


def ticks(values: Sequence[float], unit: float, most: int) -> list[float]:
    """Around all `values`, in about `most` steps that are round numbers of `unit`."""
    low, high = min(values) / unit, max(values) / unit
    width = max(high - low, 0.1 * high) or 1.0
    power = 10.0 ** math.floor(math.log10(width))
    step = next(power * part for part in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if width / (power * part) <= most)
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    return [unit * step * i for i in range(first, last + 1)]


def byte_ticks(values: Sequence[float], most: int) -> dict[float, str]:
    """The ticks of an axis of bytes, each with its text: all in one unit, 1000 KiB beside 800 KiB and not 0.98 MiB."""
    unit = byte_unit(values)
    return {tick: byte_text(tick, unit) for tick in ticks(values, unit, most)}


def byte_text(num_bytes: float, unit: float) -> str:
    """In this unit, which is a power of 1024."""
    name = _BYTE_UNITS[round(math.log(unit, 1024))]
    return f"{num_bytes / unit:.4g} {name}" if num_bytes else "0"


def byte_unit(values: Sequence[float]) -> float:
    """Of KiB, MiB and so on that in which the largest value is written."""
    return 1024.0 ** min(math.floor(math.log(max(*values, 1), 1024)), len(_BYTE_UNITS) - 1)
