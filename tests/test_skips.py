"""What a run left out is said at its end, by workers, too."""

from __future__ import annotations

import os
import subprocess
import sys
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
