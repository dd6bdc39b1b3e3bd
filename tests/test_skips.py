"""What a run left out is said at its end, by workers, too."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.skips import NO_COMPILER, plain, summary

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = "from tests.skips import *\nfrom tests.skips import pytest_testnodedown\n"
TESTS = """
import pytest
def test_runs(): pass
@pytest.mark.skipif(True, reason="needs a C++ compiler")
@pytest.mark.parametrize("n", range(3))
def test_kernel(n): pass
@pytest.mark.skipif(True, reason="no CUDA device")
def test_gpu(): pass
"""


def test_reasons_are_counted():
    assert plain("Skipped: no C++ compiler on this machine") == plain("needs a C++ compiler") == NO_COMPILER
    assert summary([], []) == []
    lines = summary(["no C++ compiler"] * 2 + ["draws nothing"], ["Skipped: triton is not there"])
    assert lines[0] == "not run: 3 tests, 1 whole file"
    assert [line.strip() for line in lines[2:4]] == ["1 test: draws nothing", "1 file: triton is not there"]
    assert "2 tests" in lines[-1] and NO_COMPILER in lines[-1]


def reasons(text: str, constants: Mapping[str, str]) -> Iterator[str]:
    """Why a file's tests may be skipped, with ... for what is only known when they run; a call that gives none is
    its own text. constants: strings by the names that they are imported under."""
    tree = ast.parse(text)
    named = {name.id: node.value for node in tree.body if isinstance(node, ast.Assign)
             for name in node.targets if isinstance(name, ast.Name)}  # fmt: skip
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        word = ast.unparse(node.func).rpartition(".")[2]
        told = [item.value for item in node.keywords if item.arg == "reason"]
        if word in ("skip", "skipif", "importorskip"):
            told = told or (node.args[:1] if word == "skip" else [])
            value = named.get(told[0].id, told[0]) if told and isinstance(told[0], ast.Name) else (told or [None])[0]
            if isinstance(value, ast.Name) and value.id in constants:
                yield constants[value.id]
            else:
                yield with_gaps(value) or ast.unparse(node)


def with_gaps(node: ast.expr | None) -> str:
    """A string as it stands in a source, with ... for what is put into it; "" where it is none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return with_gaps(node.func.value).replace("{}", "...")
    if isinstance(node, ast.JoinedStr):
        return "".join(with_gaps(part) or "..." for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def row_of(reason: str) -> str:
    """What the table says for a reason: without what a person is told besides, and one row for all packages."""
    short = re.split(r" \(|: there", reason)[0]
    return "... is not installed" if re.fullmatch(r"\S+ is not installed", short) else short


def test_every_reason_stands_in_the_readme_and_none_besides():
    table = re.findall(r"^\| (.+?) \| .*\|$", (ROOT / "tests" / "README.md").read_text("utf-8").partition(
        "skipped for one of these reasons")[2], re.MULTILINE)[1:]  # fmt: skip
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path != Path(__file__):
            for reason in reasons(path.read_text("utf-8"), {"NO_COMPILER": NO_COMPILER}):
                found[plain(reason)] = str(path.relative_to(ROOT))
    assert len(found) > 20
    rows = {row_of(reason): path for reason, path in found.items()}
    assert {row: path for row, path in rows.items() if row not in table} == {}
    assert [row for row in table if row not in rows] == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("pytest.skip(WHY)", "pytest.skip(WHY)"),
        ("WHY = 'no disk'\npytest.skip(WHY)", "no disk"),
        ("pytest.importorskip('x')", "pytest.importorskip('x')"),
        ("@pytest.mark.skipif(a, reason=f'{a} is old')\ndef f(): pass", "... is old"),
        ("pytest.skip(NO)", "there is none"),
    ],
)
def test_a_reason_is_read_from_its_source(source, reason):
    assert list(reasons(source, {"NO": "there is none"})) == [reason]


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_run_says_what_it_left_out(workers, tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_none.py").write_text("import pytest\npytest.skip('not here', allow_module_level=True)\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others take seconds to import
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", workers, "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("not run: 4 tests, 1 whole file", f"3 tests: {NO_COMPILER}", "1 file: not here"):
        assert line in done.stdout, done.stdout
