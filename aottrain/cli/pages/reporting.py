"""`python -m aottrain report FOLDER...`: the page of runs that are there already."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from aottrain.cli.lock import GONE, is_at_work
from aottrain.errors import ConfigError
from aottrain.report.runs.drawing.pages import write_page
from aottrain.report.runs.folders import collect
from aottrain.report.runs.plots import check_installed, write_plots
from aottrain.report.runs.reading import Run, read_run

USAGE = """\
python -m aottrain report FOLDER... [-o FILE] [--png]

Writes a page of the runs in the folders: run.html of one run, comparison.html of task=compare, sweep.html of a sweep or
of any folder with several runs, runs.html here of several folders. -o FILE: there instead. --png: the main plots, too,
beside the page (needs matplotlib: pip install 'aottrain[plots]')."""


def report(arguments: list[str]) -> int:
    """The exit code: 0, or 2 with a line for each folder that holds no run. Raises ConfigError: unknown flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output", "-o", type=Path)
    parser.add_argument("--png", action="store_true")
    flags = parsed(parser, arguments, USAGE)
    if flags.help:
        print(USAGE)
        return 0
    wrong = [line for folder in flags.folders if (line := obstacle(folder))]
    if wrong or not flags.folders:
        print("\n".join(f"aottrain report: {line}" for line in wrong or ["give a folder; see --help"]), file=sys.stderr)
        return 2
    if flags.png:
        check_installed()
    try:
        path = write_page(flags.folders, flags.output, _read)
        plots = write_plots(collect(flags.folders).runs, path.parent) if flags.png and path else []
    except OSError as error:
        where = error.filename or flags.output or flags.folders[0]
        print(f"aottrain report: {where}: cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    for each in (path, *plots):
        print(each)
    return 0


def _read(folder: Path) -> Run:
    """A run; of one whose process is gone without a word that is told."""
    run = read_run(folder)
    if run.status != "running" or is_at_work(folder) is not False:
        return run
    return replace(run, summary={**run.summary, "status": GONE})


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str], usage: str) -> argparse.Namespace:
    """The flags of a subcommand, with `folders` and `help`. ConfigError names an unknown one, and how it is used."""
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("folders", nargs="*", type=Path)

    def refuse(message: str) -> None:
        raise ConfigError(f"{message} (usage: {usage.splitlines()[0]})")

    parser.error = refuse  # type: ignore[assignment, method-assign]
    return parser.parse_intermixed_args(list(arguments))


def obstacle(folder: Path) -> str:
    """Why there is nothing to show of a folder; "" where there is."""
    if not folder.is_dir():
        return f"{folder}: {'is a file, not the folder of a run' if folder.exists() else 'no such folder'}"
    return "" if collect([folder]).runs else f"{folder}: holds no run: no summary.json or metrics.csv is in it or below"
