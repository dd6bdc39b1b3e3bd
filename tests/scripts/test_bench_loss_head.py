"""The benchmark of the loss head runs, and shows that the logits are gone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aottrain.toolchain.native import find_compiler

ROOT = Path(__file__).resolve().parents[2]


def test_every_side_is_measured(quick_children):
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler on this machine")
    sizes = ["--rows", "640", "--classes", "4096", "--width", "8", "--rounds", "1", "--threads", "1"]
    command = [sys.executable, str(ROOT / "scripts" / "bench_loss_head.py"), *sizes]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    rows = {name: line for line in done.stdout.splitlines() if (name := re.split(r"  +", line)[0])}
    assert {"eager", "aten whole", "cpp whole", "cpp chunked"} <= rows.keys()
    peaks = {name: float(re.findall(r"([\d.]+) MiB", rows[name])[0]) for name in ("eager", "cpp chunked")}
    assert peaks["cpp chunked"] < peaks["eager"] / 3
    assert "in 2 chunks of 320 of 640 rows" in done.stdout
