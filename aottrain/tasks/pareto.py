"""task=pareto: memory against speed, a run for each of `pareto.budgets`, predicted and measured.

Each point is a short training run in a process of its own, as in task=compare; `pareto.engines` run beside the budgets.
task=plan, in another process, gives the predicted curve: every plan that a budget could choose.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from aottrain.config import RunConfig
from aottrain.ir.explain import table
from aottrain.ir.units import format_bytes, format_count, format_percent, format_seconds
from aottrain.report.charts import memory_plot
from aottrain.report.html import render_curve
from aottrain.tasks.compare import for_engine, grouped_logger, shown, train_apart
from aottrain.tasks.worker import run_apart

HEADER = ("name", "predicted peak", "measured peak", "predicted/measured", "step (median)", "speed", "saved", "remark")

Curve = Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Point:
    """One run's figures; None where there is none. speedup: eager's step time in units of this one's."""

    name: str
    engine: str
    budget: float | None = None  # None for engines that take none
    error: str = ""
    predicted_peak_bytes: int | None = None
    peak_bytes: int | None = None
    prediction_error: float | None = None
    step_ms_median: float | None = None
    speedup: float | None = None
    saved_bytes: int | None = None
    fallbacks: int | None = None
    dominated: bool = False
    knee: bool = False

    @property
    def place(self) -> tuple[float, float] | None:
        """(peak, step time), or None where one of them was not measured."""
        if self.peak_bytes is None or self.step_ms_median is None:
            return None
        return self.peak_bytes, self.step_ms_median


def run(config: RunConfig) -> int:
    """Measure, print the table, write pareto.csv and pareto.html. 0 if every run went well, else 1."""
    directory = Path(config.output_dir)
    curve, error = _predicted_curve(config)
    points = [_measure(config, engine, None) for engine in config.pareto.engines]
    points += [_measure(config, "aot", budget) for budget in config.pareto.budgets]
    points = judged(points)
    _write_csv(directory / "pareto.csv", points)
    rows, notes = [_cells(point) for point in points], _notes(config, points, error)
    facts = f"{config.recipe.name}, batches of {config.data.batch_size}, {config.trainer.precision}"
    page = render_curve(facts, _plot(points, curve), HEADER, rows, notes)
    (directory / "pareto.html").write_text(page, encoding="utf-8")
    print("\n".join([table(HEADER, rows, right=range(1, 7)), "", *notes, f"plot: {directory / 'pareto.html'}"]))
    return 1 if error or any(point.error for point in points) else 0


def dominated(places: Sequence[tuple[float, float] | None]) -> list[bool]:
    """For each place, whether another one is nowhere worse and somewhere better. None neither beats nor is beaten."""

    def beats(other: tuple[float, float] | None, place: tuple[float, float]) -> bool:
        return other is not None and other != place and other[0] <= place[0] and other[1] <= place[1]

    return [place is not None and any(beats(other, place) for other in places) for place in places]


def knee(places: Sequence[tuple[float, float] | None]) -> int | None:
    """The index of the undominated place farthest below the straight line between the ends of all undominated ones.

    Both coordinates run from 0 to 1 between the ends. None where no place is below the line.
    """
    beaten = dominated(places)
    kept = sorted((place, i) for i, place in enumerate(places) if place is not None and not beaten[i])
    if len(kept) < 3:
        return None
    (low, slow), (high, fast) = kept[0][0], kept[-1][0]
    if low == high or slow == fast:  # equal places only
        return None
    depths = [(1 - (x - low) / (high - low) - (y - fast) / (slow - fast), i) for (x, y), i in kept[1:-1]]
    depth, index = max(depths)
    return index if depth > 0 else None


def judged(points: Sequence[Point]) -> list[Point]:
    """The points with speed-ups, dominated ones and the knee marked; the knee is that of the budgets alone."""
    eager = next((point.step_ms_median for point in points if point.engine == "eager"), None)
    beaten = dominated([point.place for point in points])
    chosen = knee([point.place if point.budget is not None else None for point in points])
    return [
        dataclasses.replace(
            point,
            speedup=eager / point.step_ms_median if eager and point.step_ms_median else None,
            dominated=beaten[i],
            knee=i == chosen,
        )
        for i, point in enumerate(points)
    ]


def predicted_line(points: Sequence[Point], curve: Curve) -> list[tuple[float, float]]:
    """The curve as (peak, step in s): the measured step of the roomiest budget, and the recompute that others add."""
    known = [point for point in points if point.predicted_peak_bytes is not None and point.step_ms_median is not None]
    start = max(known, key=lambda point: point.predicted_peak_bytes or 0, default=None)
    if start is None or start.predicted_peak_bytes is None or start.step_ms_median is None:
        return []
    base = min((seconds for peak, seconds in curve if peak <= start.predicted_peak_bytes), default=None)
    if base is None:
        return []
    return [(peak, start.step_ms_median / 1e3 + seconds - base) for peak, seconds in curve]


def point_config(config: RunConfig, name: str, engine: str, budget: float | None) -> RunConfig:
    """As configured, for `pareto.steps` measured steps after the warm-up, with peak memory measured."""
    partition = config.partition if budget is None else dataclasses.replace(config.partition, budget=budget)
    return for_engine(
        config,
        engine,
        config.measure.warmup_steps + config.pareto.steps,
        partition=partition,
        measure=dataclasses.replace(config.measure, memory=True),
        logger=grouped_logger(config, name),
        output_dir=str(Path(config.output_dir) / name),
    )


def _measure(config: RunConfig, engine: str, budget: float | None) -> Point:
    name = engine if budget is None else f"budget-{budget}"
    run_config = point_config(config, name, engine, budget)
    errors = train_apart(run_config, name, f"{config.pareto.steps} steps timed")
    if errors:
        return Point(name, engine, budget, errors[name])
    summary = json.loads((Path(run_config.output_dir) / "summary.json").read_text(encoding="utf-8"))
    predicted, measured = summary["predicted_peak_bytes"], summary["peak_bytes"]
    return Point(
        name,
        engine,
        budget,
        predicted_peak_bytes=predicted,
        peak_bytes=measured,
        prediction_error=predicted / measured - 1 if predicted and measured else None,
        step_ms_median=summary["step_ms_median"],
        saved_bytes=summary["saved_bytes"],
        fallbacks=summary["fallbacks"],
    )


def _predicted_curve(config: RunConfig) -> tuple[Curve, str]:
    """Every plan that a budget could choose as (peak in bytes, seconds of recompute); and an error, or ""."""
    print("plan: the predicted curve", flush=True)
    directory = Path(config.output_dir) / "plan"
    error = run_apart(dataclasses.replace(config, task="plan", output_dir=str(directory)))
    if error:
        return [], error
    plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    return [(peak, seconds) for peak, seconds in plan["graph"]["curve"]], ""


def _cells(point: Point) -> tuple[str, ...]:
    remark = "failed" if point.error else "dominated" if point.dominated else "knee" if point.knee else ""
    return (
        point.name,
        shown(format_bytes, point.predicted_peak_bytes),
        shown(format_bytes, point.peak_bytes),
        shown(lambda value: format_percent(value, signed=True), point.prediction_error),
        shown(lambda value: format_seconds(value / 1e3), point.step_ms_median),
        shown(lambda value: f"{value:.2f}x", point.speedup),
        shown(format_bytes, point.saved_bytes),
        remark,
    )


def _notes(config: RunConfig, points: Sequence[Point], plan_error: str) -> list[str]:
    chosen = next((point for point in points if point.knee), None)
    notes = [
        f"{config.pareto.steps} steps timed after {config.measure.warmup_steps} of warm-up, each run in a process "
        "of its own; speed is relative to eager.",
        "Dominated: another run needs no more memory and no more time.",
        f"Knee: {chosen.name}, farthest below the line between the ends of the budgets that no other one dominates."
        if chosen
        else "Knee: none; no budget lies below the line between the ends.",
    ]
    notes += [f"{point.name} failed: {point.error}" for point in points if point.error]
    notes += [f"{p.name}: {format_count(p.fallbacks)} calls ran eagerly" for p in points if p.fallbacks]
    return notes + ([f"no predicted curve: {plan_error}"] if plan_error else [])


def _plot(points: Sequence[Point], curve: Curve) -> str:
    marks = []
    for point in points:
        if point.place is not None:
            classes = ["other" if point.budget is None else "ours"]
            classes += ["beaten"] * point.dominated + ["knee"] * point.knee
            peak, step_ms = point.place
            marks.append((point.name, peak, step_ms / 1e3, " ".join(classes)))
    axes = ("peak memory (line: predicted for every plan, from the roomiest budget's step)", "step, median")
    return memory_plot(marks, predicted_line(points, curve), axes=axes)


def _write_csv(path: Path, points: Sequence[Point]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Point)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(point) for point in points)
