"""toolchain/frames.py: calls go deeper where the system gives no memory any more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from aottrain.toolchain.frames import roomy
from scripts.real_memory import Shortage


def deep(number: int) -> int:
    return deep(number - 1) if number else 1


def code_of(call: Callable[[], object]) -> int:
    """With which a child without memory ends, which calls this."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sys.setrecursionlimit(5000)
            call()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")
def test_calls_go_deeper_where_there_is_no_memory():
    def without_memory() -> None:
        shortage = Shortage(1 << 20)
        shortage.begin()
        deep(900)

    for _ in range(100):
        deep(50)
    if sys.version_info < (3, 11):  # whose calls take the stack of C
        return
    assert code_of(roomy(without_memory)) == 0
    assert code_of(without_memory) != 0  # 3.11 crashes, newer ones raise MemoryError


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
