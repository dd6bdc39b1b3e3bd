"""task=pareto: memory against speed, predicted and measured; ours for each budget, and what people use instead.

Every point is a short training run in a process of its own: ours at `pareto.budgets`, eager PyTorch, eager with
checkpointed blocks, torch.compile at each value of its own ratio; and ours again at the peaks that those were measured
at. The runs take turns, round by round (see turns.py). task=plan gives the predicted curve: every plan that a budget
could choose.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aottrain.config.run import RunConfig
from aottrain.errors import BudgetError
from aottrain.explain.tables import table
from aottrain.ir.settings.budget import parse_budget
from aottrain.ir.settings.files import csv_text
from aottrain.ir.units import format_bytes, format_count, format_percent, format_seconds
from aottrain.metrics.sinks import write_result
from aottrain.report.curve import render_curve
from aottrain.report.runs.drawing.overview import verdict_section
from aottrain.report.runs.folders import collect
from aottrain.report.runs.settings import differences
from aottrain.report.scatter import PlotMark
from aottrain.tasks.compare import for_engine, measured_on, shown
from aottrain.tasks.measuring.pareto_points import (
    EQUAL_PEAK,
    Curve,
    Point,
    equal_peak_verdicts,
    judged,
    planned_peak,
    predicted_line,
)
from aottrain.tasks.measuring.runs_in_turns import RunError, TimedRun, timed_training
from aottrain.tasks.measuring.worker import run_apart
from aottrain.trainer.progress import Status
from aottrain.trainer.reliability.signals import interruptible

HEADER = ("name", "predicted peak", "measured peak", "prediction off by", "step (median)", "speed", "saved", "remark")

# What a point's `series` is called beside the plot.
SERIES = {
    "aot": "aottrain, by budget",
    "eager": "eager",
    "eager_checkpoint": "eager, blocks checkpointed",
    "inductor": "torch.compile, by its own ratio",
    "aot_eager": "torch.compile with eager's kernels, by its own ratio",
}


def run(config: RunConfig) -> int:
    """Measure, print the table, write pareto.csv and pareto.html. 0 if every run went well, else 1.

    Raises BudgetError before anything is measured if a budget in bytes is below the lowest peak of any plan, and
    Interrupted by SIGINT or SIGTERM, when all that trains has been ended.
    """
    with interruptible():
        return _measure(config)


def _measure(config: RunConfig) -> int:
    directory = Path(config.output_dir)
    curve, error = _predicted_curve(config)
    _check_reachable(config)
    with Runs(config) as runs:
        for point in peers(config):
            runs.add(point)
        for budget in config.pareto.budgets:
            runs.add(Point(f"budget-{budget}", "aot", budget))
        if config.pareto.match_peaks:
            for point in matching(runs.points.values(), curve):
                runs.add(point)
        runs.take_turns()
        points = judged(sorted(runs.points.values(), key=_row_order))
    _write_csv(directory / "pareto.csv", points)
    rows, notes = [_cells(point) for point in points], _notes(config, points, error)
    settings = f"{config.recipe.title}, batches of {config.data.batch_size}, {config.trainer.precision}"
    machine = measured_on(point.machine for point in points)
    found, line = collect([directory]), predicted_line(points, curve)
    verdict = verdict_section(found, differences(found.runs))
    page = render_curve([settings, machine], _marks(points), line, HEADER, rows, notes, verdict)
    write_result(directory / "pareto.html", page)
    lines = [table(HEADER, rows, right=range(1, 7)), "", machine, *notes, f"plot: {directory / 'pareto.html'}"]
    print("\n".join(lines))
    return 1 if error or any(point.error for point in points) else 0


def peers(config: RunConfig) -> list[Point]:
    """What ours is measured beside, not yet measured."""
    pareto = config.pareto
    points = [Point(engine, engine) for engine in pareto.engines if engine != "torch_compile"]
    if "torch_compile" in pareto.engines:
        for backend in pareto.torch_backends:
            named = [(f"{backend}-{budget}", budget) for budget in pareto.torch_budgets]
            points += [Point(name, "torch_compile", budget, backend=backend) for name, budget in named]
    return points


def matching(points: Iterable[Point], curve: Curve) -> list[Point]:
    """A run of ours for each peak of the other engines, unless its plan runs already or no plan is as low."""
    points = list(points)
    planned = {point.predicted_peak_bytes for point in points if point.engine == "aot"}
    added = []
    for point in points:
        if point.engine != "aot" and point.peak_bytes is not None:
            peak = planned_peak(curve, point.peak_bytes)
            if peak is not None and peak not in planned:
                planned.add(peak)
                name = f"budget-{format_bytes(point.peak_bytes).replace(' ', '')}"
                added.append(Point(name, "aot", f"{point.peak_bytes}B"))
    return added


def point_config(config: RunConfig, point: Point) -> RunConfig:
    """As configured, for the warm-up, the step that is profiled, and all rounds; with peak memory measured."""
    pareto = config.pareto
    partition, options = config.partition, config.engine
    if point.engine == "aot":
        partition = dataclasses.replace(partition, budget=point.budget)
    if point.engine == "torch_compile":
        options = dataclasses.replace(options, backend=point.backend, activation_memory_budget=point.budget)
    return for_engine(
        dataclasses.replace(config, engine=options),
        point.engine,
        config.measure.warmup_steps + 1 + pareto.rounds * (1 + pareto.steps),
        partition=partition,
        measure=dataclasses.replace(config.measure, memory=True),
        output_dir=str(Path(config.output_dir) / point.name),
    )


class Runs:
    """All points' processes. With `take_turns=false` each is gone before the next is started."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.points: dict[str, Point] = {}
        self._running: dict[str, TimedRun] = {}
        self._round_ms: dict[str, list[float]] = {}

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self._close(name)

    def add(self, point: Point) -> None:
        """Start a run and measure its peak; its times too, if it cannot wait for its turn. Known names are left out."""
        if point.name in self.points:
            return
        print(f"{point.name}: compiled, warmed up, its peak measured", flush=True)
        timed = timed_training(point_config(self.config, point))
        self.points[point.name], self._running[point.name] = point, timed
        self._round_ms[point.name] = []
        try:
            with Status(point.name):
                self.points[point.name] = _with_memory(point, timed.start())
        except RunError as error:
            self._fail(point.name, error)
        if not self.config.pareto.take_turns:
            for _ in range(self.config.pareto.rounds):
                self._turn(point.name)
            self._close(point.name)
            self._settle(point.name)

    def take_turns(self) -> None:
        """All rounds. The order rotates, so that none always follows the same other one."""
        names = list(self._running)
        for index in range(self.config.pareto.rounds if names else 0):
            print(f"round {index + 1} of {self.config.pareto.rounds}", flush=True)
            shift = index % len(names)
            for name in (*names[shift:], *names[:shift]):
                self._turn(name)
        for name in names:
            self._settle(name)

    def _turn(self, name: str) -> None:
        if name not in self._running:
            return
        try:
            with Status(name):
                self._round_ms[name].append(statistics.median(self._running[name].time(self.config.pareto.steps)))
        except RunError as error:
            self._fail(name, error)

    def _settle(self, name: str) -> None:
        if not self.points[name].error:
            self.points[name] = self.points[name].timed(self._round_ms[name])

    def _fail(self, name: str, error: RunError) -> None:
        self.points[name] = dataclasses.replace(self.points[name], error=str(error))
        self._close(name)

    def _close(self, name: str) -> None:
        if name in self._running:
            self._running.pop(name).close()


def _with_memory(point: Point, summary: Mapping[str, Any]) -> Point:
    predicted, measured = summary["predicted_peak_bytes"], summary["peak_bytes"]
    return dataclasses.replace(
        point,
        compile_s=summary["compile_s"],
        predicted_peak_bytes=predicted,
        peak_bytes=measured,
        prediction_error=predicted / measured - 1 if predicted and measured else None,
        saved_bytes=summary["saved_bytes"],
        fallbacks=summary["fallbacks"],
        machine=summary.get("machine", ""),
    )


def _predicted_curve(config: RunConfig) -> tuple[Curve, str]:
    """Every plan that a budget could choose as (peak in bytes, seconds of recompute); and an error, or ""."""
    print("plan: the predicted curve", flush=True)
    plan, error = _planned(config, 1.0, "plan")  # which is always met, and has the same curve
    return [(peak, seconds) for peak, seconds in plan["graph"]["curve"]] if plan else [], error


def _planned(config: RunConfig, budget: Any, name: str) -> tuple[dict[str, Any] | None, str]:
    """What plan.json has for a budget, in a folder of this name; or None and an error."""
    directory = Path(config.output_dir) / name
    partition = dataclasses.replace(config.partition, budget=budget)
    with Status("plan"):
        error = run_apart(dataclasses.replace(config, task="plan", partition=partition, output_dir=str(directory)))
    return (None, error) if error else (json.loads((directory / "plan.json").read_text(encoding="utf-8")), "")


def _check_reachable(config: RunConfig) -> None:
    """The smallest budget in bytes is planned: how low kernels reach no curve says. An error in that is told where the
    budget is measured."""
    sizes = {budget: size for budget in config.pareto.budgets if isinstance(size := parse_budget(budget), int)}
    if not sizes:
        return
    plan, _ = _planned(config, min(sizes, key=lambda budget: sizes[budget]), "plan_lowest")
    lowest = (plan and plan["lowest_peak_bytes"]) or 0
    below = [str(budget) for budget, size in sizes.items() if size < lowest]
    if below:
        text = f"no plan is as low; the lowest peak of any plan is {format_bytes(lowest)} ({lowest:.0f} bytes)"
        raise BudgetError(f"pareto.budgets: {', '.join(below)}: {text}")


def _row_order(point: Point) -> tuple[bool, int]:
    """The others as configured, then ours from the roomiest to the tightest."""
    return point.engine == "aot", -(point.predicted_peak_bytes or 0)


def _cells(point: Point) -> tuple[str, ...]:
    remark = "failed" if point.error else "dominated" if point.dominated else "knee" if point.knee else ""
    return (
        point.name,
        shown(format_bytes, point.predicted_peak_bytes),
        shown(format_bytes, point.peak_bytes),
        shown(lambda value: format_percent(value, signed=True), point.prediction_error),
        _spread(point),
        _speed(point),
        shown(format_bytes, point.saved_bytes),
        remark,
    )


def _spread(point: Point) -> str:
    if point.step_ms_median is None:
        return "-"
    low, high = min(point.round_ms), max(point.round_ms)
    spread = "" if low == high else f" [{format_seconds(low / 1e3)}, {format_seconds(high / 1e3)}]"
    return format_seconds(point.step_ms_median / 1e3) + spread


def _speed(point: Point) -> str:
    if point.speedup is None:
        return "-"
    spread = "" if point.speedup_min == point.speedup_max else f" [{point.speedup_min:.2f}, {point.speedup_max:.2f}]"
    return f"{point.speedup:.2f}x{spread}{_level(point)}"


def _level(point: Point) -> str:
    """Where eager is as fast within the spread, that is said."""
    if point.engine == "eager" or point.speedup_min is None or point.speedup_max is None:
        return ""
    return " level" if point.speedup_min <= 1 <= point.speedup_max else ""


def _notes(config: RunConfig, points: Sequence[Point], plan_error: str) -> list[str]:
    chosen = next((point for point in points if point.knee), None)
    pareto = config.pareto
    rounds = f"{pareto.rounds} round{'' if pareto.rounds == 1 else 's'}"
    together = "taking turns" if pareto.take_turns else "one after the other"
    notes = [
        f"{rounds} of {pareto.steps} steps after {config.measure.warmup_steps} of warm-up, each run in a "
        f"process of its own, {together}; medians of the rounds, lowest and highest in brackets. Speed is relative to "
        "eager; level: faster in one round, slower in another.",
        f"Dominated: another run needs no more memory and is faster in every round, or needs less (by {EQUAL_PEAK:.0%} "
        "or more) and is not slower by the median.",
        f"Knee: {chosen.name}, farthest below the line between the ends of the budgets that no other one dominates."
        if chosen
        else "Knee: none; no budget lies below the line between the ends.",
    ]
    notes += [f"{point.name} failed: {point.error}" for point in points if point.error]
    notes += [f"{p.name}: {format_count(p.fallbacks)} calls ran eagerly" for p in points if p.fallbacks]
    if verdicts := equal_peak_verdicts(points):
        notes.append(f"Equal peak (within {EQUAL_PEAK:.0%}), against each run that its own sweep does not dominate:")
        notes += verdicts
    return notes + ([f"no predicted curve: {plan_error}"] if plan_error else [])


def _marks(points: Sequence[Point]) -> list[PlotMark]:
    ours = sorted((point for point in points if point.engine == "aot"), key=lambda point: point.place or ())
    marks = []
    for point in (*ours, *(point for point in points if point.engine != "aot")):
        if point.place is not None:
            remark = "knee" if point.knee else "beaten" if point.dominated else ""
            peak, step_ms = point.place
            label = point.name if point.budget is None else point.name.rpartition("-")[2]
            low, high = (time / 1e3 for time in (min(point.round_ms), max(point.round_ms)))
            marks.append(PlotMark(SERIES[point.series], point.name, label, peak, step_ms / 1e3, remark, low, high))
    return marks


def _write_csv(path: Path, points: Sequence[Point]) -> None:
    columns = [field.name for field in dataclasses.fields(Point)]
    rows = [dataclasses.asdict(point) for point in points]
    for row in rows:
        row["round_ms"] = " ".join(f"{value:.3f}" for value in row["round_ms"])
    write_result(path, csv_text(columns, [row.values() for row in rows]))
