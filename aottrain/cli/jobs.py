"""Many runs from one command: a process per job, so that no job sees another's memory, some of them at once if asked.

A job that fails ends alone. What ran, how it ended and its main figures stand in `sweep.csv`, which is written anew
after every job; at the end `sweep.html` shows them. Ctrl-C (or SIGTERM, SIGHUP) asks the running jobs to end as they
would alone, and starts no other; so does the end of a sweep that is killed. A sweep that is gone on with runs what has
not finished.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from aottrain.config.choices import HIGHEST_IS_BEST
from aottrain.config.extensions.metrics import LOSS
from aottrain.config.launch import SWEEP
from aottrain.errors import ending_signals
from aottrain.ir.settings.files import csv_text, values_of, write_text_whole
from aottrain.ir.units import format_bytes, format_seconds
from aottrain.metrics.sinks import OWN
from aottrain.report.runs.drawing.pages import leave_page
from aottrain.report.runs.reading import number
from aottrain.report.runs.verdicts import best_shown, judge_of_all

# Of summary.json, with the heading of its column on the screen.
FIGURES = {
    "last_loss": "loss",
    "val_loss": "held-out",
    "best_val_loss": "lowest",
    "compile_s": "compiling",
    "step_ms_median": "step (median)",
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "peak_bytes": "peak",
    "saved_bytes": "saved",
}
# Of plan.json, which task=plan leaves.
PLANNED = {
    "planned_peak_bytes": "predicted peak",
    "saved_bytes": "saved",
    "recompute_percent": "recompute of the forward",
    "planned_step_s": "predicted step",
    "verdict": "fits",
    "compile_s": "compiling",
}
_COLUMNS = {**FIGURES, **PLANNED}


_LOOK_S = 0.1  # seconds between two looks at jobs that run at once


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep, to run in a process of its own."""

    number: int
    overrides: Mapping[str, str]
    """What was typed for it."""
    directory: Path
    arguments: Sequence[str]
    """Its whole command line after `python -m aottrain`."""
    goes_on: bool = False
    """Whether it has begun in its directory before."""
    judge_by: str = LOSS
    """Its trainer.judge_by."""
    prints_pages: bool = False
    """Its output goes to its log alone: the sweep's table has a line of it."""
    differing: Collection[str] = ()
    """The keys of overrides in which the jobs of the sweep differ; none where it is not known before, or one job."""

    @property
    def title(self) -> str:
        shown = {key: value for key, value in self.overrides.items() if key in self.differing or not self.differing}
        return " ".join(f"{key}={value}" for key, value in shown.items()) or "no overrides"


@dataclass
class Running:
    """The processes at hand, and the first signal that asked the sweep to end."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    signum: int | None = None

    def handle(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signum)


@dataclass
class Outcome:
    job: SweepJob
    exit_code: int | None = None
    status: str = "not run"
    figures: dict[str, Any] = field(default_factory=dict)
    recorded: str = ""
    """How it ended, as its summary says."""
    error: str = ""
    """By what, as its summary says."""

    def take_finished(self) -> None:
        """What the job's directory says of it, where it has finished there."""
        _describe(self, interrupted=False)
        if self.recorded == "finished":
            self.exit_code, self.status = 0, "finished"
        else:
            self.status, self.figures = "not run", {}


class Supply:
    """The jobs of a sweep in the order in which they run, all known before."""

    def __init__(self, jobs: Sequence[SweepJob]):
        self.outcomes = [Outcome(job) for job in jobs]
        self.waiting = list(self.outcomes)
        self.total = len(self.outcomes)

    def go_on(self) -> None:
        """With a sweep that was there: jobs that have finished in their directories are not run again."""
        for outcome in self.outcomes:
            outcome.take_finished()
        self.waiting = [outcome for outcome in self.outcomes if outcome.exit_code is None]

    def next(self) -> Outcome | None:
        """The job that is run next; None where there is none."""
        return self.waiting.pop(0) if self.waiting else None

    def ended(self, outcome: Outcome) -> None:
        """One of them has."""

    def verdict(self) -> str:
        """Lines that name the job with the lowest held-out loss, or of what all judge by the best value at the end,
        where several have one; all that have the same, as it is shown."""
        judge = judge_of_all(outcome.job.judge_by for outcome in self.outcomes)
        name = "best_val_loss" if judge.is_loss else f"{OWN}{judge.name}"
        known = {
            f"job {outcome.job.number} ({outcome.job.title})": figure
            for outcome in self.outcomes
            if (figure := number(outcome.figures.get(name))) is not None
        }
        if len(known) < 2:
            return ""
        shown, level = best_shown(known, judge)
        if len(level) == len(known):
            return f"{judge.title}: all {len(level)} jobs that have one tie, at {shown}\n"
        names = ", ".join(level)
        return f"{judge.end} {judge.title}: {shown}, {names}{' tie' if len(level) > 1 else ''}\n"


Start = Callable[[SweepJob, Running, bool], Any]


def run_sweep(
    jobs: Sequence[SweepJob] | Supply,
    directory: Path,
    parallel: int = 1,
    finished: bool = False,
    start: Start | None = None,
) -> int:
    """Run every job, `parallel` of them at once; print and write what became of each. finished: jobs that have finished
    in their directories already are not run again. start: gives what is like a process; None is a process here. Exit
    code: 0, 1 if a job failed, 128 + n at signal n.

    Of several jobs at once the output goes to their logs alone, and so do pages of any.
    """
    supply = jobs if isinstance(jobs, Supply) else Supply(jobs)
    outcomes = supply.outcomes
    directory.mkdir(parents=True, exist_ok=True)
    if finished:
        supply.go_on()
        print(f"{sum(o.exit_code == 0 for o in outcomes)} of {supply.total} jobs have finished already", flush=True)
    with _signals(Running()) as running:
        active: list[tuple[Outcome, Any]] = []
        while True:
            while running.signum is None and len(active) < parallel and (outcome := supply.next()) is not None:
                job, count = outcome.job, outcomes.index(outcome) + 1
                print(f"\n[{count}/{supply.total}] {job.title}\n      -> {job.directory}", flush=True)
                job.directory.mkdir(parents=True, exist_ok=True)  # which stays where the job is refused
                active.append((outcome, (start or _start)(job, running, parallel > 1 or job.prints_pages)))
            if not active:
                break
            for outcome, process in _wait(active, running):
                outcome.exit_code = process.returncode
                _describe(outcome, interrupted=running.signum is not None)
                supply.ended(outcome)
                _write_csv(outcomes, directory / "sweep.csv")
                if parallel > 1:
                    print(f"job {outcome.job.number} {outcome.status}", flush=True)
    if not (directory / "sweep.csv").exists() or (finished and not any(o.exit_code is None for o in outcomes)):
        _write_csv(outcomes, directory / "sweep.csv")
    all_print = bool(outcomes) and all(outcome.job.prints_pages for outcome in outcomes)
    plans = "each job's whole plan: aottrain.log and compile_report.html in its folder"
    page = plans if all_print else leave_page(directory)
    print(f"\n{table(outcomes)}\n{supply.verdict()}{directory / 'sweep.csv'}\n{page}", flush=True)
    return _report_failures(outcomes, running.signum)


def _start(job: SweepJob, running: Running, is_quiet: bool) -> subprocess.Popen[bytes]:
    # A process group of its own: Ctrl-C in a terminal goes to the whole foreground group, and the job must be told
    # once, by us. A second signal would mean "at once", and cost it its checkpoint.
    group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
    out = {"stdout": subprocess.DEVNULL} if is_quiet else {}
    again = ["resume=auto"] if job.goes_on else []
    command = [sys.executable, "-m", "aottrain", *job.arguments, *again]
    process = subprocess.Popen(command, env={**os.environ, SWEEP: str(os.getpid())}, **group, **out)
    running.processes.append(process)
    if running.signum is not None:  # it came while the process was being started
        process.send_signal(running.signum)
    return process


def _wait(active: list[tuple[Outcome, Any]], running: Running) -> list[tuple[Outcome, Any]]:
    """Those that have ended, taken from `active`; at least one."""
    if len(active) == 1:
        active[0][1].wait()
    while not (ended := [each for each in active if each[1].poll() is not None]):
        threading.Event().wait(_LOOK_S)
    for each in ended:
        active.remove(each)
        running.processes.remove(each[1])
    return ended


@contextmanager
def _signals(running: Running) -> Iterator[Running]:
    previous = {signum: signal.signal(signum, running.handle) for signum in ending_signals()}
    try:
        yield running
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _describe(outcome: Outcome, interrupted: bool) -> None:
    try:
        summary = values_of(outcome.job.directory / "summary.json")
    except (OSError, ValueError):
        summary = {}
    summary = summary if isinstance(summary, dict) else {}
    outcome.recorded, outcome.error = str(summary.get("status", "")), str(summary.get("error", ""))
    figures = summary or _planned_figures(outcome.job.directory / "plan.json")
    outcome.figures = {name: figures[name] for name in _COLUMNS if figures.get(name) is not None}
    own = summary.get("val_metrics")
    outcome.figures |= {f"{OWN}{name}": value for name, value in own.items()} if isinstance(own, dict) else {}
    if outcome.exit_code == 0:
        outcome.status = str(summary.get("status", "finished"))
    else:
        outcome.status = "interrupted" if interrupted else "failed"


def _own_names(outcomes: Sequence[Outcome]) -> list[str]:
    """The columns of the recipe's own metrics that any job has."""
    return list(dict.fromkeys(name for outcome in outcomes for name in outcome.figures if name.startswith(OWN)))


def _planned_figures(path: Path) -> dict[str, Any]:
    """What a plan comes to, of a device that is here or, by its first row, of another; {} where there is none."""
    try:
        plan = values_of(path)
    except (OSError, ValueError):
        return {}
    row = plan["rows"][0] if "rows" in plan else plan["graph"] | {"flops_per_step": plan["flops_per_step"]}
    flops = row["flops_per_step"]
    return {
        "planned_peak_bytes": row.get("allocated_peak_bytes", row.get("predicted_peak_bytes")),
        "saved_bytes": row["saved_bytes"],
        "recompute_percent": 100 * flops["recompute"] / flops["forward"] if flops["forward"] else None,
        "planned_step_s": row.get("step_s"),
        "verdict": row.get("verdict"),
        "compile_s": plan.get("compile_s"),
    }


def _write_csv(outcomes: Sequence[Outcome], path: Path) -> None:
    keys = list(dict.fromkeys(key for outcome in outcomes for key in outcome.job.overrides))
    is_planned = any(name in _COLUMNS and name not in FIGURES for outcome in outcomes for name in outcome.figures)
    names = [*(_COLUMNS if is_planned else FIGURES), *_own_names(outcomes)]
    rows = []
    for outcome in outcomes:
        overrides = [outcome.job.overrides.get(key, "") for key in keys]
        figures = [outcome.figures.get(name, "") for name in names]
        code = "" if outcome.exit_code is None else outcome.exit_code
        rows.append([outcome.job.number, outcome.status, code, *overrides, *figures, outcome.job.directory])
    write_text_whole(path, csv_text(["job", "status", "exit_code", *keys, *names, "directory"], rows))


def differing(jobs: Sequence[SweepJob]) -> list[str]:
    """The keys that jobs have been given different values of."""
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    return [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1]


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per job: what differs between the jobs, how it ended, and the figures that any of them has."""
    jobs = [outcome.job for outcome in outcomes]
    keys = differing(jobs) if len(jobs) > 1 else [key for job in jobs for key in job.overrides]
    names = [name for name in _COLUMNS if any(outcome.figures.get(name) is not None for outcome in outcomes)]
    names += _own_names(outcomes)
    if {*HIGHEST_IS_BEST} <= set(names):  # both say how fast it was
        names.remove("samples_per_s")
    rows = [["job", *keys, "status", *(_COLUMNS.get(name, name.removeprefix(OWN)) for name in names)]]
    for outcome in outcomes:
        overrides = [outcome.job.overrides.get(key, "") for key in keys]
        figures = [_figure(name, outcome.figures.get(name)) for name in names]
        rows.append([str(outcome.job.number), *overrides, outcome.status, *figures])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _figure(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if name in ("compile_s", "planned_step_s"):
        return "" if value is None else format_seconds(value)
    if name == "recompute_percent":
        return "" if value is None else f"{value:.1f} %"
    if name == "step_ms_median":
        return "" if value is None else format_seconds(value / 1e3)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _report_failures(outcomes: Sequence[Outcome], signum: int | None) -> int:
    failed = [outcome for outcome in outcomes if outcome.exit_code not in (0, None)]
    skipped = [outcome for outcome in outcomes if outcome.exit_code is None]
    for outcome in failed:
        code = outcome.exit_code
        ended = f"exit code {code}" if code is None or code >= 0 else f"ended by signal {-code}"
        job = outcome.job
        print(f"job {job.number} {outcome.status} ({job.title}): {ended}, {job.directory}", file=sys.stderr)
    for outcome in skipped:
        again = shlex.join(["python", "-m", "aottrain", *outcome.job.arguments])
        print(f"job {outcome.job.number} was not run ({outcome.job.title}): {again}", file=sys.stderr)
    if signum is not None:
        return 128 + signum
    return 1 if failed else 0
