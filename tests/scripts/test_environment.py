"""scripts/environment.sh: a torch that is not taken is refused before anything is fetched."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")
@pytest.mark.parametrize(("asked", "is_taken"), [
    ("torch==2.13.0", True), ("torch==2.13.0+cpu", True), ("torch==2.11.0", True), ("torch", True),
    ("/some/folder/torch-2.12.0-cp311.whl", True), ("torch==2.15.0", False), ("torch==2.10.0", False),
])  # fmt: skip
def test_a_torch_that_is_not_taken_is_one_line(asked, is_taken):
    program = f'source scripts/environment.sh; python="{sys.executable}"; check_torch; echo goes on'
    environment = {**os.environ, "AOTTRAIN_TORCH": asked}
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    if is_taken:
        assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
    else:
        says = f"aottrain: AOTTRAIN_TORCH={asked}: aottrain takes torch>=2.11,<=2.13.0 (pyproject.toml)\n"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", says)
