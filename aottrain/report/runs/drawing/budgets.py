"""Memory against speed, where runs have budgets of their own: the curve of the budgets, and the other engines."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from aottrain.report.charts import at_each_width
from aottrain.report.page import heading
from aottrain.report.runs.reading import Run
from aottrain.report.runs.settings import ABSENT, first_keys
from aottrain.report.runs.spread import quartiles
from aottrain.report.scatter import PlotMark, memory_legend, memory_plot
from aottrain.report.style import SERIES

_AXES = ("peak memory of a step \u2192", "\u2191 time of a step")
_NUM_LABELS = 30
BUDGET, TORCH_BUDGET = "partition.budget", "engine.activation_memory_budget"


def budget_plot(runs: Sequence[Run], differing: Mapping[str, Sequence[str]]) -> str:
    """A plot, where two runs or more of ours differ in their budget; else ""."""
    ours = {str(run.settings.get(BUDGET)) for run in runs if run.engine == "aot" and run.number("peak_bytes")}
    marks = budget_marks(runs, differing)
    if len(ours) < 2 or len(marks) < 2:
        return ""
    drawn = at_each_width(lambda width: memory_plot(marks, [], axes=_AXES, width=width))
    note = "left is less memory, down is faster; the axes need not begin at zero"
    return f'{heading("Memory against speed", note)}<div class="panel">{drawn}{memory_legend(marks)}</div>'


def budget_marks(runs: Sequence[Run], differing: Mapping[str, Sequence[str]]) -> list[PlotMark]:
    """One for each run with a time and a peak, in a series of its engine and of all else that differs. Whiskers reach
    from the lowest to the highest round; where there is one round alone, over the middle half of its steps.

    Where these were more series than there are colours: one for each budget of an engine, at the medians of all such
    runs, with a whisker from the fastest to the slowest.
    """
    shown = [run for run in runs if run.number("peak_bytes") and run.rounds and run.status != "failed"]
    names = _series(shown, runs, differing)
    if len(set(names.values())) <= len(SERIES):
        marks = [_mark(names[run.name], run.name, [run]) for run in shown]
    else:
        groups: dict[tuple[str, str], list[Run]] = {}
        for run in shown:
            groups.setdefault((_engine(run), _label(run)), []).append(run)
        marks = [_mark(engine, f"{label}: {len(all_)} runs", all_) for (engine, label), all_ in groups.items()]
    if len(marks) > _NUM_LABELS:
        marks = [dataclasses.replace(mark, label="") for mark in marks]
    return sorted(marks, key=lambda mark: mark.num_bytes)


def _mark(series: str, name: str, runs: Sequence[Run]) -> PlotMark:
    middles = [quartiles(times) for run in runs for times in run.rounds]
    medians = sorted(median for _, median, _ in middles)
    low, high = (medians[0], medians[-1]) if len(medians) > 1 else (middles[0][0], middles[0][2])
    peak = statistics.median(run.number("peak_bytes") or 0 for run in runs)
    seconds = statistics.median(medians) / 1e3
    return PlotMark(series, name, _label(runs[0]), peak, seconds, low=low / 1e3, high=high / 1e3)


def _series(shown: Sequence[Run], runs: Sequence[Run], differing: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """{run: engine, and what else differs}."""
    others = [key for key in first_keys(list(differing), 9) if key not in (BUDGET, TORCH_BUDGET, "engine.name")]
    values = {run.name: [(key, differing[key][i]) for key in others] for i, run in enumerate(runs)}
    return {
        run.name: " ".join([_engine(run), *(f"{key}={value}" for key, value in values[run.name] if value != ABSENT)])
        for run in shown
    }


def _engine(run: Run) -> str:
    return {"aot": "aottrain, by budget", "torch_compile": "torch.compile"}.get(run.engine, run.engine or "unknown")


def _label(run: Run) -> str:
    key = {"aot": BUDGET, "torch_compile": TORCH_BUDGET}.get(run.engine)
    value = run.settings.get(key) if key else None
    return run.engine if value is None else str(value)
