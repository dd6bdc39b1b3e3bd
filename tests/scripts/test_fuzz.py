"""scripts/fuzz.py: counts and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fuzz.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=plain, capture_output=True, text=True, check=False)


def test_programs_are_counted():
    done = run("--count", "2", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert "2/2 after " in done.stdout and "next seed 3: " in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA is there, and Triton compiles for it")
def test_triton_without_its_interpreter_is_one_line_and_exit_code_2():
    done = run("--kernel", "triton", "--count", "1")
    assert done.returncode == 2 and done.stdout == ""
    assert "TRITON_INTERPRET=1" in done.stderr and len(done.stderr.splitlines()) == 1
