"""A run's files, read for showing: what is damaged or half written costs a line on the page, never the page."""

from __future__ import annotations

import csv
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from aottrain.ir.settings.files import text_of, values_of, yaml_of
from aottrain.metrics.sinks import COLUMNS, is_own

SUMMARY, METRICS, SAMPLE, REPORT = "summary.json", "metrics.csv", "sample.txt", "compile_report.html"
SETTINGS = (Path("run_config.json"), Path(".hydra", "config.yaml"))
OVERRIDES = Path(".hydra", "overrides.yaml")
_LAST_STEP = 2**53  # beyond it two whole numbers in turn are one float
_MOST_OWN = 20
LOSS, HELD_OUT, STEP_MS = "train/loss", "val/loss", "perf/step_ms"

Points = Sequence[tuple[float, float]]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast


@dataclass(frozen=True)
class Run:
    """What a run has left so far."""

    name: str
    """On the page; one of its own."""
    folder: Path
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Of summary.json; empty where that cannot be read."""
    metrics: Mapping[str, Points] = field(default_factory=dict)
    """Of metrics.csv: (step, value) of each column, as far as there are values, which may be infinite or not a
    number."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The configuration, as {"section.key": value}."""
    rounds: tuple[tuple[float, ...], ...] = ()
    """Milliseconds of the timed steps after the warm-up, of each time that they were measured."""
    problems: tuple[str, ...] = ()
    """What could not be read, a line each."""

    def number(self, name: str) -> float | None:
        """A figure of the summary; None where there is none that is finite."""
        return number(self.summary.get(name))

    def text(self, name: str) -> str:
        """A word of the summary, "" where there is none."""
        value = self.summary.get(name)
        return value if isinstance(value, str) else ""

    @property
    def loss(self) -> float | None:
        """The last one. A summary has it when the run has ended; before that it is that of the last row."""
        points = self.metrics.get(LOSS)
        known = self.number("last_loss")
        return number(points[-1][1]) if known is None and points else known

    @property
    def engine(self) -> str:
        return self.text("engine") or str(self.settings.get("engine.name") or "")

    @property
    def status(self) -> str:
        """One of running, finished, interrupted, failed; "unknown" where nothing says so."""
        return self.text("status") or "unknown"


def number(value: Any) -> float | None:
    """`value`, if it is a finite number."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else None


def is_run(folder: Path) -> bool:
    """Whether a run has written there."""
    return (folder / SUMMARY).is_file() or (folder / METRICS).is_file()


def read_run(folder: Path, name: str = "") -> Run:
    """All that the folder says. It never raises for what a file contains."""
    problems: list[str] = []
    summary = read_summary(folder / SUMMARY, problems)
    settings = read_settings(folder, problems)
    metrics = read_metrics(folder / METRICS, problems, ended=summary.get("status") != "running")
    warmup = number(settings.get("measure.warmup_steps")) or 0
    median = number(summary.get("step_ms_median"))
    times = timed(metrics, int(warmup)) or ((median,) if median else ())
    return Run(name or folder.name, folder, summary, metrics, settings, (times,) if times else (), tuple(problems))


def timed(metrics: Mapping[str, Points], warmup_steps: int) -> tuple[float, ...]:
    """The step times that the run's own median is of: without the warm-up, which is at most half of them."""
    values = [value for _, value in metrics.get(STEP_MS, ()) if math.isfinite(value)]
    return tuple(values[min(max(warmup_steps, 0), len(values) // 2) :])


def read_summary(path: Path, problems: list[str]) -> Mapping[str, Any]:
    """A mapping; what is wrong with the file is added to `problems`."""
    try:
        summary = values_of(path)
    except FileNotFoundError:
        problems.append(f"{path.name}: there is none")
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: cannot be read: {_why(error)}")
    else:
        if isinstance(summary, dict):
            return summary
        problems.append(f"{path.name}: is not a summary, but a {type(summary).__name__}")
    return {}


def read_settings(folder: Path, problems: list[str]) -> dict[str, Any]:
    """The configuration that the run left, flat; {} where it left none."""
    path = next((folder / name for name in SETTINGS if (folder / name).is_file()), None)
    if path is None:
        return {}
    try:
        loaded = values_of(path) if path.suffix == ".json" else yaml.load(yaml_of(path), _Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problems.append(f"{path.relative_to(folder)}: cannot be read: {_why(error)}")
        return {}
    if not isinstance(loaded, dict):
        problems.append(f"{path.relative_to(folder)}: is not a configuration")
        return {}
    return flat(loaded)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return leaves


def read_metrics(path: Path, problems: list[str], *, ended: bool = True) -> dict[str, list[tuple[float, float]]]:
    """The columns. A last line that is not whole is left out; of a run that has `ended` that is a problem, as is a row
    that is none."""
    try:
        text = text_of(path)
    except OSError as error:
        problems.append(f"{path.name}: {'there is none' if not path.exists() else f'cannot be read: {_why(error)}'}")
        return {}
    whole, _, rest = text.rpartition("\n")
    bad = 1 if rest and ended else 0
    columns: dict[str, list[tuple[float, float]]] = {}
    try:
        rows = csv.reader(whole.splitlines())
        names = next(rows, [])
        if "step" not in names:
            problems.append(f"{path.name}: is not a table of steps")
            return {}
        places = [(name, names.index(name)) for name in ("step", *COLUMNS[1:]) if name in names]
        places += [(name, at) for at, name in enumerate(names) if is_own(name)][:_MOST_OWN]
        for row in rows:
            bad += len(row) != len(names) or not _add(row, places, columns)
    except csv.Error as error:
        problems.append(f"{path.name}: cannot be read further: {error}")
    if bad:
        count = "1 row cannot be read and is" if bad == 1 else f"{bad} rows cannot be read and are"
        problems.append(f"{path.name}: {count} left out")
    return columns


def own_names(runs: Iterable[Run]) -> list[str]:
    """Columns of recipes' own metrics that any of the runs has."""
    return list(dict.fromkeys(name for run in runs for name in run.metrics if is_own(name)))


def _add(row: Sequence[str], places: Sequence[tuple[str, int]], columns: dict[str, list[tuple[float, float]]]) -> bool:
    """Whether it was a row of figures, and has been added. places: of the columns, the step's first."""
    try:
        step, *values = [float(text) if (text := row[at]) else None for _, at in places]
    except ValueError:
        return False
    if step is None or not 0 <= step <= _LAST_STEP or not step.is_integer():
        return False
    for (name, _), value in zip(places[1:], values, strict=True):
        if value is not None:
            columns.setdefault(name, []).append((step, value))
    return True


def command_of(folder: Path) -> str:
    """What was typed to make it, as far as it is recorded; "" where it is not."""
    try:
        overrides = yaml.load(yaml_of(folder / OVERRIDES), _Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return ""
    if not isinstance(overrides, list):
        return ""
    typed = [str(item) for item in overrides if not str(item).startswith(("hydra.", "logger.group="))]
    return " ".join(["python -m aottrain", *map(shlex.quote, typed)])


def _why(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:160]
