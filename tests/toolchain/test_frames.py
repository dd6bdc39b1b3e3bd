"""toolchain/frames.py: calls go deeper without another piece of memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from aottrain.toolchain.frames import roomy


def mapped() -> int:
    """Pages of this process's address space."""
    return int(Path("/proc/self/statm").read_bytes().split()[0])


def deep(number: int) -> int:
    return deep(number - 1) if number else mapped()


def grown() -> int:
    mapped()
    before = mapped()
    return deep(900) - before


def in_a_thread(call: Callable[[], int]) -> int:
    """What it gives in a thread that has had no deep calls yet."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is read")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="older frames lie on the stack of C")
def test_calls_go_deeper_without_another_piece():
    assert in_a_thread(grown) > 0
    assert in_a_thread(roomy(grown)) == 0


def test_a_function_is_called_once_with_what_it_is_given_and_its_errors_pass():
    def given(*args, **kwargs):
        if not args:
            raise ValueError("none")
        return args, kwargs, roomy(len)("inner")

    assert roomy(given)(1, two=2) == ((1,), {"two": 2}, 5)
    for _ in range(2):
        with pytest.raises(ValueError, match="none"):
            roomy(given)()
    assert roomy(given).__name__ == "given"
