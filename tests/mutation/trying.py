"""Show a mutant to the tests that run its block, the cheapest of each file first, until one of them fails."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.forking import run_forked
from tests.mutation.covering import Coverage, block_of
from tests.mutation.mutating import Mutant, plant

# For a block that few tests are known to run: files of tests to try as well, beside those named as the module is.
PACKAGE_TESTS = {
    "aottrain/compiler/codegen": ("compiler/codegen/test_small_kernels.py", "compiler/codegen/cpp/test_tiles.py"),
    "aottrain/compiler/lowering": ("compiler/codegen/test_small_kernels.py", "compiler/lowering/test_lowerings.py"),
    "aottrain/compiler/schedule": ("compiler/codegen/test_small_kernels.py", "compiler/schedule/test_scheduling.py"),
    "aottrain/compiler/optimizers": ("compiler/optimizers/test_optimizers.py",),
    "aottrain/compiler/partition": (
        "compiler/partition/test_strategies.py",
        "compiler/partition/budget/test_peak_budget.py",
    ),
    "aottrain/compiler": ("numerics/test_small_programs.py", "compiler/link/test_retention.py"),
    "aottrain/runtime": ("numerics/test_small_programs.py", "runtime/test_program.py"),
    "aottrain/tasks": ("tasks/test_compare.py", "tasks/test_pareto.py", "tasks/test_plan.py"),
    "aottrain/cli": ("cli/test_cli.py", "cli/test_resuming.py"),
    "aottrain": ("config/test_config.py", "cli/test_cli.py"),
    "recipes": ("recipes/test_transformer.py", "recipes/test_resnet.py", "recipes/test_llama.py"),
}  # fmt: skip
_FEW, _MOST_FILES = 5, 8

KILLED, SURVIVED, INVALID, UNSEEN = "killed", "SURVIVED", "invalid", "UNSEEN"
_OPTIONS = ["-q", "-p", "no:cacheprovider"]


@dataclass(eq=False)  # pytest keeps plugins in sets
class _First:
    """A pytest plugin: the first test that failed, with what it said."""

    failed: str = ""
    said: str = ""
    passed: list[str] = field(default_factory=list)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is not None and not isinstance(call.excinfo.value, pytest.skip.Exception):
            self.failed = self.failed or item.nodeid
            self.said = self.said or " ".join(repr(call.excinfo.value).split())[:160]
        elif call.when == "call":
            self.passed.append(item.nodeid)


@dataclass(eq=False)
class _Collected:
    """A pytest plugin: the tests that there are."""

    tests: set[str] = field(default_factory=set)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.tests.update(item.nodeid for item in items)


def load_tests(root: Path, tests: Iterable[str]) -> set[str]:
    """Import the files of these tests, and with them all that they import, once for all children. Returns all tests."""
    found = _Collected()
    files = sorted({str(root / test.split("::")[0]) for test in tests})
    with redirect_stdout(io.StringIO()):
        pytest.main([*_OPTIONS, "--rootdir", str(root), "--collect-only", *files], plugins=[found])
    return found.tests


def tests_for(root: Path, mutant: Mutant, coverage: Coverage, seconds: float) -> list[str]:
    """Tests that run its block, taking turns between their files, together of no more than these seconds."""
    line = block_of(ast.parse((root / mutant.path).read_text(encoding="utf-8")), mutant.line)
    found = coverage.of_block(mutant.module, line) if line is not None else coverage.of_module(mutant.module)
    own, turn, rank = _own_files(mutant), dict[str, int](), dict[str, float]()
    for test in found:
        file = test.split("::")[0]
        turn[file] = turn.get(file, 0) + 1
        rank[test] = turn[file] / 4 if Path(file).name in own else turn[file]
    chosen, files, total = [], set[str](), 0.0
    for test in sorted(found, key=lambda test: (rank[test], coverage.seconds[test])):
        file = test.split("::")[0]
        if file not in files and len(files) == _MOST_FILES:  # to collect a file takes time, too
            continue
        if not chosen or total + coverage.seconds[test] <= seconds:
            files.add(file)
            chosen.append(test)
            total += coverage.seconds[test]
    return chosen + (_files(root, mutant) if len(chosen) < _FEW else [])


def _files(root: Path, mutant: Mutant) -> list[str]:
    own = [
        str(path.relative_to(root))
        for path in sorted((root / "tests").rglob("test_*.py"))
        if path.name in _own_files(mutant)
    ]
    return [*own, *(f"tests/{name}" for name in PACKAGE_TESTS.get(mutant.package, ()) if f"tests/{name}" not in own)]


def _own_files(mutant: Mutant) -> set[str]:
    path = Path(mutant.path)
    return {f"test_{name}.py" for name in (path.stem, path.parent.name, f"{path.parent.name}_{path.stem}")}


def try_mutant(root: Path, mutant: Mutant, tests: Sequence[str], cpu_s: int) -> dict[str, Any]:
    if not tests:
        return {"verdict": UNSEEN, "by": "", "said": "", "tests": 0}

    def run() -> dict[str, Any]:
        import_module(mutant.module)  # which a test may import only as it runs
        if not plant(root, mutant):
            return {"verdict": INVALID, "by": "", "said": "no function has this code", "tests": 0}
        first = _First()
        options = [*_OPTIONS, "-x", "--rootdir", str(root)]
        status = pytest.main([*options, *(str(root / test) for test in tests)], plugins=[first])
        if not first.failed and status not in (0, 5):
            first.failed, first.said = (
                "the collection of tests",
                f"pytest ended with {int(status)}: a test is no longer there",
            )
        verdict = KILLED if first.failed else SURVIVED
        return {"verdict": verdict, "by": first.failed, "said": first.said, "tests": len(first.passed)}

    ended = run_forked(run, cpu_s, 8 * cpu_s)
    if ended.value is not None:
        return ended.value
    if ended.why == "out of time" and not all(
        "::" in test for test in tests
    ):  # whole files may take long by themselves
        return {"verdict": SURVIVED, "by": "", "said": f"as far as {cpu_s} s of tests go", "tests": 0}
    if ended.why.startswith("Traceback"):
        return {"verdict": INVALID, "by": "", "said": ended.why.strip().splitlines()[-1][:160], "tests": 0}
    # What never ends, or takes the process with it, is noticed by whoever runs the tests.
    return {"verdict": KILLED, "by": "the process", "said": ended.why.strip().splitlines()[-1][:160], "tests": 0}
