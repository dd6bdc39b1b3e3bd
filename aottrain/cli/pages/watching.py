"""`python -m aottrain watch FOLDER`: what runs there, as a table that follows the files, until all have ended."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from aottrain.cli.lock import is_at_work, is_taken
from aottrain.cli.pages.reporting import obstacle, parsed
from aottrain.cli.pages.serving import PageServer
from aottrain.explain.tables import table
from aottrain.ir.settings.files import printable
from aottrain.ir.units import format_bytes, format_count, format_seconds
from aottrain.report.runs.folders import Collection, collect
from aottrain.report.runs.reading import HELD_OUT, LOSS, METRICS, STEP_MS, SUMMARY, Run, number, read_run
from aottrain.report.runs.verdicts import last

USAGE = """\
python -m aottrain watch FOLDER [--every SECONDS] [--browser]

Shows the runs in a folder while they go on, in the terminal: steps, losses, times, memory. It ends when they have
ended, or by Ctrl-C, which leaves them alone. --browser also serves their page, on this machine alone, and prints the
address. --every: seconds between two looks at the files (2)."""

HEADER = ("run", "step", "loss", "held-out", "a step", "tokens/s", "peak", "to go", "")
_RECENT = 20  # steps that the time of a step is the median of


@dataclasses.dataclass
class Remembered:
    """Reads a run's files again only where they have changed: watching shall not cost what is watched its processor."""

    runs: dict[Path, tuple[object, Run]] = dataclasses.field(default_factory=dict)

    def __call__(self, folder: Path) -> Run:
        stamp = tuple(_stamp(folder / name) for name in (SUMMARY, METRICS))
        known = self.runs.get(folder)
        if known is None or known[0] != stamp:
            self.runs[folder] = stamp, read_run(folder)
        return self.runs[folder][1]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


def watch(arguments: list[str]) -> int:
    """The exit code: 0 when what runs there has ended, 130 at Ctrl-C, 2 where nothing has run. ConfigError: flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--browser", action="store_true")
    flags = parsed(parser, arguments, USAGE)
    if flags.help:
        print(USAGE)
        return 0
    wrong = _wrong(flags)
    if wrong:
        print(f"aottrain watch: {wrong}", file=sys.stderr)
        return 2
    try:
        with ExitStack() as inside:
            server = inside.enter_context(PageServer()) if flags.browser else None
            if server is not None:
                print(f"page: {server.address} (on this machine alone, while this runs)", flush=True)
            follow(flags.folders[0], threading.Event().wait, flags.every, server)
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def _wrong(flags: argparse.Namespace) -> str:
    """What is wrong with the flags; "" if nothing is. A folder in which a run has just begun is right."""
    if len(flags.folders) != 1:
        return "give one folder; see --help"
    if not 0.1 <= flags.every <= 3600:
        return f"--every={flags.every:g}: must be from 0.1 to 3600 seconds"
    (folder,) = flags.folders
    return "" if folder.is_dir() and is_taken(folder) else obstacle(folder)


def follow(folder: Path, wait: Callable[[float], object], every: float, server: PageServer | None = None) -> None:
    """Draw the table again and again until nothing runs there. Where the output is no terminal: at the end alone."""
    read, num_lines, is_terminal = Remembered(), 0, sys.stdout.isatty()
    while True:
        goes_on = is_running(folder, found := collect([folder], read))
        if server is not None:
            server.show(found)
        if is_terminal or not goes_on:
            drawn = drawing(found, goes_on=goes_on)
            if is_terminal:
                size = shutil.get_terminal_size()
                drawn = [line[: size.columns - 1] for line in drawn[: max(size.lines - 1, 3)]]
                up = f"\x1b[{num_lines}A" if num_lines else ""
                drawn = [up + "\x1b[J" + drawn[0], *drawn[1:]]
            print("\n".join(drawn), flush=True)
            num_lines = len(drawn)
        if not goes_on:
            return
        wait(every)


def is_running(folder: Path, found: Collection) -> bool:
    """Whether a run's or a sweep's process is at work there: it holds the lock of its folder."""
    locks = [is_at_work(folder), *(is_taken(run.folder) for run in found.runs)]
    if any(locks):
        return True
    return None in locks and any(run.status == "running" for run in found.runs)


def drawing(found: Collection, *, goes_on: bool) -> list[str]:
    """The table's lines: those that run first, then the latest."""
    if not found.runs:
        return ["nothing has been written yet"]
    runs = sorted(enumerate(found.runs), key=lambda item: (item[1].status != "running", -item[0]))
    rows = [cells(run, goes_on=goes_on) for _, run in runs]
    lines = table(HEADER, rows, right=range(1, 8)).splitlines()
    problems = [f"{run.name}: {text}" for _, run in runs for text in (run.text("error"), *run.problems) if text]
    return [*lines, *(" ".join(printable(line).split()) for line in problems[:5])]


def cells(run: Run, *, goes_on: bool) -> Sequence[str]:
    """A row. A run whose process is gone without a word is told as such."""
    total, losses = number(run.settings.get("trainer.steps")), run.metrics.get(LOSS, ())
    step = max(run.number("steps") or 0, losses[-1][0] if losses else 0)
    times = [time for _, time in run.metrics.get(STEP_MS, ())[-_RECENT:]]
    middle = statistics.median(times) / 1e3 if times else None
    left = middle * max(total - step, 0) if middle and total and run.status == "running" and goes_on else None
    status = "gone" if run.status == "running" and not goes_on else run.status
    held_out, rate = last(run.metrics.get(HELD_OUT)), last(run.metrics.get("perf/tokens_per_s"))
    peak = run.number("peak_bytes") or last(run.metrics.get("memory/peak_bytes"))
    return (
        printable(run.name, ""),
        f"{step:,.0f}/{total:,.0f}" if total else f"{step:,.0f}",
        f"{losses[-1][1]:.4f}" if losses else "-",
        "-" if held_out is None else f"{held_out:.4f}",
        "-" if middle is None else format_seconds(middle),
        "-" if rate is None else format_count(round(rate)),
        "-" if peak is None else format_bytes(peak),
        "" if left is None else format_seconds(left),
        printable(status, ""),
    )
