"""The page of several runs: verdict, losses over each other, times, memory, what differs, a table of all."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape

from aottrain.ir.units import format_bytes, format_count, format_seconds
from aottrain.metrics.sinks import OWN
from aottrain.report.charts import breakable
from aottrain.report.page import Column, folded, heading, joined, page, table
from aottrain.report.runs.drawing.budgets import budget_plot
from aottrain.report.runs.drawing.curves import NUM_LOOKS, Axes, Curve, Key, line_plot
from aottrain.report.runs.drawing.look import STYLE
from aottrain.report.runs.drawing.runs_table import runs_table
from aottrain.report.runs.drawing.script import SCRIPT
from aottrain.report.runs.folders import Collection
from aottrain.report.runs.reading import HELD_OUT, LOSS, STEP_MS, Points, Run, own_names
from aottrain.report.runs.rows import Bar, Figures, Parts, bar_rows, part_rows, spread_rows, swatch
from aottrain.report.runs.settings import differences
from aottrain.report.runs.verdicts import continued, spread_note, verdicts
from aottrain.report.style import SERIES

_NUM_NAMED = 8  # runs that are named beside a value of a setting
_TITLES = {"comparison": "Engines compared", "sweep": "Sweep"}


def render_overview(found: Collection, *, again_s: int = 0) -> str:
    """The page as text. again_s: as of `page`."""
    runs, differing = found.runs, differences(found.runs)
    title = _TITLES.get(found.kind, "Runs compared")
    keys, coloured_by = looks(runs, differing)
    body = [
        _header(title, found),
        verdict_section(found, differing),
        _problems(found),
        _legend(keys, coloured_by),
        _losses(found, keys),
        f'<div class="facts">{_times(runs, keys)}{_memory(runs, keys)}</div>',
        budget_plot(runs, differing),
        _differences(runs, differing),
        runs_table(found, keys, differing),
    ]
    return page(title.lower(), body, script=SCRIPT, style=STYLE, again_s=again_s)


def _header(title: str, found: Collection) -> str:
    runs = found.runs
    count = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
    words = {"recipe": [], "device": [], "precision": [], "machine": []}
    for run in runs:
        for name, values in words.items():
            values.append(run.text(name))
    told = ["; ".join(dict.fromkeys(filter(None, values))) for values in words.values()]
    lines = [" · ".join(filter(None, [count, *told[:3]])), told[3]]
    shown = "".join(f'<p class="dim">{escape(line)}</p>' for line in lines if line)
    return f"<h1>{escape(title)}</h1>{shown}"


def verdict_section(found: Collection, differing: Mapping[str, Sequence[str]]) -> str:
    """What a person looks for first: the sentences, and the command that made the runs."""
    told = verdicts(found.runs, differing, by_task=found.kind == "comparison")
    lines = [f"<p>{escape(text)}</p>" for text in told] or ["<p>There is nothing to compare yet.</p>"]
    note = spread_note(found.runs)
    lines += [f"<p><small>{escape(note)}</small></p>"] if note else []
    if any(run.engine == "aot" for run in found.runs) and any(run.engine != "aot" for run in found.runs):
        lines.append("<p><small>aot: compiled by aottrain.</small></p>")
    if went_on := continued(found.runs):
        lines.append(f"<p><small>{escape(' '.join(went_on))}</small></p>")
    made = f"<p><small>Made by <code>{escape(found.command)}</code></small></p>" if found.command else ""
    return f'<section class="verdict" aria-label="verdict">{"".join(lines)}{made}</section>'


def _problems(found: Collection) -> str:
    """What failed, and what could not be read: a line each."""
    lines = [*found.problems]
    for run in found.runs:
        lines += [f"{run.name}: {problem}" for problem in run.problems]
        lines += [f"{run.name}: {run.status}: {run.text('error')}"] if run.text("error") else []
        fallbacks = run.number("fallbacks")
        lines += [f"{run.name}: {format_count(fallbacks)} calls ran eagerly"] if fallbacks else []
    if not lines:
        return ""
    shown = "".join(f'<li class="problem">{escape(line)}</li>' for line in lines)
    count = f"{len(lines)} thing{'' if len(lines) == 1 else 's'} to know"
    return folded(count, f'<ul class="values">{shown}</ul>', open_=len(lines) <= 12)


def looks(runs: Sequence[Run], differing: Mapping[str, Sequence[str]]) -> tuple[list[Key], dict[str, int]]:
    """A key for each run. Where there are too many to look different each, runs have the colour of their value of a
    setting, if one has few values: then also {setting=value: colour}."""
    if len(runs) <= NUM_LOOKS:
        return [Key(i, run.name, i) for i, run in enumerate(runs)], {}
    few = [key for key, values in differing.items() if 2 <= len(set(values)) <= len(SERIES)]
    chosen = max(few, key=lambda key: (key != "seed", len(set(differing[key]))), default=None)
    if chosen is None:
        return [Key(i, run.name, 0) for i, run in enumerate(runs)], {}
    values = list(dict.fromkeys(differing[chosen]))
    found = [Key(i, run.name, values.index(differing[chosen][i])) for i, run in enumerate(runs)]
    return found, {f"{chosen}={value}": i for i, value in enumerate(values)}


def _legend(keys: Sequence[Key], coloured_by: Mapping[str, int]) -> str:
    """A button for each run, that shows and hides it everywhere; of many runs a filter."""
    if len(keys) > NUM_LOOKS:
        named = "".join(f"<li>{swatch(Key(0, name, i))}{escape(name)}</li>" for name, i in coloured_by.items())
        return (
            f'<p class="dim">{len(keys)} runs: a filter shows some of them, in all pictures and in the table; a '
            f'picture names the curve under the pointer.</p>{_filter()}<ul class="legend">{named}</ul>'
        )
    buttons = "".join(
        f'<li><button type="button" aria-pressed="true" data-run="{key.index}">{swatch(key)}{escape(key.name)}'
        "</button></li>"
        for key in keys
    )
    return f'<ul class="legend curves" aria-label="runs that are shown">{buttons}</ul>'


def _filter() -> str:
    return (
        '<div class="tools"><label>Filter <input type="search" data-filter="1" placeholder="words of a row" '
        'autocomplete="off"></label><span class="dim" data-count="1" role="status"></span></div>'
    )


def _losses(found: Collection, keys: Sequence[Key]) -> str:
    runs = list(zip(keys, found.runs, strict=True))
    by_step = [Curve(key, run.metrics[LOSS]) for key, run in runs if run.metrics.get(LOSS)]
    by_time = [Curve(key, points) for key, run in runs if (points := timed(run))]
    held_out = [
        Curve(key, points, "points" if len(points) == 1 else "")
        for key, run in runs
        if (points := run.metrics.get(HELD_OUT))
    ]
    dropout = "dropout off" if found.kind == "comparison" else ""
    evaluated = any(len(curve.points) > 1 for curve in held_out)
    pace = "every step at its engine's median" if found.kind == "comparison" else "of the steps alone"
    plots = [
        line_plot(by_step, Axes("Loss by step", "step", is_layered=True, note=dropout)),
        line_plot(by_time, Axes("Loss by time", "time", "seconds", note=f"{pace}, without compiling")),
        line_plot(held_out, Axes("Held-out loss by step", "step", is_layered=True)) if evaluated else "",
    ]
    for name in own_names(found.runs):
        of_runs = [(key, run.metrics[name]) for key, run in runs if run.metrics.get(name)]
        curves = [Curve(key, points, "points" if len(points) == 1 else "") for key, points in of_runs]
        plots.append(line_plot(curves, Axes(f"Held-out {name.removeprefix(OWN)} by step", "step")))
    panels = "".join(f'<div class="panel">{plot}</div>' for plot in plots if plot)
    return f'{heading("Losses")}<div class="plots">{panels}</div>' if panels else ""


def timed(run: Run) -> Points:
    """(seconds, loss): where a step was not timed, the median stands for it; () where none was."""
    times, losses = dict(run.metrics.get(STEP_MS, ())), run.metrics.get(LOSS, ())
    known = [time for time in times.values() if math.isfinite(time)]
    if not known or not losses:
        return ()
    median = statistics.median(known)
    ends = itertools.accumulate(times.get(step, median) / 1e3 for step, _ in losses)
    return [(end, loss) for end, (_, loss) in zip(ends, losses, strict=True)]


def _times(runs: Sequence[Run], keys: Sequence[Key]) -> str:
    keyed = list(zip(keys, runs, strict=True))
    spread = spread_rows(
        [Figures(key, [t / 1e3 for times in run.rounds for t in times], _median_s(run)) for key, run in keyed],
        format_seconds,
    )
    rate = "tokens_per_s" if any(run.number("tokens_per_s") for run in runs) else "samples_per_s"
    speed = bar_rows(
        [Bar(key, run.number(rate), note=_count_of(run, rate)) for key, run in keyed], format_count, is_more_better=True
    )
    compiling = [Bar(key, run.number("compile_s")) for key, run in keyed if run.number("compile_s")]
    reading = "line: 2 % to 98 % of the steps after the warm-up; box: the middle half; mark: the median"
    return joined(
        [
            _panel("Step time", spread, reading),
            _panel(f"{'Tokens' if rate == 'tokens_per_s' else 'Samples'} a second", speed, "at the median step"),
            _panel("Compile time", bar_rows(compiling, format_seconds), "before step 1; what is in a cache is not "
                   "compiled again"),
        ]
    )  # fmt: skip


def _median_s(run: Run) -> float | None:
    """Of a step, as the table has it."""
    median = run.number("step_ms_median") if len(run.rounds) > 1 else None
    return None if median is None else median / 1e3


def _count_of(run: Run, rate: str) -> str:
    value = run.number(rate)
    return f"{value:,.1f}" if value else ""


def _memory(runs: Sequence[Run], keys: Sequence[Key]) -> str:
    peaks = []
    for key, run in zip(keys, runs, strict=True):
        measured, predicted = run.number("peak_bytes"), run.number("predicted_peak_bytes")
        note = f"measured {_bytes(measured)}, predicted {_bytes(predicted)}"
        peaks.append(Bar(key, measured, predicted, note))
    saved = []
    for key, run in zip(keys, runs, strict=True):
        modules = run.summary.get("saved_by_module")
        if isinstance(modules, Mapping):
            sizes = [(str(name), float(size)) for name, size in modules.items() if isinstance(size, (int, float))]
            saved.append(Parts(key, [(name, size) for name, size in sizes if size > 0]))
    reading = "bar: measured; mark: predicted before the first step"
    return joined(
        [
            _panel("Peak memory of a step", bar_rows(peaks, format_bytes), reading),
            _panel("Saved for the backward, by module", part_rows(saved), "of the runs that aottrain compiled"),
        ]
    )


def _bytes(value: float | None) -> str:
    return "not known" if value is None else f"{format_bytes(value)} ({value:,.0f} bytes)"


def _panel(title: str, content: str, note: str = "") -> str:
    return f'<div>{heading(title, note)}<div class="panel">{content}</div></div>' if content else ""


def _differences(runs: Sequence[Run], differing: Mapping[str, Sequence[str]]) -> str:
    """A row for each setting in which the runs differ; all others are the same in all of them."""
    if not differing or len(runs) < 2:
        return ""
    rows = []
    for key, values in differing.items():
        names: dict[str, list[str]] = {}
        for run, value in zip(runs, values, strict=True):
            names.setdefault(value, []).append(run.name)
        rows.append([f'<span class="mono">{breakable(key)}</span>', _values(names)])
    columns = [Column("key"), Column("value: runs that have it")]
    return f"{heading('What differs', 'all other settings are the same')}{table(columns, rows)}"


def _values(names: Mapping[str, Sequence[str]]) -> str:
    items = [f"<li><b>{escape(value)}</b>: {_named(runs)}</li>" for value, runs in names.items()]
    shown = f'<ul class="values">{"".join(items[:_NUM_NAMED])}</ul>'
    rest = items[_NUM_NAMED:]
    return shown + (folded(f"{len(rest)} more values", f'<ul class="values">{"".join(rest)}</ul>') if rest else "")


def _named(names: Sequence[str]) -> str:
    return escape(", ".join(names)) if len(names) <= _NUM_NAMED else f"{len(names)} runs"
