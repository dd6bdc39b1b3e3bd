"""Plans in tests do not depend on how fast the machine is that runs them, and faults of the compiler are errors."""

from __future__ import annotations

import os
import sys

import pytest

os.environ["AOTTRAIN_RATES"] = "default"
os.environ["AOTTRAIN_FAULTS"] = "raise"


@pytest.fixture(autouse=True)
def no_memory_of_other_tests() -> None:
    """Arenas and blocks that earlier tests' programs left idle count as memory that is held."""
    arena = sys.modules.get("aottrain.runtime.arena")
    if arena is not None:
        arena.empty_cache()
