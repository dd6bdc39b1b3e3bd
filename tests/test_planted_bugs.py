"""Is the suite able to fail? A sample of the planted bugs, each of which ordinary tests have to see.

All of them: `python scripts/planted.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aottrain.errors import VerificationError
from tests.forking import run_forked
from tests.planted_bugs import planting
from tests.planted_bugs.trying import FOUND, INVALID, MISSED, breakdown, try_bug

ROOT = Path(__file__).resolve().parent.parent
BUGS = planting.all_bugs()
AREAS = sorted({bug.area for bug in BUGS.values()})


@pytest.mark.parametrize("area", AREAS)
def test_a_sample_is_found(area):
    """In a process of its own: it forks, and may have run nothing in threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "planted.py"), "--quick", "--area", area]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_many_in_every_area():
    assert len(BUGS) >= 150
    for area in AREAS:
        assert sum(bug.quick for bug in BUGS.values() if bug.area == area) >= 3, area
