"""The table of all runs, which sorts and filters, with links to what each has left."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

from aottrain.ir.units import format_bytes, format_count, format_seconds
from aottrain.metrics.sinks import OWN
from aottrain.report.charts import breakable
from aottrain.report.page import heading
from aottrain.report.runs.drawing.curves import Key
from aottrain.report.runs.folders import Collection
from aottrain.report.runs.reading import REPORT, Run, own_names
from aottrain.report.runs.rows import swatch
from aottrain.report.runs.settings import first_keys, short
from aottrain.report.runs.spread import time_ratio
from aottrain.report.runs.verdicts import last, reference

RUN_PAGE = "run.html"
_NUM_SETTINGS = 5
_IF_DIFFERENT = ("ended", "steps")  # columns that are left out where they say the same of all


@dataclass(frozen=True)
class _Cell:
    shown: str = ""
    """HTML."""
    value: float | None = None
    """What it is sorted by; None: by its text."""


_FIGURES = (
    ("steps", "steps", format_count),
    ("loss", "last_loss", lambda value: f"{value:.4f}"),
    ("held-out", "val_loss", lambda value: f"{value:.4f}"),
    ("step", "step_ms_median", lambda value: format_seconds(value / 1e3)),
    ("tokens/s", "tokens_per_s", format_count),
    ("samples/s", "samples_per_s", format_count),
    ("peak", "peak_bytes", format_bytes),
    ("predicted", "predicted_peak_bytes", format_bytes),
    ("saved", "saved_bytes", format_bytes),
    ("compile", "compile_s", format_seconds),
    ("loss error", "max_loss_error", lambda value: f"{value:.1e}"),
)


def runs_table(found: Collection, keys: Sequence[Key], differing: Mapping[str, Sequence[str]]) -> str:
    """A row for each run; columns that are empty throughout are left out."""
    runs = found.runs
    columns: list[tuple[str, bool, list[_Cell]]] = [
        ("run", False, [_Cell(swatch(key) + _linked(run, found)) for key, run in zip(keys, runs, strict=True)]),
        ("ended", False, [_Cell(escape(run.text("verdict") or run.status)) for run in runs]),
    ]
    shown = first_keys(list(differing), _NUM_SETTINGS)
    columns += [
        (name, False, [_Cell(escape(value)) for value in differing[key]])
        for key, name in zip(shown, short(shown), strict=True)
    ]
    for name, key, write in _FIGURES:
        values = [run.loss if key == "last_loss" else run.number(key) for run in runs]
        if key == "compile_s":
            values = [value or None for value in values]  # eager's 0 s is no compile time
        columns.append((name, True, _cells(values, write)))
        if key == "val_loss":
            for own in own_names(runs):
                values = [last(run.metrics.get(own)) for run in runs]
                columns.append((own.removeprefix(OWN), True, _cells(values, "{:.4g}".format)))
        if key == "step_ms_median":
            columns.append(("speed", True, _speeds(runs)))
    has_tokens = any(run.number("tokens_per_s") for run in runs)
    kept = [
        column
        for column in columns
        if any(cell.shown for cell in column[2])
        and not (has_tokens and column[0] == "samples/s")
        and not (column[0] in _IF_DIFFERENT and len(runs) > 1 and len({cell.shown for cell in column[2]}) == 1)
    ]
    heads = "".join(
        f'<th scope="col"{" class=number" if is_number else ""}><button type="button">{breakable(name)}</button></th>'
        for name, is_number, _ in kept
    )
    rows = "".join(
        f'<tr data-run="{i}">{"".join(_td(name, is_number, cells[i]) for name, is_number, cells in kept)}</tr>\n'
        for i in range(len(runs))
    )
    note = f"speed: relative to {reference(runs).name}"
    return (
        f"{heading('All runs', note)}{_tools([name for name, *_ in kept], len(runs))}"
        f'<div class="table runs" role="region" aria-label="all runs" tabindex="0"><table class="sortable">'
        f"<thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div>"
    )


def _cells(values: Sequence[float | None], write: Callable[[float], str]) -> list[_Cell]:
    return [_Cell() if value is None else _Cell(escape(write(value)), value) for value in values]


def _tools(names: Sequence[str], count: int) -> str:
    options = "".join(
        f'<option value="{i} {way}">{escape(name)}{word}</option>'
        for i, name in enumerate(names)
        for way, word in (("up", ", rising"), ("down", ", falling"))
    )
    return (
        '<div class="tools"><label>Filter <input type="search" data-filter="1" placeholder="words of a row" '
        'autocomplete="off"></label>'
        f'<label>Sort by <select data-sort="1"><option value="">as made</option>{options}</select></label>'
        f'<span class="dim" data-count="1" role="status">{count} of {count}</span></div>'
    )


def _speeds(runs: Sequence[Run]) -> list[_Cell]:
    base = reference(runs)
    cells = []
    for run in runs:
        ratio = time_ratio(base.rounds, run.rounds)
        level = " level" if ratio and run is not base and ratio.verdict == "level" else ""
        cells.append(_Cell() if ratio is None else _Cell(escape(f"{ratio}{level}" if run is not base else "1.00x"),
                                                         ratio.median))  # fmt: skip
    return cells


def _td(name: str, is_number: bool, cell: _Cell) -> str:
    classes = " ".join(filter(None, ["number" if is_number else "", "" if cell.shown else "empty"]))
    mark = f' class="{classes}"' if classes else ""
    value = "" if cell.value is None else f' data-v="{cell.value!r}"'
    return f'<td data-label="{escape(name, quote=True)}"{mark}{value}><div>{cell.shown}</div></td>'


def _linked(run: Run, found: Collection) -> str:
    """Its name, which leads to its own page, and its compile report, where it has one."""
    name = escape(run.name)
    if not found.has_links:
        return name
    pages = [run.folder / RUN_PAGE, *sorted(run.folder.glob(f"*/{RUN_PAGE}"))]
    reports = [run.folder / REPORT, *sorted(run.folder.glob(f"*/{REPORT}"))]
    own = next((path for path in pages if path.is_file()), None)
    report = next((path for path in reports if path.is_file()), None)
    name = f'<a href="{link(own, found)}">{name}</a>' if own else name
    return name + (f'<small><a href="{link(report, found)}">compile report</a></small>' if report else "")


def link(path: os.PathLike[str], found: Collection) -> str:
    """From the page to a file, which lies below its folder."""
    relative = os.path.relpath(path, found.page.parent)
    return escape(quote(relative.replace(os.sep, "/"), safe="/.-_"), quote=True)
