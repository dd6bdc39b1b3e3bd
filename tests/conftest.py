"""Plans in tests do not depend on how fast the machine is that runs them, nor on how many tests it runs at once; faults
of the compiler are errors, and an interrupt is heard however the tests were started."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys

import pytest

# Before the imports: tests.children notes what a process finds when it starts.
os.environ["AOTTRAIN_RATES"] = "default"
os.environ["AOTTRAIN_FAULTS"] = "raise"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # there is a worker for each processor; before torch is imported

from tests import sampling  # noqa: E402
from tests.children import quick_children  # noqa: E402, F401  # for all
from tests.remembering import remember_yaml  # noqa: E402
from tests.skips import (  # noqa: E402, F401  # what a run left out is said at its end
    pytest_collectreport,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

remember_yaml()

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # What a shell starts in the background inherits that interrupts are ignored, and so does all that it starts itself.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all that can be tried, where else a share of it is")


def pytest_configure(config: pytest.Config) -> None:
    """AOTTRAIN_TEST_ONEDNN=off: ATen multiplies and convolves without oneDNN; see scripts/settings.py."""
    config.pluginmanager.register(sampling)
    if os.environ.get("AOTTRAIN_TEST_ONEDNN") == "off":
        import torch

        torch.backends.mkldnn.set_flags(False)


@pytest.fixture(autouse=True)
def no_memory_of_other_tests() -> None:
    """Arenas and blocks that earlier tests' programs left idle count as memory that is held."""
    arena = sys.modules.get("aottrain.runtime.arena")
    if arena is not None:
        arena.empty_cache()


@pytest.fixture(autouse=True, scope="module")
def earlier_files_are_not_looked_through() -> None:
    """What modules and caches hold by now lives on: the collections that many tests ask for need not look at it."""
    gc.collect()
    gc.freeze()


atexit.register(gc.unfreeze)  # else libraries complain at the end of what is still alive
