"""toolchain/frames.py: calls go deeper where the system gives no memory any more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aottrain.toolchain.frames import roomy

DEEP = """
import sys
from aottrain.toolchain.frames import roomy
from scripts.real_memory import Shortage

def deep(n):
    return deep(n - 1) if n else "deep"

for _ in range(100):
    deep(50)
sys.setrecursionlimit(5000)

def at_once():
    shortage = Shortage(1 << 20)
    shortage.begin()
    try:
        return deep(900)
    finally:
        shortage.end()

print((roomy(at_once) if sys.argv[1] == "roomy" else at_once)())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")
def test_calls_go_deeper_where_there_is_no_memory():
    def run(how: str):
        return subprocess.run([sys.executable, "-c", DEEP, how], capture_output=True, text=True, timeout=300)

    if sys.version_info < (3, 11):  # whose calls take the stack of C
        return
    with_room = run("roomy")
    assert with_room.returncode == 0 and with_room.stdout == "deep\n", with_room.stderr
    assert run("bare").returncode != 0  # 3.11 crashes, newer ones raise MemoryError


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
