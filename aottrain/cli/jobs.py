"""Many runs from one command: a process per job, one after the other, so that no job sees another's memory or caches.

A job that fails ends alone. What ran, how it ended and its main figures stand in `sweep.csv`, which is written anew
after every job; at the end `sweep.html` shows them. Ctrl-C (or SIGTERM) asks the running job to end as it would alone,
and starts no other.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from aottrain.ir.units import format_bytes, format_seconds
from aottrain.report.runs.drawing.pages import leave_page

# Of summary.json, with the heading of its column on the screen.
FIGURES = {
    "last_loss": "loss",
    "step_ms_median": "step (median)",
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "peak_bytes": "peak",
    "saved_bytes": "saved",
}


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep, to run in a process of its own."""

    number: int
    overrides: Mapping[str, str]
    """What makes this job differ, as typed."""
    directory: Path
    arguments: Sequence[str]
    """Its whole command line after `python -m aottrain`."""

    @property
    def title(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.overrides.items()) or "no overrides"


@dataclass
class Running:
    """The process at hand, and the first signal that asked the sweep to end."""

    process: subprocess.Popen[bytes] | None = None
    signum: int | None = None

    def handle(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signum)


@dataclass
class Outcome:
    job: SweepJob
    exit_code: int | None = None
    status: str = "not run"
    figures: dict[str, Any] = field(default_factory=dict)


def run_sweep(jobs: Sequence[SweepJob], directory: Path) -> int:
    """Run every job; print and write what became of each. Exit code: 0, 1 if a job failed, 128 + n at signal n."""
    outcomes = [Outcome(job) for job in jobs]
    directory.mkdir(parents=True, exist_ok=True)
    with _signals(Running()) as running:
        for count, outcome in enumerate(outcomes, 1):
            if running.signum is not None:
                break
            print(f"\n[{count}/{len(jobs)}] {outcome.job.title}\n      -> {outcome.job.directory}", flush=True)
            outcome.exit_code = _run(outcome.job, running)
            _describe(outcome, interrupted=running.signum is not None)
            _write_csv(outcomes, directory / "sweep.csv")
    print(f"\n{table(outcomes)}\n{directory / 'sweep.csv'}\n{leave_page(directory)}", flush=True)
    return _report_failures(outcomes, running.signum)


def _run(job: SweepJob, running: Running) -> int:
    # A process group of its own: Ctrl-C in a terminal goes to the whole foreground group, and the job must be told
    # once, by us. A second signal would mean "at once", and cost it its checkpoint.
    group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
    running.process = subprocess.Popen([sys.executable, "-m", "aottrain", *job.arguments], **group)
    if running.signum is not None:  # it came while the process was being started
        running.process.send_signal(running.signum)
    return running.process.wait()


@contextmanager
def _signals(running: Running) -> Iterator[Running]:
    previous = {signum: signal.signal(signum, running.handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield running
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _describe(outcome: Outcome, interrupted: bool) -> None:
    try:
        summary = json.loads((outcome.job.directory / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    outcome.figures = {name: summary[name] for name in FIGURES if summary.get(name) is not None}
    if outcome.exit_code == 0:
        outcome.status = str(summary.get("status", "finished"))
    else:
        outcome.status = "interrupted" if interrupted else "failed"


def _write_csv(outcomes: Sequence[Outcome], path: Path) -> None:
    keys = list(dict.fromkeys(key for outcome in outcomes for key in outcome.job.overrides))
    part = path.with_suffix(".csv.part")
    with open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["job", "status", "exit_code", *keys, *FIGURES, "directory"])
        for outcome in outcomes:
            overrides = [outcome.job.overrides.get(key, "") for key in keys]
            figures = [outcome.figures.get(name, "") for name in FIGURES]
            code = "" if outcome.exit_code is None else outcome.exit_code
            writer.writerow([outcome.job.number, outcome.status, code, *overrides, *figures, outcome.job.directory])
    os.replace(part, path)


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per job: what differs between the jobs, how it ended, and the figures that any of them has."""
    keys = list(dict.fromkeys(key for outcome in outcomes for key in outcome.job.overrides))
    if len(outcomes) > 1:
        keys = [key for key in keys if len({outcome.job.overrides.get(key) for outcome in outcomes}) > 1]
    names = [name for name in FIGURES if any(outcome.figures.get(name) is not None for outcome in outcomes)]
    if {"tokens_per_s", "samples_per_s"} <= set(names):
        names.remove("samples_per_s")
    rows = [["job", *keys, "status", *(FIGURES[name] for name in names)]]
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
