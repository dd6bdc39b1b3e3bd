"""What a run left out, said at its end: how many tests for which reason, and those that want a C++ compiler in a line.

A file that skips itself as a whole is counted as one: nobody knows how many tests it has. xdist's workers keep such
files to themselves, so each tells of them when it ends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

NO_COMPILER = "there is no C++ compiler"
_ALIKE = {r".*\bC\+\+ compiler": NO_COMPILER, r".*\bCUDA device": "there is no CUDA device"}
_collected: dict[str, str] = {}  # reasons of files that skip themselves, by name


def plain(reason: str) -> str:
    """The reason without pytest's own words; one text for what tests say in several ways."""
    text = reason.removeprefix("Skipped: ")
    return next((known for pattern, known in _ALIKE.items() if re.match(pattern, text)), text)


def summary(tests: Iterable[str], files: Iterable[str]) -> list[str]:
    """Lines of the table: counts and reasons of tests, and of whole files, the most frequent first; [] for none."""
    num_tests, num_files = Counter(map(plain, tests)), Counter(map(plain, files))
    if not num_tests and not num_files:
        return []
    lines = [f"not run: {_number(num_tests.total(), 'test')}, {_number(num_files.total(), 'whole file')}"]
    lines += [f"{_number(count, 'test'):>10}: {reason}" for reason, count in num_tests.most_common()]
    lines += [f"{_number(count, 'file'):>10}: {reason}" for reason, count in num_files.most_common()]
    missed = num_tests[NO_COMPILER]
    if missed or num_files[NO_COMPILER]:
        lines.append(f"{_number(missed, 'test')} did not check generated C++: {NO_COMPILER} (g++, clang++ or CXX)")
    return lines


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _collected[report.nodeid] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["skipped_files"] = _collected


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    _collected.update(getattr(node, "workeroutput", {}).get("skipped_files", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    tests = [report.longrepr[2] for report in reports if isinstance(report, pytest.TestReport)]
    lines = summary(tests, _collected.values())
    if lines:
        terminalreporter.section("not run")
        for line in lines:
            terminalreporter.write_line(line)
