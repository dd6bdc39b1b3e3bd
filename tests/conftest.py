"""Plans in tests do not depend on how fast the machine is that runs them, nor on how many tests it runs at once; faults
of the compiler are errors."""

from __future__ import annotations

import os
import sys

import pytest

os.environ["AOTTRAIN_RATES"] = "default"
os.environ["AOTTRAIN_FAULTS"] = "raise"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # there is a worker for each processor; before torch is imported


@pytest.fixture(autouse=True)
def no_memory_of_other_tests() -> None:
    """Arenas and blocks that earlier tests' programs left idle count as memory that is held."""
    arena = sys.modules.get("aottrain.runtime.arena")
    if arena is not None:
        arena.empty_cache()
