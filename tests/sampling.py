"""Of what the tests could try a share is run, chosen by names and numbers; `bash scripts/test.sh --whole` runs all.

What is left to the whole run are further combinations (of a program and a budget, of a case and a front end, of an op
and a type): each program, budget, case, front end, op and type is in the sample. A test that a command names by its
node id is run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

COMMAND = "bash scripts/test.sh --whole"
WHOLE = pytest.mark.whole
_left: set[str] = set()  # node ids


def crossed(*axes: Iterable[Any], one_in: int) -> list[Any]:
    """Parameters: every combination, of which one in so many is sampled, so that each value meets others in turn."""
    columns = [list(axis) for axis in axes]
    parameters, sampled = [], set()
    for numbered in itertools.product(*(enumerate(axis) for axis in columns)):
        places, values = zip(*numbered, strict=True)
        is_sampled = sum(places) % one_in == 0
        sampled.update(enumerate(places) if is_sampled else ())
        parameters.append(pytest.param(*values, marks=[] if is_sampled else [WHOLE]))
    assert len(sampled) == sum(map(len, columns)), "a value is in no combination of the sample"
    return parameters


def thinned(values: Iterable[Any], one_in: int) -> list[Any]:
    """Parameters: one in so many is sampled, where another test tries each of them."""
    return [pytest.param(value, marks=[WHOLE] * (place % one_in > 0)) for place, value in enumerate(values)]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("whole"):
        return
    named = [argument.replace("\\", "/") for argument in config.args if "::" in argument]
    left = [item for item in items if item.get_closest_marker("whole") and not _is_named(item.nodeid, named)]
    if left:
        nodeids = {item.nodeid for item in left}
        _left.update(nodeids)
        items[:] = [item for item in items if item.nodeid not in nodeids]
        config.hook.pytest_deselected(items=left)


def _is_named(nodeid: str, named: Iterable[str]) -> bool:
    return any(argument.endswith(nodeid) for argument in named)


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether all is to be tried."""
    return request.config.getoption("whole")


def record_sample(record: Callable[[str, object], None], what: str, count: int, total: int, command: str) -> None:
    """To be said at the end. record: the fixture record_property."""
    record("sampled", f"{count} of {total} {what}; all: {command}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    ran = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    lines = [text for report in ran for name, text in getattr(report, "user_properties", ()) if name == "sampled"]
    if _left:
        lines = [f"all but {len(_left)} combinations of what is tried; all: {COMMAND}", *lines]
    if lines:
        terminalreporter.section("sampled")
        for line in dict.fromkeys(lines):
            terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_to_the_whole_run"] = sorted(_left)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    _left.update(getattr(node, "workeroutput", {}).get("left_to_the_whole_run", []))
