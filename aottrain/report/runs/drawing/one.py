"""The page of one run: its curves with what stands out in them, its figures, what the model writes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path

from aottrain.ir.settings.files import text_of
from aottrain.ir.units import format_bytes, format_count, format_percent, format_seconds
from aottrain.metrics.sinks import OWN
from aottrain.report import html
from aottrain.report.charts import size
from aottrain.report.graph.script import SCRIPT as PICTURES
from aottrain.report.page import Column, card, folded, heading, inner_of, joined, page, table
from aottrain.report.runs.drawing.curves import Axes, Curve, Key, Mark, line_plot
from aottrain.report.runs.drawing.look import STYLE
from aottrain.report.runs.drawing.runs_table import link
from aottrain.report.runs.drawing.samples import SAMPLES, render_samples
from aottrain.report.runs.drawing.script import SCRIPT
from aottrain.report.runs.drawing.times import FILE as PROFILE
from aottrain.report.runs.drawing.times import render_times
from aottrain.report.runs.folders import Collection
from aottrain.report.runs.reading import (
    HELD_OUT,
    LOSS,
    METRICS,
    REPORT,
    SAMPLE,
    STEP_MS,
    SUMMARY,
    Points,
    Run,
    own_names,
)
from aottrain.report.runs.settings import text

NORM = "train/grad_norm"
CHECKED = "verify/max_error"
_WINDOW = 25  # steps before one that it is compared with
_NUM_LISTED = 30
_NUM_FLAGS = 60
# How far above the median of the steps before it a value stands out: in spreads of these, and as a factor.
_SPREADS, _FACTORS = 6.0, {LOSS: 1.1, NORM: 3.0, STEP_MS: 2.0}
_FILES = (REPORT, "decisions.json", METRICS, SUMMARY, SAMPLE, SAMPLES, PROFILE, "trace.json", "aottrain.log", "log.txt")


def render_run(found: Collection, *, again_s: int = 0) -> str:
    """The page of the one run of `found` as text. again_s: as of `page`."""
    run = found.runs[0]
    marks = {name: spikes(run.metrics.get(name, ()), factor) for name, factor in _FACTORS.items()}
    body = [
        _header(run, found),
        _told(run),
        _cards(run),
        f'<div class="plots wide-plot">{_panel(_loss(run, marks[LOSS]))}</div>',
        f'<div class="plots pairs">{"".join(map(_panel, _plots(run, marks)))}</div>',
        _stood_out(run, marks),
        render_times(run.folder),
        render_samples(run.folder),
        _settings(run),
        _links(found),
        compiled := _compiled(found),
    ]
    script, style = (SCRIPT + PICTURES, STYLE + html.STYLE) if compiled else (SCRIPT, STYLE)
    return page(f"run {run.name}", body, script=script, style=style, again_s=again_s)


def _compiled(found: Collection) -> str:
    """The compile report that lies beside the figures of a run that has ended."""
    run = found.runs[0]
    if run.status == "running" or not found.has_links:
        return ""
    try:
        return inner_of(text_of(run.folder / REPORT))
    except OSError:
        return ""


def spikes(points: Points, factor: float) -> list[tuple[float, float]]:
    """(step, value) of the values that stand out: not finite, or above the median of the steps before by so much more
    than these spread (six median deviations), and by `factor`."""
    found, window = [], list[float]()
    for step, value in points:
        if not math.isfinite(value):
            found.append((step, value))
            continue
        if len(window) >= 5:
            middle = statistics.median(window)
            spread = statistics.median(abs(other - middle) for other in window)
            if value > middle + _SPREADS * spread and value > middle * factor > 0:
                found.append((step, value))
        window = [*window[-_WINDOW + 1 :], value]
    return found


def _panel(plot: str) -> str:
    return f'<div class="panel">{plot}</div>' if plot else ""


def _header(run: Run, found: Collection) -> str:
    words = [run.engine, run.text("kernel"), run.text("precision"), run.text("device")]
    parameters = run.number("num_parameters")
    words += [f"{format_count(parameters)} parameters"] if parameters else []
    name = run.text("recipe") or run.name
    lines = [" · ".join(filter(None, words)), run.text("machine"), f"Made by {found.command}" if found.command else ""]
    shown = "".join(f'<p class="dim">{escape(line)}</p>' for line in lines if line)
    return f"<h1>Run of {escape(name)}</h1>{shown}"


def _told(run: Run) -> str:
    """How it ended, in a sentence; what could not be read."""
    steps, loss, held_out = run.number("steps"), run.loss, run.number("val_loss")
    where = "at" if run.status == "running" else "after"
    parts = [f"{run.status} {where} step {format_count(steps)}" if steps is not None else run.status]
    parts += [f"loss {loss:.4f}"] if loss is not None else []
    parts += [f"held-out loss {held_out:.4f}"] if held_out is not None else []
    sentence = ", ".join(parts)
    lines = [f"<p>{escape(sentence[0].upper() + sentence[1:])}.</p>"]
    note = run.text("verify_note")
    told = [run.text("error"), *run.problems, f"About the check against eager: {note}." if note else ""]
    fallbacks = run.number("fallbacks")
    told += [f"{format_count(fallbacks)} calls ran eagerly: see the compile report"] if fallbacks else []
    lines += [f'<p class="problem">{escape(line)}</p>' for line in told[:1] if line]
    lines += [f'<p class="dim">{escape(line)}</p>' for line in told[1:] if line]
    return f'<section class="verdict" aria-label="how it ended">{"".join(lines)}</section>'


def _cards(run: Run) -> str:
    cards = []
    median, p90 = run.number("step_ms_median"), run.number("step_ms_p90")
    if median:
        note = f"p90 {format_seconds(p90 / 1e3)}" if p90 else ""
        cards.append(card("Step, median", format_seconds(median / 1e3), note))
    for name, title in (("tokens_per_s", "Tokens a second"), ("samples_per_s", "Samples a second")):
        if rate := run.number(name):
            cards.append(card(title, format_count(rate), "at the median step"))
            break
    peak, predicted = run.number("peak_bytes"), run.number("predicted_peak_bytes")
    if peak:
        cards.append(card("Peak memory", size(int(peak)), f"predicted {format_bytes(predicted)}" if predicted else ""))
    if saved := run.number("saved_bytes"):
        eager = run.number("eager_saved_bytes")
        cards.append(card("Saved for backward", size(int(saved)), f"eager: {format_bytes(eager)}" if eager else ""))
    if compile_s := run.number("compile_s"):
        cards.append(card("Compile time", format_seconds(compile_s), "before step 1"))
    error, update = run.number("verify_max_error"), run.number("verify_update_error")
    if error is not None:
        of_update = "" if update is None else f"; of its update {update:.1e}"
        note = f"largest relative error of a checked step{of_update}"
        cards.append(card("Against eager", f"{error:.1e}", note))
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _loss(run: Run, found: Sequence[tuple[float, float]]) -> str:
    held_out = run.metrics.get(HELD_OUT, ())
    curves = [Curve(Key(0, "loss", 0), run.metrics[LOSS])] if run.metrics.get(LOSS) else []
    if held_out:
        curves.append(Curve(Key(1, "held-out loss", 1), held_out, "second" if len(held_out) > 1 else "points"))
    keys = "; ".join(f"{word}: {curve.key.name}" for word, curve in zip(("blue", "orange"), curves, strict=False))
    return line_plot(curves, Axes("Loss", "step", note=keys), marks=_marks(found, "loss", run))


def _plots(run: Run, marks: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Norm, rate, time and memory."""

    def of(
        name: str, title: str, unit: str = "plain", scale: float = 1.0, *, from_zero: bool = False, note: str = ""
    ) -> str:
        points = [(step, value * scale) for step, value in run.metrics.get(name, ())]
        curves = [Curve(Key(0, title.lower(), 0), points, "points" if len(points) == 1 else "")] if points else []
        flags = _marks(marks.get(name, ()), title.lower(), None)
        return line_plot(curves, Axes(title, "step", y_unit=unit, from_zero=from_zero, note=note), marks=flags)

    return [
        of(NORM, "Gradient norm"),
        *(of(name, f"Held-out {name.removeprefix(OWN)}") for name in own_names([run])),
        of("train/lr", "Learning rate", from_zero=True),
        of(STEP_MS, "Step time", "seconds", 1e-3, from_zero=True),
        of(CHECKED, "Difference from eager", from_zero=True, note=_checks(run)),
        of("memory/peak_bytes", "Peak memory of a step", "bytes", from_zero=True),
        of(
            "memory/peak_rss_bytes", "Peak memory of the process", "bytes", from_zero=True, note="with Python and torch"
        ),
    ]


def _checks(run: Run) -> str:
    """How often steps are checked, where a point or two would make one ask."""
    every, share = run.settings.get("verify.every"), run.settings.get("verify.share")
    if not every:
        return "the first steps alone; verify.every=100 checks later ones, too"
    return f"every {every} steps, but for at most {format_percent(share)} of the time" if share else ""


def _marks(found: Sequence[tuple[float, float]], name: str, run: Run | None) -> list[Mark]:
    """Where a value stands out, and where the run failed."""
    marks = [Mark(step, f"step {step:.0f}: {name} {value:.4g}", not math.isfinite(value)) for step, value in found]
    steps = run.number("steps") if run is not None and run.status == "failed" else None
    if run is not None and steps is not None:
        marks.append(Mark(steps, f"failed after step {steps:.0f}: {run.text('error')}", is_fault=True))
    return marks[-_NUM_FLAGS:]


def _stood_out(run: Run, marks: dict[str, list[tuple[float, float]]]) -> str:
    names = {LOSS: "loss", NORM: "gradient norm", STEP_MS: "step time"}
    rows = sorted((step, names[key], key, value) for key, found in marks.items() for step, value in found)
    if not rows:
        return ""
    columns = [Column("step"), Column("what"), Column("value")]
    cells = [
        [f"{step:.0f}", name, escape(format_seconds(value / 1e3) if key == STEP_MS else f"{value:.4g}")]
        for step, name, key, value in rows
    ]
    count = f"{len(rows)} value{'' if len(rows) == 1 else 's'} that stand out"
    note = "far above the 25 steps before, or not finite; marked in the plots"
    left = f'<p class="dim">The first {_NUM_LISTED} are shown.</p>' if len(rows) > _NUM_LISTED else ""
    return folded(count, table(columns, cells[:_NUM_LISTED]) + left, note, open_=len(rows) <= 6)


def _settings(run: Run) -> str:
    if not run.settings:
        return ""
    rows = [[f'<span class="mono">{escape(key)}</span>', escape(text(value))] for key, value in run.settings.items()]
    return folded("Settings", table([Column("key"), Column("value")], rows), f"{len(rows)}")


def _links(found: Collection) -> str:
    folder = found.runs[0].folder
    here = [name for name in _FILES if found.has_links and (folder / name).is_file()]
    items = "".join(f'<li><a href="{link(Path(folder, name), found)}">{escape(name)}</a></li>' for name in here)
    return joined([heading("Files"), f'<ul class="legend">{items}</ul>']) if here else ""
