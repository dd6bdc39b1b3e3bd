"""One process for each trial: what it patches, caches or breaks dies with it. What all import is loaded once."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from scripts.forking import keep_autograd_without_threads

# Gone round in circles, a trial would fill the machine's memory before its time is over.
MAX_BYTES = 6 << 30
_DIES_WITH_ITS_PARENT = 1  # PR_SET_PDEATHSIG of prctl, in Linux


@dataclass(frozen=True)
class Ended:
    """How a child ended: with a value, or with the reason why there is none (a signal, a time limit, an error)."""

    value: Any = None
    why: str = ""


def run_forked(action: Callable[[], Any], cpu_s: int, wall_s: float) -> Ended:
    """What `action` gives in a child process, as JSON. Its output goes nowhere, but what it says on stderr as it breaks
    down is told of: pytest has the place there of whoever ends the process.

    To be called by a process that has run nothing in threads: a child has only the thread that forked.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _become_child(action, writing, errors.fileno(), cpu_s)
        os.close(writing)
        try:
            text, in_time = _read_all(reading, time.monotonic() + wall_s)
        finally:
            os.close(reading)
            _end_group(pid)
        _, status = os.waitpid(pid, 0)
        said = _shown(os.pread(errors.fileno(), 1 << 16, 0).decode(errors="replace"))
    if text.endswith(b"\n"):
        return Ended(**json.loads(text))
    if not in_time or os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return Ended(why="out of time")
    how = f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended without a word"
    return Ended(why=f"{how}: {said}" if said else how)


def _shown(text: str) -> str:
    """What a process said as it broke down, in one line: of all threads that which did."""
    error, _, thread = text.partition("Current thread")
    return " ".join(f"{error[:200]} {thread}".split())[:800]


def _become_child(action: Callable[[], Any], writing: int, errors: int, cpu_s: int) -> None:
    os.setpgid(0, 0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIES_WITH_ITS_PARENT, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDWR)
    for stream, place in enumerate((null, null, errors)):
        os.dup2(place, stream)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        told = {"value": action()}
    except BaseException:
        told = {"why": traceback.format_exc()[-2000:]}
    data = json.dumps(told).encode() + b"\n"
    while data:
        data = data[os.write(writing, data) :]
    os._exit(0)


def _read_all(reading: int, deadline: float) -> tuple[bytes, bool]:
    parts = []
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            break
        part = os.read(reading, 1 << 20)
        if not part:
            return b"".join(parts), True
        parts.append(part)
    return b"".join(parts), False


def _end_group(pid: int) -> None:
    """The child is a group's leader: whatever it started and left ends with it."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def prepare() -> None:
    """Import what every trial imports, in the one process that forks them; nothing of this project."""
    import networkx  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import sympy  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401

    torch.set_num_threads(1)
    keep_autograd_without_threads()
    sys.dont_write_bytecode = True
