"""Machines that fail, for `scripts/faults.py`: what is done to the process, or the folder, before a run."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKPOINTS = Path("run", "checkpoints")


def nothing() -> None:
    """No fault in the process."""


@dataclass(frozen=True)
class Fault:
    """One of them."""

    plant: Callable[[], Any] = nothing
    """In the process that trains. May give a function of the arguments that are used then."""
    codes: tuple[int, ...] = (0,)
    """Exit codes that are right."""
    arguments: Sequence[str] = ()
    engine: str = "eager"
    kernel: str = "aten"
    """auto where the fault is about compilers; in so small a run nothing is worth generating."""
    logger: str = "csv"
    before: int = 0
    """How many runs the folder has seen."""
    prepare: Callable[[], Callable[[], None] | None] | None = None
    """What is done to the folder before; gives what undoes it."""


def environment(**values: str | None) -> Callable[[], None]:
    def set_them() -> None:
        for name, value in values.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)

    return set_them


def largest_file(num_bytes: int) -> Callable[[], None]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        os.set_blocking(1, True)
        reader, writer = os.pipe()  # what is printed must not count
        if os.fork() == 0:
            os.close(writer)
            while part := os.read(reader, 1 << 16):
                os.write(1, part)
            os._exit(0)
        os.close(reader)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    return limit


def limited(what: int, amount: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (amount, amount))


def other_process(**values: str | None) -> Callable[[], None]:
    """What Python and libraries read as they start: a process of its own."""

    def plant() -> Callable[[Sequence[str]], Sequence[str]]:
        environment(**values)()
        root = str(Path(__file__).resolve().parents[1])
        os.environ["PYTHONPATH"] = root

        def begin(arguments: Sequence[str]) -> Sequence[str]:
            os.execv(sys.executable, [sys.executable, "-m", "aottrain", *arguments])

        return begin

    return plant


def gone_folder() -> None:
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir(os.getcwd())


def closed(*descriptors: int) -> Callable[[], None]:
    def close() -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    return close


def no_reader() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def clock_in_1970() -> None:
    real = time.time
    time.time = lambda: real() - 1.7e9  # type: ignore[assignment]


def in_the_future() -> None:
    for path in Path("run").rglob("*"):
        os.utime(path, (4e9, 4e9))


def damage(name: str, count: int = 1) -> Callable[[], None]:
    def harm() -> None:
        for path in sorted(Path("run").rglob(name))[-count:]:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content if path.suffix == ".pt" else b"{damaged: [")

    return harm


def another_run() -> Callable[[], None]:
    Path("run").mkdir()
    file = open("run/.lock", "w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write("1234\n")
    file.flush()
    return file.close


def lacks(*names: str) -> Callable[[], None]:
    return lambda: sys.modules.update(dict.fromkeys(names))


def damaged_cache() -> Callable[[], None]:
    folder = Path("cache").absolute()
    folder.mkdir(exist_ok=True)
    before = os.environ.get("AOTTRAIN_CACHE_DIR")
    os.environ["AOTTRAIN_CACHE_DIR"] = str(folder)
    (folder / "measured.json").write_text(json.dumps([1]))
    return lambda: environment(AOTTRAIN_CACHE_DIR=before)()


def occupied() -> None:
    Path("run", "checkpoints").mkdir(parents=True)
    Path("run", "checkpoints", "step_00000002.pt").write_bytes(b"x")


FULL = Path("/dev/full")
MACHINE: dict[str, Fault] = {
    "HOME is /dev/null": Fault(environment(HOME="/dev/null", AOTTRAIN_CACHE_DIR=None), engine="aot"),
    "HOME is not writable, wandb": Fault(environment(HOME="/proc/self", AOTTRAIN_CACHE_DIR=None), logger="wandb"),
    "the cache folder is a file": Fault(environment(AOTTRAIN_CACHE_DIR="/etc/hostname"), engine="aot"),
    "the cache folder cannot be made": Fault(environment(AOTTRAIN_CACHE_DIR="/proc/nothing"), engine="aot"),
    "the cache folder holds a damaged file": Fault(engine="aot", prepare=damaged_cache),
    "no compiler": Fault(environment(PATH="/nowhere", CXX=None), engine="aot", kernel="auto"),
    "no compiler, kernel=cpp": Fault(environment(PATH="/nowhere", CXX=None), (0, 2), engine="aot", kernel="cpp"),
    "CXX is no compiler": Fault(environment(CXX="/bin/false", AOTTRAIN_CACHE_DIR="new"), (0, 2), (), "aot", "cpp"),
    "the disk takes nothing": Fault(largest_file(0), (1, 2)),
    "the disk takes small files": Fault(largest_file(40_000), (1,)),
    "the disk takes small files, saves in the background": Fault(
        largest_file(40_000), (1,), ["trainer.save=background"]
    ),
    "the output folder is on a read-only system": Fault(codes=(2,), arguments=["hydra.run.dir=/proc/aottrain"]),
    "the output folder has a checkpoint": Fault(codes=(2,), prepare=occupied),
    "two runs in one folder": Fault(codes=(2,), prepare=another_run),
    "standard input is closed": Fault(closed(0)),
    "nobody reads the output": Fault(no_reader, (141,)),
    "LC_ALL=C, a folder with an accent": Fault(
        other_process(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"), arguments=['hydra.run.dir="run/é"']
    ),
    "TERM=dumb, COLUMNS=1": Fault(environment(TERM="dumb", COLUMNS="1")),
    "the current folder is gone": Fault(gone_folder, (2,)),
    "TMPDIR does not exist": Fault(environment(TMPDIR="/nowhere"), engine="aot"),
    "40 open files at most": Fault(limited(resource.RLIMIT_NOFILE, 40)),
    "the clock is set back to 1970": Fault(clock_in_1970, engine="aot"),
    "the clock was ahead: files of the future, resume=auto": Fault(
        before=1, prepare=in_the_future, arguments=["resume=auto", "trainer.steps=6"]
    ),
    "the newest checkpoint is damaged, resume=auto": Fault(
        before=1, prepare=damage("step_*.pt"), arguments=["resume=auto", "trainer.steps=6"]
    ),
    "all checkpoints are damaged, resume=auto": Fault(
        codes=(2,), before=1, prepare=damage("step_*.pt", 9), arguments=["resume=auto", "trainer.steps=6"]
    ),
    "latest.json is damaged, resume=auto": Fault(
        before=1, prepare=damage("latest.json"), arguments=["resume=auto", "trainer.steps=6"]
    ),
    "summary.json is damaged, resume=auto": Fault(
        before=1, prepare=damage("summary.json"), arguments=["resume=auto", "trainer.steps=6"]
    ),
    ".hydra/config.yaml is damaged, resume=auto": Fault(
        codes=(2,), before=1, prepare=damage("config.yaml"), arguments=["resume=auto", "trainer.steps=6"]
    ),
    "metrics.csv is damaged, resume=auto": Fault(
        before=1, prepare=damage("metrics.csv"), arguments=["resume=auto", "trainer.steps=6"]
    ),
    "wandb is not installed": Fault(lacks("wandb"), (0, 2), logger="wandb"),
    "wandb without a network": Fault(
        environment(WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_MODE=None),
        arguments=["logger.mode=online"], logger="wandb",
    ),
    "one processor": Fault(lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}), engine="aot"),
}  # fmt: skip


if __name__ == "__main__":
    print("A part of another command: python scripts/faults.py --help")
