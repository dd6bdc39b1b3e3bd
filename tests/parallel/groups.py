"""Groups of processes for tests, started as torchrun starts them: forked from one that has imported torch, on a port of
their own, and ended together."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.children import ROOT, Popen

ENDS_WITHIN_S = 20.0  # the others, after one has failed


@dataclass(frozen=True)
class Ended:
    """One process."""

    code: int
    out: str
    err: str


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def started(arguments: Sequence[str], folder: Path, size: int = 2, **environment: str):
    """The processes of one group, each `python arguments...` in this folder. All are dead after it."""
    port = str(free_port())
    processes = []
    for rank in range(size):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = {**os.environ, "PYTHONPATH": str(ROOT), **{name: str(value) for name, value in places.items()}}
        with open(folder / f"{rank}.out", "w") as out, open(folder / f"{rank}.err", "w") as err:
            command = [sys.executable, *arguments]
            processes.append(Popen(command, cwd=folder, env=own | environment, stdout=out, stderr=err))
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()


def ended(processes, folder: Path, timeout_s: float = 120.0, asks: bool = False) -> list[Ended]:
    """What became of each, once all have ended. Where one has failed the others get some time to see it, or with
    `asks` are told to end, as torchrun does."""
    until = time.monotonic() + timeout_s
    failed = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() for process in processes):
            failed, until = True, min(until, time.monotonic() + ENDS_WITHIN_S)
            for process in processes if asks else ():
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
        assert time.monotonic() < until, [(folder / f"{rank}.err").read_text() for rank in range(len(processes))]
        time.sleep(0.02)
    texts = [[(folder / f"{rank}.{stream}").read_text() for stream in ("out", "err")] for rank in range(len(processes))]
    return [Ended(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


def run_together(arguments: Sequence[str], folder: Path, size: int = 2, timeout_s: float = 120.0, **more: str):
    with started(arguments, folder, size, **more) as processes:
        return ended(processes, folder, timeout_s)
