"""Training runs, each in a process of its own, that make steps when they are told to: so that several take turns.

A run builds its job, compiles, warms up and measures its peak; then it waits. Timed a few steps at a time, one run
after the other, all see the same states of the machine: ratios within a round hold where absolute times drift.

The two sides talk in lines: a number of steps goes in; what comes out is JSON, first the summary, then lists of
milliseconds. Everything else that the process prints is in log.txt in its output directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aottrain.config.extensions.recipes import program_errors
from aottrain.config.launch import end_with_parent
from aottrain.config.run import RunConfig
from aottrain.errors import AottrainError
from aottrain.metrics.sinks import write_result, write_summary
from aottrain.report import html
from aottrain.tasks.building.build import build_job
from aottrain.tasks.measuring.determinism import as_deterministic_as_asked
from aottrain.tasks.measuring.worker import CONFIG_FILE, LOG_FILE, dump, end, last_words, load
from aottrain.tasks.summary import compile_figures, first_summary, report_figures
from aottrain.trainer.job import Job
from aottrain.trainer.loop import take_step
from aottrain.trainer.meters import History, StepMeter
from aottrain.trainer.optim import learning_rate, set_learning_rate
from aottrain.trainer.preparing import prepare, schedule_steps, start_streams


class RunError(AottrainError):
    """A timed run ended by itself; the message is the last line that it printed."""


class TimedRun:
    """This side's end of one run. The process starts with `start` and lives until `close`.

    command: runs `serve` at the other end. log: a file for all else that it prints.
    """

    def __init__(self, command: Sequence[str], log: Path):
        self.command, self.log = command, log
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Mapping[str, Any]:
        """Its summary: compiled, warmed up, peak measured. Raises RunError."""
        self.open()
        return self.answer()

    def open(self) -> None:
        """Start the process; `answer` then waits for its summary."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w", encoding="utf-8") as log:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=log, text=True)

    def time(self, steps: int) -> list[float]:
        """Milliseconds of each of the next `steps` steps, after one that is not timed. Raises RunError."""
        process = self._running()
        with suppress(BrokenPipeError):  # it has ended, and no answer will come: that is told below
            print(steps, file=process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """End the process: it stops when no order can come any more; by a signal, then by force, where that takes
        long."""
        if self._process is not None:
            process, self._process = self._process, None
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=30)
            finally:
                end(process)

    def answer(self) -> Any:
        """What the process says next. Raises RunError where it ends instead."""
        process = self._running()
        try:
            line = process.stdout.readline() if process.stdout else ""
        except BaseException:  # a signal to us: nobody waits for the answer any more
            self._process = None
            end(process)
            raise
        if not line:
            code, self._process = process.wait(), None
            raise RunError(last_words(self.log, code))
        return json.loads(line)

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RunError("the run has ended")
        return self._process


def timed_training(config: RunConfig) -> TimedRun:
    """A training run as configured, in its output directory."""
    directory = Path(config.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    dump(config, directory / CONFIG_FILE)
    command = [sys.executable, "-m", "aottrain.tasks.measuring.runs_in_turns", str(directory / CONFIG_FILE)]
    return TimedRun(command, directory / LOG_FILE)


def serve(begin: Callable[[], tuple[Mapping[str, Any], Callable[[int], list[float]]]]) -> int:
    """The other end: `begin()` gives the summary and the function that makes steps. Returns the exit code."""
    end_with_parent()
    # Libraries write to file descriptor 1, whatever sys.stdout is: the answers get a descriptor of their own.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        try:
            summary, take = begin()
            print(json.dumps(summary), file=answers, flush=True)
            for order in sys.stdin:
                print(json.dumps(take(int(order) + 1)[1:]), file=answers, flush=True)
        except AottrainError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
    return 0


class Steps:
    """The training loop, left after every step."""

    def __init__(self, config: RunConfig, job: Job):
        self.config, self.job = config, job
        self.meter = StepMeter(job, config.measure, 1, config.measure.warmup_steps + 1)
        self.history = History()
        self.total_steps = schedule_steps(config, None)
        self.done = 0

    def take(self, count: int) -> list[float]:
        """Make `count` steps; the milliseconds of those that were timed, which the one under the profiler is not."""
        first = self.done + 1
        for step in range(first, first + count):
            lr = learning_rate(step, self.config.optimizer.lr, self.config.lr_schedule, self.total_steps)
            set_learning_rate(self.job.optimizer, lr)
            micro_batches = self.job.batches.at(step)
            with self.meter.measure(step, micro_batches):
                take_step(self.job, step, lr, micro_batches, self.config.optimizer.clip_norm, self.history, logs=False)
            self.done = step
        self.history.read()
        times = self.meter.timer.read()
        return [times[step] for step in range(first, first + count) if step in times]


def begin_training(config: RunConfig) -> tuple[Mapping[str, Any], Callable[[int], list[float]]]:
    """Build, compile, warm up, measure the peak; leaves summary.json and, of our engine, the compile report."""
    job = build_job(config)
    directory = Path(config.output_dir)
    summary = first_summary(config, job)
    summary["compile_s"], summary["compile_peak_bytes"] = prepare(job)
    summary.update(compile_figures(job, summary))
    start_streams(config.seed, None)
    steps = Steps(config, job)
    steps.take(config.measure.warmup_steps + 1)
    summary.update(report_figures(job.step.report, summary), peak_bytes=steps.meter.peak_bytes, steps=steps.done)
    write_summary(directory / "summary.json", summary)
    if job.step.report is not None:
        write_result(directory / "compile_report.html", html.render(job.step.report, summary))
    return summary, steps.take


def main(path: Path) -> int:
    config = load(path)

    def begin() -> tuple[Mapping[str, Any], Callable[[int], list[float]]]:
        with program_errors(config):
            return begin_training(config)

    with as_deterministic_as_asked(config):
        return serve(begin)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
