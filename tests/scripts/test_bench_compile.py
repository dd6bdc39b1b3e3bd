"""The benchmark of compiling runs: every part of a compile, cold and warm."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from aottrain.toolchain.native import find_compiler

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench_compile.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_every_part_is_measured_cold_and_warm():
    """That depth adds kernels and no functions is seen in tests/compiler/test_depth.py."""
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler on this machine")
    done = run("--layers", "2", "--width", "32")
    assert done.returncode == 0, done.stderr
    _, cold, warm = re.split(r"\n(?=cold|warm)", done.stdout)
    for table in (cold, warm):
        rows = {(cells := re.split(r"  +", line))[0]: cells[1:] for line in table.splitlines()}
        (kernels,), (functions,) = ([int(cell) for cell in rows[name] if cell] for name in ("kernels", "functions"))
        assert 0 < functions < kernels
        assert {"analyse", "trace_joint", "schedule", "make_kernels", "first step", "all"} <= rows.keys()


def test_bad_input_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_compile.py", "--layers", "0"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2 and "allowed are 1 and above" in capsys.readouterr().err
