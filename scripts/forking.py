"""Runs in forks of a process that has imported all, for scripts that try hundreds of small ones."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable


def forked(call: Callable[[], int], output: str) -> int:
    """The pid of a fork that appends what it prints to a file, and ends with what `call` returns, or 1 where it
    raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = call()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    print("A part of: scripts/chaos.py, faults.py, interrupts.py, interrupts_in_loops.py, real_memory.py")
