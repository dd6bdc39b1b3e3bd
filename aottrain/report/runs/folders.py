"""Which runs a folder holds: one run, the engines of a comparison, the points of a budget plot, the jobs of a sweep."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aottrain.report.runs.reading import (
    HELD_OUT,
    LOSS,
    METRICS,
    STEP_MS,
    Run,
    command_of,
    is_run,
    read_metrics,
    read_run,
    read_summary,
    text_of,
)
from aottrain.report.runs.settings import short
from aottrain.report.runs.spread import median_figure

SWEEP, COMPARISON, PARETO = "sweep.csv", "compare.csv", "pareto.csv"
LOSSES = "losses"  # of each engine of a comparison, as its timed runs
_TIMED = re.compile(r"timed(?:-\d+)?")
_PASSED_OVER = {"wandb", "tensorboard", "mlruns", "checkpoints", "plan", "__pycache__"}
_DEPTH = 4
Read = Callable[[Path], Run]
# Of which a comparison takes the median over its rounds.
_MEDIANS = ("step_ms_median", "step_ms_p90", "tokens_per_s", "samples_per_s", "peak_bytes", "saved_bytes")


@dataclass(frozen=True)
class Collection:
    """The runs of one page."""

    kind: str
    """One of run, comparison, sweep, runs."""
    folder: Path
    runs: tuple[Run, ...]
    command: str = ""
    """What was typed to make them, where one command made them all."""
    problems: tuple[str, ...] = ()
    has_links: bool = True
    """Whether its page is seen with the files beside it."""

    @property
    def page(self) -> Path:
        """Where its page belongs."""
        name = {"run": "run.html", "comparison": "comparison.html"}.get(self.kind, "sweep.html")
        return self.folder / name


def collect(folders: Sequence[Path], read: Read = read_run) -> Collection:
    """The runs of one folder, or of several together. Where there is none, `runs` is empty. read: reads a run's."""
    found = [_collect(folder, read) for folder in folders]
    if len(found) == 1:
        return dataclasses.replace(found[0], runs=_distinct(found[0].runs))
    runs = [
        dataclasses.replace(run, name=part.folder.name if part.kind == "run" else f"{part.folder.name}/{run.name}")
        for part in found
        for run in part.runs
    ]
    problems = tuple(f"{part.folder.name}: {problem}" for part in found for problem in part.problems)
    return Collection("runs", Path(), _distinct(runs), problems=problems)


def _collect(folder: Path, read: Read) -> Collection:
    if is_comparison(folder):
        return Collection("comparison", folder, *_engines(folder, read))
    if is_run(folder):
        return Collection("run", folder, (read(folder),), command_of(folder))
    if (folder / PARETO).is_file():
        return Collection("runs", folder, *_points(folder, read))
    kind = "sweep" if (folder / SWEEP).is_file() else "runs"
    problems: list[str] = []
    jobs = _rows(folder / SWEEP, problems) if kind == "sweep" else []
    titles, told = _jobs(jobs)
    runs: list[Run] = []
    for path in _run_folders(folder, _DEPTH):
        part = _collect(path, read)
        name = titles.get(path.name, path.relative_to(folder).as_posix())
        alone = part.kind == "run"
        runs += [dataclasses.replace(run, name=name if alone else f"{name}/{run.name}") for run in part.runs]
        told.discard(path.name)
    missing = [f"job {titles.get(name, name)}: {name} has no figures of a run" for name in sorted(told, key=natural)]
    return Collection(kind, folder, tuple(runs), command_of(folder), (*problems, *missing))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """The nearest folders below that hold a run or a comparison, in the order of the numbers in their names."""
    try:
        below = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: natural(path.name))
    except OSError:
        return
    for path in below:
        if path.name in _PASSED_OVER or path.name.startswith(".") or path.is_symlink():
            continue
        if is_run(path) or is_comparison(path) or (path / PARETO).is_file():
            yield path
        elif depth > 1:
            yield from _run_folders(path, depth - 1)


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A key that sorts 2 before 10."""
    parts = re.findall(r"\d+|\D+", name)
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _jobs(rows: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], set[str]]:
    """Of a sweep's table: {folder's name: what makes it differ}, and the folders' names of the jobs that were run."""
    if not rows:
        return {}, set()
    names = list(rows[0])
    if "exit_code" not in names or "directory" not in names or "last_loss" not in names:
        return {}, set()
    keys = [key for key in names[names.index("exit_code") + 1 : names.index("last_loss")] if key]
    keys = [key for key in keys if len({row.get(key) for row in rows}) > 1]
    titles = {}
    for row in rows:
        title = " ".join(f"{name}={row[key]}" for key, name in zip(keys, short(keys), strict=True) if row.get(key))
        titles[Path(row.get("directory") or "").name] = title
    return {name: title for name, title in titles.items() if title and name}, {
        Path(row["directory"]).name for row in rows if row.get("directory") and row.get("status") != "not run"
    }


def is_comparison(folder: Path) -> bool:
    """Whether task=compare has written there, or does so now."""
    if (folder / COMPARISON).is_file():
        return True
    return any(_timed_folders(path) for path in _engine_folders(folder))


def _engine_folders(folder: Path) -> list[Path]:
    try:
        return [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []


def _timed_folders(engine: Path) -> list[Path]:
    try:
        found = [path for path in engine.iterdir() if _TIMED.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda path: natural(path.name))


def _engines(folder: Path, read: Read) -> tuple[tuple[Run, ...], str, tuple[str, ...]]:
    problems: list[str] = []
    rows = _rows(folder / COMPARISON, problems) if (folder / COMPARISON).is_file() else []
    told = {row.get("engine") or "": row for row in rows}
    here = {path.name: path for path in _engine_folders(folder) if _timed_folders(path)}
    names = [*(name for name in told if name), *(name for name in here if name not in told)]
    runs = [_engine(folder / name, told.get(name, {}), read) for name in names]
    return tuple(runs), command_of(folder), tuple(problems)


def _engine(folder: Path, row: Mapping[str, str], read: Read) -> Run:
    """One engine: times of all its rounds, the losses of the run without dropout, the verdict of the comparison."""
    timed = [read(path) for path in _timed_folders(folder)]
    if not timed:
        summary = {"engine": folder.name, "status": "failed", "error": row.get("reason") or "nothing was run"}
        return Run(folder.name, folder, summary)
    problems = [f"{run.folder.name}/{problem}" for run in timed for problem in run.problems]
    summary: dict[str, Any] = {"engine": folder.name, **timed[0].summary}
    for name in _MEDIANS:
        values = [value for run in timed if (value := run.number(name)) is not None]
        summary[name] = median_figure(name, values)
    ended = "running"
    for run in timed:
        ended = run.status if run.status in ("failed", "interrupted") else ended
    metrics = dict(timed[0].metrics)
    for name in (LOSS, HELD_OUT):  # with dropout, which differs between engines
        metrics.pop(name, None)
    losses = folder / LOSSES
    if losses.is_dir():
        told = read_summary(losses / "summary.json", problems)
        ended = str(told.get("status") or ended) if ended == "running" else ended
        columns = read_metrics(losses / METRICS, problems, ended=told.get("status") != "running")
        metrics |= {name: columns[name] for name in (LOSS, "train/grad_norm", "train/lr") if name in columns}
        if (median := summary["step_ms_median"]) is not None:  # these steps were not timed in turns; the page's figure
            metrics[STEP_MS] = [(step, median) for step, _ in metrics.get(LOSS, ())]
        summary |= {name: told.get(name) for name in ("first_loss", "last_loss", "val_loss", "steps")}
    summary["status"] = ended
    if row.get("verdict"):
        summary |= {"verdict": row["verdict"], "reason": row.get("reason") or ""}
        summary["max_loss_error"] = _float(row.get("max_loss_error"))
    rounds = tuple(times for run in timed for times in run.rounds)
    return Run(folder.name, folder, summary, metrics, timed[0].settings, rounds, tuple(problems))


def _points(folder: Path, read: Read) -> tuple[tuple[Run, ...], str, tuple[str, ...]]:
    """Of task=pareto, whose runs wait and are timed in turns: the medians of their rounds are in its table."""
    problems: list[str] = []
    runs = []
    for row in _rows(folder / PARETO, problems):
        name = row.get("name") or ""
        path = folder / name
        if not name or path.parent != folder or not is_run(path):
            problems.append(f"{PARETO}: {name or 'a row without a name'}: no run of that name lies beside it")
            continue
        own: list[str] = []
        summary = {**read_summary(path / "summary.json", own), "status": "failed" if row.get("error") else "finished"}
        summary |= {"step_ms_median": _float(row.get("step_ms_median")), "error": row.get("error") or None}
        rounds = [value for text in (row.get("round_ms") or "").split() if (value := _float(text))]
        run = read(path)
        runs.append(Run(name, path, summary, {}, run.settings, tuple((value,) for value in rounds), tuple(own)))
    return tuple(runs), command_of(folder), tuple(problems)


def _rows(path: Path, problems: list[str]) -> list[dict[str, str]]:
    """Of a table that a task wrote."""
    try:
        return list(csv.DictReader(text_of(path).splitlines()))
    except (OSError, csv.Error) as error:
        problems.append(f"{path.name}: cannot be read: {getattr(error, 'strerror', None) or error}")
        return []


def _float(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _distinct(runs: Iterable[Run]) -> tuple[Run, ...]:
    """With names of their own."""
    seen: dict[str, int] = {}
    named = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        count = seen[run.name]
        named.append(run if count == 1 else dataclasses.replace(run, name=f"{run.name} ({count})"))
    return tuple(named)
