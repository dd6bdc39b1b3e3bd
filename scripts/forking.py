"""Runs in forks of a process that has imported all, for scripts that try hundreds of small ones."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable


def keep_autograd_without_threads() -> None:
    """For a process that is forked later, before anything is traced in it: without a GPU, autograd starts no threads.

    It counts the devices at a process's first backward. A build of torch for CUDA counts eight on a machine that has
    none, once fake tensors were used: then autograd ends with an error in the children of a process that has gone
    backward, and sometimes by an abort in others, as its new threads all replace a fork's pool of threads at once.
    """
    import torch

    if torch.cuda.device_count() == 0:  # asked of NVML, which leaves CUDA to the children
        torch.ones((), requires_grad=True).backward()


def forked(call: Callable[[], int], output: str) -> int:
    """The pid of a fork that appends what it prints to a file, and ends with what `call` returns, or 1 where it
    raises."""
    keep_autograd_without_threads()
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
