"""Ctrl-C at random moments of a run that begins: how does each of them end?

    python scripts/interrupts.py                      # 60 starts, each ended while it is traced and compiled
    python scripts/interrupts.py --starts 300 --seed 3 --twice   # a second signal soon after the first
    python scripts/interrupts.py --settings engine=torch_compile task=plan

Each start is a fork of a process that has imported all. Its signal, SIGINT or SIGTERM in turn, comes at a random moment
of what a start takes that nothing happens to: building, tracing, compiling, checks against eager and two steps. It must
end by it: exit code 130 or 143 (or by the signal, before anything listens to it), no traceback, no abort of C++. One
that had ended before does not count. Exit code 1 where one ends otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aottrain.cli import main as command_line  # noqa: E402
from scripts.forking import forked  # noqa: E402

SETTINGS = (
    "recipe.model.num_layers=3", "recipe.model.width=32", "recipe.model.num_heads=2", "recipe.model.context=32",
    "data.batch_size=4", "kernel=aten", "logger=csv", "trainer.num_threads=1", "trainer.steps=2",
    "trainer.eval_every=0", "trainer.sample_bytes=0",
)  # fmt: skip
TRACES = ("Traceback", "terminate called", "Fatal Python error", "Exception ignored")


def started(arguments: list[str], output: str) -> int:
    return forked(lambda: command_line(arguments), output)


def one(arguments: list[str], chance: random.Random, whole_s: float, signums: list[int]) -> tuple[str, float, str]:
    """How one start ended, the seconds that it took after the first signal, and what it printed."""
    Path("output.txt").unlink(missing_ok=True)
    pid = started(arguments, "output.txt")
    time.sleep(chance.uniform(0.01, whole_s))
    began_s = time.monotonic()
    for number, signum in enumerate(signums):
        if number:
            time.sleep(chance.uniform(0, 0.3))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    printed = Path("output.txt").read_text(encoding="utf-8", errors="replace")
    traces = [word for word in TRACES if word in printed]
    return ", ".join([str(code), *traces]), time.monotonic() - began_s, printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twice", action="store_true", help="another signal up to 0.3 s later")
    parser.add_argument("--settings", nargs="*", default=[], help="in place of some of the small run's")
    parser.add_argument("--keep", type=Path, help="a folder for what was printed where it went wrong")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chance, ends, wrong, longest_s = random.Random(given.seed), Counter(), 0, 0.0
    keep = given.keep and given.keep.resolve()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        settings = [*SETTINGS, *given.settings]
        with open("output.txt", "w") as file, contextlib.redirect_stdout(file):  # here: then forks have all modules
            code = command_line([*settings, "hydra.run.dir=first"])
        began_s = time.monotonic()
        code = code or os.waitpid(started([*settings, "hydra.run.dir=timed"], "output.txt"), 0)[1]
        whole_s = time.monotonic() - began_s
        if code:
            print(Path("output.txt").read_text("utf-8"), f"exit code {code}: nothing to interrupt")
            return 1
        start, least_s = 0, whole_s / 4
        while start < given.starts:
            signums = [(signal.SIGINT, signal.SIGTERM)[start % 2]] + [signal.SIGINT] * given.twice
            shutil.rmtree("run", ignore_errors=True)
            end, seconds, printed = one([*settings, "hydra.run.dir=run"], chance, whole_s, signums)
            if end == "0":  # how long it takes hangs on what else the machine does
                whole_s = max(0.9 * whole_s, least_s)
                continue
            start, whole_s = start + 1, 1.02 * whole_s
            ends[end] += 1
            longest_s = max(longest_s, seconds)
            rights = {*(str(128 + signum) for signum in signums), *(str(-signum) for signum in signums)}
            if end not in rights:
                wrong += 1
                print(f"start {start}: {end}: {printed[-1500:]}", flush=True)
                if keep:
                    keep.mkdir(exist_ok=True)
                    (keep / f"start{start}.txt").write_text(printed, encoding="utf-8")
    told = ", ".join(f"{end} {count} times" for end, count in sorted(ends.items()))
    print(f"{given.starts} starts: exit codes {told}; at most {longest_s:.2f} s later; {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
