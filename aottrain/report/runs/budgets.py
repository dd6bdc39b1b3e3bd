"""Memory against speed, where runs have budgets of their own: the curve of the budgets, and the other engines."""

from __future__ import annotations

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
    """One for each run with a time and a peak. Whiskers reach from the lowest to the highest round; where there is one
    round alone, over the middle half of its steps."""
    shown = [run for run in runs if run.number("peak_bytes") and run.rounds and run.status != "failed"]
    names = _series(shown, runs, differing)
    marks = []
    for run in sorted(shown, key=lambda run: run.number("peak_bytes") or 0):
        middles = [quartiles(times) for times in run.rounds]
        medians = sorted(median for _, median, _ in middles)
        low, high = (medians[0], medians[-1]) if len(medians) > 1 else (middles[0][0], middles[0][2])
        median = quartiles(medians)[1]
        label = _label(run) if len(shown) <= _NUM_LABELS else ""
        marks.append(PlotMark(names[run.name], run.name, label, run.number("peak_bytes") or 0, median / 1e3,
                              low=low / 1e3, high=high / 1e3))  # fmt: skip
    return marks


def _series(shown: Sequence[Run], runs: Sequence[Run], differing: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """By engine, and by what else differs, as far as there are colours for it."""
    others = [key for key in first_keys(list(differing), 9) if key not in (BUDGET, TORCH_BUDGET, "engine.name")]
    values = {run.name: [differing[key][i] for key in others] for i, run in enumerate(runs)}
    full = {
        run.name: " ".join([_engine(run), *(f"{k}={v}" for k, v in zip(others, values[run.name], strict=True)
                                            if v != ABSENT)])
        for run in shown
    }  # fmt: skip
    return full if len(set(full.values())) <= len(SERIES) else {run.name: _engine(run) for run in shown}


def _engine(run: Run) -> str:
    return {"aot": "aottrain, by budget", "torch_compile": "torch.compile"}.get(run.engine, run.engine or "unknown")


def _label(run: Run) -> str:
    key = {"aot": BUDGET, "torch_compile": TORCH_BUDGET}.get(run.engine)
    value = run.settings.get(key) if key else None
    return run.engine if value is None else str(value)
