"""Where the time of a step goes, of a run that was profiled: operators and generated kernels, the longest first."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from aottrain.ir.settings.files import values_of
from aottrain.ir.units import format_percent, format_seconds
from aottrain.report.charts import breakable, size
from aottrain.report.page import Column, heading, joined, mono, table
from aottrain.report.runs.reading import number

FILE = "profile.json"


def render_times(folder: Path) -> str:
    """Nothing where there is no such file, or it holds something else."""
    try:
        told = values_of(folder / FILE)
    except (OSError, ValueError):
        return ""
    rows = told.get("rows") if isinstance(told, Mapping) else None
    total = (number(told.get("seconds")) if rows else None) or 0.0
    kept = [row for row in rows if isinstance(row, Mapping) and number(row.get("seconds"))] if total > 0 else []
    if not kept:
        return ""
    rate = number(told.get("bytes_per_s"))
    columns = [
        Column("operator or kernel", 40),
        Column("calls a step", 10, number=True),
        Column("time of a step", 14, number=True),
        Column("of all", 10, number=True),
        Column("moves in a call", 12, number=True),
        Column("bytes a second", 14, number=True),
    ]
    note = f"{format_seconds(total)} a step, under the profiler, which takes time itself"
    left = number(told.get("left_out"))
    more = f"; {left:,.0f} more are in trace.json" if left else ""
    meaning = f"Each without what it calls{more}."
    if rate:
        meaning += f" Shares are of the {rate / 2**30:.3g} GiB/s that this machine's memory was measured at; more than"
        meaning += " all of it comes from caches."
    elif any(number(row.get("bytes")) for row in kept):
        meaning += " There are no shares of the memory's bandwidth, for it was not measured for this run."
    return joined(
        [
            heading("Where time goes", note),
            f'<p class="dim">{escape(meaning)}</p>',
            table(columns, [_cells(row, total, rate) for row in kept]),
        ]
    )


def _cells(row: Mapping[str, Any], total: float, rate: float | None) -> list[str]:
    seconds, calls, moved = (number(row.get(name)) or 0.0 for name in ("seconds", "calls", "bytes"))
    lines = row.get("lines")
    words = [str(row.get("computes") or ""), ", ".join(map(str, lines)) if isinstance(lines, list) else ""]
    what = "; ".join(filter(None, words))
    where = f"<small>{breakable(what)}</small>" if what else ""
    speed = moved * calls / seconds if moved else 0.0
    share = f"<small>{format_percent(speed / rate)} of memory's</small>" if speed and rate else ""
    return [
        f"{mono(str(row.get('name')))}{where}",
        f"{calls:,.3g}",
        escape(format_seconds(seconds)),
        format_percent(seconds / total),
        size(int(moved)) if moved else "",
        f"{speed / 2**30:.3g} GiB/s{share}" if speed else "",
    ]
