"""A row for each run: how its step times spread, how much memory it needs, what it saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from aottrain.ir.units import format_bytes
from aottrain.report.charts import breakable
from aottrain.report.page import folded
from aottrain.report.runs.drawing.curves import Key
from aottrain.report.runs.spread import quartiles
from aottrain.report.style import MEMORY, SERIES

NUM_IN_ORDER = 16  # rows up to which all are seen, in the order of the page; of more the best come first
NUM_SHOWN = 12  # of more, before the rest is folded
_WIDTH = 1000
Row = TypeVar("Row")


@dataclass(frozen=True)
class Figures:
    """A row of `spread_rows`: values of one run."""

    key: Key
    values: Sequence[float]
    median: float | None = None
    """That of the rounds, where the values are of several; else it is that of the values."""


@dataclass(frozen=True)
class Bar:
    """A row of `bar_rows`."""

    key: Key
    value: float | None
    mark: float | None = None
    """A second value, drawn as a line across: what was predicted."""
    note: str = ""


@dataclass(frozen=True)
class Parts:
    """A row of `part_rows`."""

    key: Key
    parts: Sequence[tuple[str, float]]


def swatch(key: Key) -> str:
    """Its colour and its dashes."""
    return f'<svg class="swatch" viewBox="0 0 24 8" aria-hidden="true"><path class="{key.classes}" d="M0 4H24"/></svg>'


def spread_rows(rows: Sequence[Figures], write: Callable[[float], str]) -> str:
    """For each row the range of the values from the 2nd to the 98th percentile, the middle half, and the median."""
    rows = _best_first([row for row in rows if row.values], lambda row: _limits(row.values, row.median)[2])
    if not rows:
        return ""
    limits = {row.key.index: _limits(row.values, row.median) for row in rows}
    top = max(high for *_, high in limits.values()) or 1.0
    lines = []
    for row in rows:
        low, first, median, third, high = (_WIDTH * value / top for value in limits[row.key.index])
        caption = ", ".join(
            f"{name} {write(value)}"
            for name, value in zip(("2 %", "25 %", "median", "75 %", "98 %"), limits[row.key.index], strict=True)
        )
        drawn = (
            f'<path class="reach" d="M{low:.1f} 10H{high:.1f}"/>'
            f'<rect class="half" x="{first:.1f}" y="3" width="{max(third - first, 1):.1f}" height="14"/>'
            f'<path class="middle-line" d="M{median:.1f} 0V20"/>'
        )
        figure = write(limits[row.key.index][2])
        lines.append(_row(row.key, drawn, figure, f"{caption}; {len(row.values)} values"))
    return _rows(lines)


def bar_rows(rows: Sequence[Bar], write: Callable[[float], str], *, is_more_better: bool = False) -> str:
    """For each row a bar on one scale from zero, and where there is one a mark across."""
    sign = -1 if is_more_better else 1
    known = [row for row in rows if row.value is not None or row.mark is not None]
    rows = _best_first(known, lambda row: math.inf if row.value is None else sign * row.value)
    if not rows:
        return ""
    top = max(value for row in rows for value in (row.value or 0, row.mark or 0)) or 1.0
    lines = []
    for row in rows:
        drawn = f'<rect class="full" y="4" width="{_WIDTH * (row.value or 0) / top:.1f}" height="12"/>'
        if row.mark is not None:
            at = min(max(_WIDTH * row.mark / top, 2), _WIDTH - 2)
            drawn += f'<path class="middle-line" d="M{at:.1f} 0V20"/>'
        lines.append(_row(row.key, drawn, "-" if row.value is None else write(row.value), row.note))
    return _rows(lines)


def part_rows(rows: Sequence[Parts]) -> str:
    """For each row a bar of parts, in bytes, and one legend: a colour for each of the largest kinds of parts, over all
    rows, and one for the rest."""
    rows = _best_first([row for row in rows if row.parts], lambda row: sum(value for _, value in row.parts))
    if not rows:
        return ""
    colours = dict(zip(_largest(rows, len(MEMORY) - 3), (f"m-{name}" for name in MEMORY), strict=False))
    top = max(sum(value for _, value in row.parts) for row in rows) or 1.0
    lines = []
    for row in rows:
        drawn, left, rest = [], 0.0, 0.0
        sizes: dict[str, float] = {}
        for name, value in row.parts:
            sizes[name] = sizes.get(name, 0) + value
            rest += 0 if name in colours else value
        for name, colour in [*colours.items(), ("others", "m-outputs")]:
            value = rest if name == "others" and name not in colours else sizes.get(name, 0)
            width = _WIDTH * value / top
            title = f"<title>{escape(name)}: {format_bytes(value)}</title>"
            drawn.append(f'<rect class="{colour}" x="{left:.1f}" width="{width:.1f}" height="20">{title}</rect>'
                         if value else "")  # fmt: skip
            left += width
        lines.append(_row(row.key, "".join(drawn), format_bytes(sum(sizes.values())), ""))
    has_rest = any(name not in colours for row in rows for name, _ in row.parts)
    keys = [*colours.items(), *([("others", "m-outputs")] if has_rest else [])]
    legend = "".join(f'<li><span class="key {colour}"></span>{breakable(name)}</li>' for name, colour in keys)
    return f'{_rows(lines)}<ul class="legend">{legend}</ul>'


def _best_first(rows: Sequence[Row], order: Callable[[Row], float]) -> Sequence[Row]:
    return sorted(rows, key=order) if len(rows) > NUM_IN_ORDER else rows


def _largest(rows: Sequence[Parts], most: int) -> list[str]:
    sizes: dict[str, float] = {}
    for row in rows:
        for name, value in row.parts:
            sizes[name] = max(sizes.get(name, 0), value)
    return sorted(sizes, key=lambda name: -sizes[name])[:most]


def _limits(values: Sequence[float], median: float | None) -> tuple[float, float, float, float, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    first, middle, third = quartiles(ordered)
    return ordered[round(0.02 * last)], first, middle if median is None else median, third, ordered[round(0.98 * last)]


def _row(key: Key, drawn: str, figure: str, note: str) -> str:
    title = f' title="{escape(f"{key.name}: {note}", quote=True)}"' if note else ""
    return (
        f'<div class="row" data-run="{key.index}"{title}><span>{swatch(key)}<span>{_named(key)}</span></span>'
        f'<svg class="s{key.look % len(SERIES)}" viewBox="0 0 {_WIDTH} 20" preserveAspectRatio="none" '
        f'aria-hidden="true">{drawn}</svg><b>{escape(figure)}</b></div>'
    )


def _named(key: Key) -> str:
    """A line may end within its words, but not within its numbers."""
    return escape(key.name).replace("_", "_<wbr>")


def _rows(lines: Sequence[str]) -> str:
    shown, rest = (lines, []) if len(lines) <= NUM_IN_ORDER else (lines[:NUM_SHOWN], lines[NUM_SHOWN:])
    more = folded(f"{len(rest)} more", f'<div class="bars spread">{"".join(rest)}</div>') if rest else ""
    return f'<div class="bars spread">{"".join(shown)}</div>{more}'
