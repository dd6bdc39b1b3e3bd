"""task=compare: the engines side by side, in one table: how fast, in how much memory, and do the losses agree.

Each engine trains in a process of its own, on the same batches from the same initial weights, twice:

1. *timed*, exactly as configured but for its length, in `compare.rounds` rounds whose order rotates;
2. *losses*, short and without dropout: torch.compile draws other random numbers than eager, so with dropout the losses
   of two correct engines differ. (aottrain's own dropout is compared with eager's by verify.steps of a training run.)

The first-step verification is off in both: a wrong kernel shall get its row and verdict here, not end its process.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from aottrain.config.run import LoggerConfig, RunConfig
from aottrain.explain.tables import table
from aottrain.ir.settings.files import csv_text
from aottrain.ir.units import format_bytes, format_count, format_seconds
from aottrain.metrics.sinks import write_result
from aottrain.report.runs.drawing.pages import leave_page
from aottrain.report.runs.spread import median_figure
from aottrain.tasks.measuring.worker import LOG_FILE, last_line, run_apart
from aottrain.trainer.progress import Status
from aottrain.trainer.reliability.signals import interruptible

Summary = Mapping[str, Any]

_SPREAD = " Level: faster in one round, slower in another."
_NO_SPREAD = " One round has no spread: small differences mean nothing; compare.rounds=3 gives one."

# What a row takes from summary.json, as the median over the rounds.
MEDIAN_FIGURES = (
    "step_ms_median",
    "step_ms_p90",
    "tokens_per_s",
    "samples_per_s",
    "peak_bytes",
    "saved_bytes",
    "fallbacks",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One engine's figures; None where there is none. The speed-ups are ratios of medians within one round."""

    engine: str
    verdict: str  # reference | equal | deviates | failed | not compared
    reason: str = ""
    compile_s: float | None = None
    step_ms_median: float | None = None
    step_ms_p90: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    speedup: float | None = None
    speedup_min: float | None = None
    speedup_max: float | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    fallbacks: int | None = None
    max_loss_error: float | None = None
    machine: str = ""


def run(config: RunConfig) -> int:
    """Compare, print the table, write compare.csv and comparison.html. 0 if all ran and every loss agrees, else 1.

    Raises Interrupted by SIGINT or SIGTERM, when the process that trains has been ended.
    """
    with interruptible():
        return _compare(config)


def _compare(config: RunConfig) -> int:
    engines = config.compare.engines
    baseline = "eager" if "eager" in engines else engines[0]
    directory = Path(config.output_dir)
    errors: dict[str, str] = {}
    rounds = [_timed_round(config, index, errors) for index in range(config.compare.rounds)]
    losses = _losses(config, errors)
    rows = [_row(engine, baseline, rounds, losses, errors, config.compare.loss_tolerance) for engine in engines]
    _write_csv(directory / "compare.csv", rows)
    print(f"{render(rows, baseline, config)}\n{leave_page(directory)}")
    return 0 if all(row.verdict in ("reference", "equal") for row in rows) else 1


def render(rows: Sequence[Row], baseline: str, config: RunConfig) -> str:
    """The table with its notes."""
    per_second = "tokens/s" if any(row.tokens_per_s for row in rows) else "samples/s"
    header = (
        "engine",
        "compile",
        "step (median)",
        per_second,
        f"speed vs {baseline}",
        "peak memory",
        "saved",
        "max loss error",
        "verdict",
    )
    lines = [
        (
            row.engine,
            shown(format_seconds, row.compile_s or None),  # eager's 0 s is no compile time
            shown(lambda value: format_seconds(value / 1e3), row.step_ms_median),
            shown(lambda value: format_count(round(value)), row.tokens_per_s or row.samples_per_s),
            _speed(row),
            shown(format_bytes, row.peak_bytes),
            shown(format_bytes, row.saved_bytes),
            shown(lambda value: f"{value:.1e}", row.max_loss_error),
            row.verdict,
        )
        for row in rows
    ]
    return "\n".join([table(header, lines, right=range(1, 8)), "", *_notes(rows, baseline, config)])


def loss_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of any step; infinite if the lengths differ or a loss is not a number."""
    if len(losses) != len(reference) or not losses:
        return math.inf
    pairs = zip(losses, reference, strict=True)
    errors = [abs(loss - expected) / max(abs(expected), 1e-12) for loss, expected in pairs]
    return math.inf if any(math.isnan(error) for error in errors) else max(errors)


def timed_config(config: RunConfig, engine: str, index: int) -> RunConfig:
    """As configured; nothing beside the steps, and `compare.steps` measured ones after the warm-up."""
    name = "timed" if config.compare.rounds == 1 else f"timed-{index + 1}"
    directory = Path(config.output_dir)
    steps = config.measure.warmup_steps + config.compare.steps
    logger = grouped_logger(config, engine if config.compare.rounds == 1 else f"{engine}, round {index + 1}")
    return for_engine(config, engine, steps, logger=logger, output_dir=str(directory / engine / name))


def loss_config(config: RunConfig, engine: str) -> RunConfig:
    """The first `compare.loss_steps` steps, without dropout, measured by nothing."""
    model = config.recipe.model
    if any(field.name == "dropout" for field in dataclasses.fields(model)):
        model = dataclasses.replace(model, dropout=0.0)
    return for_engine(
        config,
        engine,
        config.compare.loss_steps,
        recipe=dataclasses.replace(config.recipe, model=model),
        logger=dataclasses.replace(config.logger, name="csv"),
        measure=dataclasses.replace(config.measure, memory=False),
        output_dir=str(Path(config.output_dir) / engine / "losses"),
    )


def grouped_logger(config: RunConfig, run_name: str) -> LoggerConfig:
    """Logs under `run_name`, in one group with the other runs of this task."""
    group = config.logger.group or f"{config.task}-{Path(config.output_dir).name}"
    return dataclasses.replace(config.logger, group=group, run_name=run_name)


def for_engine(config: RunConfig, engine: str, steps: int, **changes: Any) -> RunConfig:
    """The first `steps` training steps by `engine`, and nothing beside them."""
    trainer = dataclasses.replace(
        config.trainer,
        steps=steps,
        eval_every=0,
        eval_batches=1,
        save_every=0,
        keep_every=0,
        sample_bytes=0,
        sample_at_evals=False,
    )
    schedule = config.lr_schedule
    if schedule.total_steps is None and config.trainer.steps > schedule.warmup_steps:
        # The schedule of the whole run, of which these are the first steps.
        schedule = dataclasses.replace(schedule, total_steps=config.trainer.steps)
    return dataclasses.replace(
        config,
        task="train",
        resume=None,
        trainer=trainer,
        lr_schedule=schedule,
        engine=dataclasses.replace(config.engine, name=engine),
        verify=dataclasses.replace(config.verify, steps=0),
        **changes,
    )


def _timed_round(config: RunConfig, index: int, errors: dict[str, str]) -> dict[str, Summary]:
    """Each engine's summary.json of one round. The order rotates, so that no engine always runs on a warmer machine."""
    engines = config.compare.engines
    shift = index % len(engines)
    summaries = {}
    for engine in (*engines[shift:], *engines[:shift]):
        if engine not in errors:
            run_config = timed_config(config, engine, index)
            part = f"round {index + 1} of {config.compare.rounds}, {config.compare.steps} steps timed"
            errors.update(train_apart(run_config, engine, part))
            if engine not in errors:
                summary = Path(run_config.output_dir) / "summary.json"
                summaries[engine] = json.loads(summary.read_text(encoding="utf-8"))
    return summaries


def _losses(config: RunConfig, errors: dict[str, str]) -> dict[str, list[float]]:
    losses = {}
    for engine in config.compare.engines:
        if engine not in errors:
            run_config = loss_config(config, engine)
            errors.update(train_apart(run_config, engine, f"losses of {config.compare.loss_steps} steps"))
            if engine not in errors:
                losses[engine] = _read_losses(Path(run_config.output_dir) / "metrics.csv")
    return losses


def train_apart(config: RunConfig, name: str, part: str) -> dict[str, str]:
    """Train in a process of its own; {name: error} if that failed."""
    print(f"{name}: {part}", flush=True)
    with Status(name, partial(last_line, Path(config.output_dir) / LOG_FILE)):
        error = run_apart(config)
    # The weights after a few steps of a comparison are of no use, and large.
    shutil.rmtree(Path(config.output_dir) / "checkpoints", ignore_errors=True)
    return {name: error} if error else {}


def _read_losses(path: Path) -> list[float]:
    with path.open(newline="", encoding="utf-8") as file:
        return [float(row["train/loss"] or "nan") for row in csv.DictReader(file)]


def _row(
    engine: str,
    baseline: str,
    rounds: Sequence[Mapping[str, Summary]],
    losses: Mapping[str, Sequence[float]],
    errors: Mapping[str, str],
    tolerance: float,
) -> Row:
    summaries = [summaries[engine] for summaries in rounds if engine in summaries]
    ratios = [
        summaries[baseline]["step_ms_median"] / summaries[engine]["step_ms_median"]
        for summaries in rounds
        if {engine, baseline} <= summaries.keys()
        and summaries[baseline].get("step_ms_median")
        and summaries[engine].get("step_ms_median")
    ]
    error = None
    if engine in losses and baseline in losses:
        error = loss_error(losses[engine], losses[baseline])
    verdict, reason = _verdict(engine, baseline, error, errors, tolerance)
    return Row(
        engine,
        verdict,
        reason,
        # The first round compiles from scratch; later ones may find caches.
        compile_s=summaries[0].get("compile_s") if summaries else None,
        **{name: _median(summaries, name) for name in MEDIAN_FIGURES},
        speedup=statistics.median(ratios) if ratios else None,
        speedup_min=min(ratios, default=None),
        speedup_max=max(ratios, default=None),
        max_loss_error=error,
        machine=summaries[0].get("machine", "") if summaries else "",
    )


def _verdict(
    engine: str, baseline: str, error: float | None, errors: Mapping[str, str], tolerance: float
) -> tuple[str, str]:
    """(verdict, reason): the reason is empty where the verdict says all."""
    if engine in errors:
        return "failed", errors[engine]
    if engine == baseline:
        # A reference that is not a number compares with nothing.
        return ("reference", "") if error == 0 else ("failed", "its own losses are not finite")
    if error is None:
        return "not compared", f"{baseline} failed"
    if error <= tolerance:
        return "equal", ""
    return "deviates", f"losses differ by {error:.1e}, allowed is compare.loss_tolerance={tolerance:g}"


def _median(summaries: Sequence[Summary], name: str) -> Any:
    values = [summary[name] for summary in summaries if summary.get(name) is not None]
    return median_figure(name, values)


def _notes(rows: Sequence[Row], baseline: str, config: RunConfig) -> list[str]:
    compare = config.compare
    times = "1 round" if compare.rounds == 1 else f"{compare.rounds} rounds (median; lowest to highest in brackets)"
    notes = [
        measured_on(row.machine for row in rows),
        f"Timed: {times} of {compare.steps} steps after {config.measure.warmup_steps} of warm-up, each engine in a "
        f"process of its own.{_SPREAD if compare.rounds > 1 else _NO_SPREAD}",
        f"Losses: {compare.loss_steps} steps with dropout off, against {baseline}'s; equal means within "
        f"{compare.loss_tolerance:g}, relative.",
    ]
    notes += [f"{row.engine} {row.verdict}: {row.reason}" for row in rows if row.reason]
    notes += [
        f"{row.engine}: {format_count(row.fallbacks)} calls ran eagerly; see its compile_report.html"
        for row in rows
        if row.fallbacks
    ]
    return notes


def _speed(row: Row) -> str:
    if row.speedup is None:
        return "-"
    spread = "" if row.speedup_min == row.speedup_max else f" [{row.speedup_min:.2f}, {row.speedup_max:.2f}]"
    level = spread and (row.speedup_min or 0) <= 1 <= (row.speedup_max or 0)
    return f"{row.speedup:.2f}x{spread}{' level' if level else ''}"


def measured_on(machines: Iterable[str]) -> str:
    """The line that says where figures come from; more than one machine, or day, is said too."""
    distinct = list(dict.fromkeys(filter(None, machines)))
    return f"Measured on {'; '.join(distinct)}." if distinct else "Nothing was measured."


def shown(write: Callable[[Any], str], value: float | None) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else write(value)


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    columns = [field.name for field in dataclasses.fields(Row)]
    write_result(path, csv_text(columns, map(dataclasses.astuple, rows)))
