"""The benchmark of compiling runs: every part of a compile, cold and warm."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from aottrain.toolchain.native import find_compiler

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench_compile.py"


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """The script in this process, but for what it starts. Its exit code."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return ended.value.code


def test_every_part_is_measured_cold_and_warm(quick_children, monkeypatch, capsys):
    """That depth adds kernels and no functions is seen in tests/compiler/test_depth.py."""
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler on this machine")
    assert run(monkeypatch, "--layers", "2", "--width", "32") == 0
    _, cold, warm = re.split(r"\n(?=cold|warm)", capsys.readouterr().out)
    for table in (cold, warm):
        rows = {(cells := re.split(r"  +", line))[0]: cells[1:] for line in table.splitlines()}
        (kernels,), (functions,) = ([int(cell) for cell in rows[name] if cell] for name in ("kernels", "functions"))
        assert 0 < functions < kernels
        assert {"analyse", "trace_joint", "schedule", "make_kernels", "first step", "all"} <= rows.keys()


def test_bad_input_is_refused(monkeypatch, capsys):
    assert run(monkeypatch, "--layers", "0") == 2
    assert "allowed are 1 and above" in capsys.readouterr().err
