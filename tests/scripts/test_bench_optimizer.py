"""The benchmark of optimizer steps runs, with every side and the limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aottrain.toolchain.native import find_compiler
from tests.sampling import WHOLE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("optimizer", "sides"), [("adamw", 4), pytest.param("lion", 2, marks=WHOLE)])
def test_every_side_is_measured(quick_children, optimizer, sides):
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler on this machine")
    sizes = ["--layers", "1", "--width", "8", "--vocab", "20", "--rounds", "2", "--threads", "1"]
    command = [sys.executable, str(ROOT / "scripts" / "bench_optimizer.py"), *sizes, "--optimizer", optimizer]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    names = [
        line.split()[0] for line in done.stdout.splitlines() if line[:1].isalpha() and "ours" not in line.split()[1:]
    ]
    assert (names.count("ours"), names.count("limit")) == (2, 1)  # of the GPT's tensors, and of small ones
    assert len([name for name in names if name in ("loop", "foreach", "fused", "ours")]) == 2 * sides
    assert "16 parameters in each of 16 tensors" in done.stdout
