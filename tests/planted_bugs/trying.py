"""Plant a bug and run the tests that it names: is it found, by a wrong answer or a wrong structure?"""

from __future__ import annotations

import io
import re
import traceback
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.forking import run_forked
from tests.planted_bugs.planting import MISTAKES, Bug

ROOT = Path(__file__).resolve().parents[2]
FOUND, MISSED, INVALID = "found", "NOT FOUND", "INVALID"
# A test may take so many seconds of one processor, and so many by the clock of a busy machine.
_CPU_S, _WALL_S = 240, 1200
# Errors in which broken code ends: where a comparison of texts tells of one of them, nothing was compared.
_BROKEN = (TypeError, ValueError, AttributeError, LookupError, NameError, ArithmeticError, ImportError)
_NAMES = "|".join(kind.__name__ for base in _BROKEN for kind in (base, *base.__subclasses__()))
_TOLD = re.compile(rf"(?:compiled|ran eagerly: \w+): ((?:{_NAMES}|AssertionError)\b.*)")


def breakdown(error: BaseException) -> str:
    """How code broke down, where nothing was compared; "" where an answer or a structure is said to be wrong."""
    from aottrain.errors import VerificationError

    if not isinstance(error, AssertionError | pytest.fail.Exception | VerificationError):
        return repr(error)[:300]
    last = traceback.extract_tb(error.__traceback__)[-1].filename if error.__traceback__ else ""
    if isinstance(error, AssertionError) and Path(last).is_relative_to(ROOT / "aottrain"):
        return f"an assertion inside of the project, {Path(last).name}: {error}"[:300]
    told = _TOLD.search(str(error))
    return told[1] if told else ""


@dataclass(eq=False)  # pytest keeps plugins in sets
class Watcher:
    """A pytest plugin: how each test ended; "" for one that passed, else how it broke down or FOUND."""

    ended: dict[str, str] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        self.ended.setdefault(item.nodeid, "")
        if call.excinfo is None:
            return
        error = call.excinfo.value
        if isinstance(error, pytest.skip.Exception):
            self.ended[item.nodeid] = "skipped"
        elif not self.ended[item.nodeid]:
            where = "" if call.when == "call" else f"in {call.when}: "
            broken = breakdown(error)
            self.ended[item.nodeid] = f"{where}{broken}" if broken or where else FOUND
            self.details.append(" ".join(str(error).split())[:200])


_OPTIONS = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]


def load_tests(bugs: Iterable[Bug]) -> None:
    """Import the test files that the bugs name, once for all children."""
    files = {str(ROOT / test.split("::")[0]) for bug in bugs for test in bug.tests}
    with redirect_stdout(io.StringIO()):
        pytest.main([*_OPTIONS, "--collect-only", *sorted(files)])


def run_tests(bug: Bug, planted: bool) -> dict[str, Any]:
    """In this process, which is spoilt by it."""
    if planted:
        bug.plant(pytest.MonkeyPatch())
    watcher = Watcher()
    pytest.main([*_OPTIONS, *(str(ROOT / test) for test in bug.tests)], plugins=[watcher])
    return {"ended": watcher.ended, "details": watcher.details, "mistakes": MISTAKES}


def try_bug(bug: Bug, planted: bool = True) -> tuple[str, str]:
    """(FOUND, MISSED or INVALID, why). With planted=False the tests alone: they have to be missed by nothing."""
    done = run_forked(lambda: run_tests(bug, planted), _CPU_S, _WALL_S)
    if done.value is None:
        return INVALID, done.why.strip().splitlines()[-1]
    ended, details, mistakes = (done.value[key] for key in ("ended", "details", "mistakes"))
    for test in bug.tests:
        # A name without parameters stands for all of them, of which one has to fail.
        own = {name: how for name, how in ended.items() if name == test or name.startswith(test + "[")}
        if not own or set(own.values()) == {"skipped"}:
            return INVALID, f"no such test here: {test}"
        if not planted:
            if set(own.values()) - {"", "skipped"}:
                return INVALID, f"fails without it: {test}: {details[:1]}"
        elif FOUND not in own.values():
            broken = [how for how in own.values() if how not in ("", "skipped")]
            return (INVALID, f"breaks down in {test}: {broken[0]}") if broken else (MISSED, f"by {test}")
    if planted and mistakes:
        return INVALID, f"the plant itself breaks down: {mistakes[0]}"
    return FOUND, details[0] if details else ""
