"""Memory that really runs out: a limit on the process's address space makes its allocators fail. Does a run replan?

    python scripts/real_memory.py                     # 24 runs, each of which has no memory at one place of one step
    python scripts/real_memory.py --lasting 12        # and 12 that must live with a limit that stays
    python scripts/real_memory.py --kernels cpp --seed 3

At one place (forward, backward or optimizer) of a step RLIMIT_AS is set to what the process has, and all that malloc
still has in reserve is taken but for a random rest: then malloc fails, in ATen, in Python or in generated C++. What
has been taken is given back where the run answers. It must take another plan of lower peak, say so in one line and
come to the losses of a run that nothing happened to: bit for bit where PyTorch's operators compute and a plan was
taken (--kernels aten), else to rounding. A lasting limit begins before compiling or before training; every second one
also leaves malloc no reserve. Under it a run may end, with exit code 1 and one line that says why. Exit code 1 where
one does otherwise. A run that had no need of memory at that place counts for nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aottrain.cli import main as command_line  # noqa: E402
from aottrain.tasks import train  # noqa: E402
from aottrain.trainer import engines, loop  # noqa: E402
from scripts.forking import forked  # noqa: E402

PLACES = ("forward", "backward", "optimizer")
STARTS = ("_prepare", "fit", "fit")  # functions of tasks/train.py
SETTINGS = (
    "recipe.model.num_layers=2", "recipe.model.width=128", "recipe.model.num_heads=4", "recipe.model.context=64",
    "recipe.model.dropout=0.0", "data.batch_size=16", "decisions=default", "logger=csv", "trainer.num_threads=1",
    "trainer.log_every=1", "trainer.eval_every=0", "trainer.save_every=0", "trainer.sample_bytes=0",
    "verify.steps=0", "trainer.steps=5",
)  # fmt: skip
_LEAST, _MOST = 1 << 12, 1 << 24  # bytes of a piece that is taken from malloc
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


class Shortage:
    """No memory for this process but `rest` bytes, from `begin` to `end`."""

    def __init__(self, rest: int):
        self.rest, self._taken = rest, []
        self.has_begun = False

    def begin(self) -> None:
        self.has_begun = True
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (address_space(), hard))
        size, spare = _MOST, []
        while size >= _LEAST:
            if block := _libc.malloc(size):
                (spare if sum(length for _, length in spare) + size <= self.rest else self._taken).append((block, size))
            else:
                size //= 2
        for block, _ in spare:
            _libc.free(block)

    def end(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        while self._taken:
            _libc.free(self._taken.pop()[0])


def plant(place: str, at: int, shortage: Shortage) -> None:
    """In this process: the shortage at that place of that step, once."""
    take_step, backward, update = loop.take_step, torch.Tensor.backward, loop.clip_and_update
    call, answer, now = engines.ModuleStep.__call__, loop.take_less_memory, [0]

    def here(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def running(*given: Any, **more: Any) -> Any:
            if name != place or now[0] != at or shortage.has_begun:
                return run(*given, **more)
            shortage.begin()
            result = run(*given, **more)
            shortage.end()
            return result

        return running

    def taking(job: Any, step: int, *given: Any) -> Any:
        now[0] = step
        return take_step(job, step, *given)

    def answering(*given: Any) -> Any:
        shortage.end()
        return answer(*given)

    def going_back(*given: Any, **more: Any) -> None:
        if place == "forward":
            shortage.end()
        here("backward", backward)(*given, **more)

    loop.take_step, loop.take_less_memory = taking, answering
    loop.clip_and_update, torch.Tensor.backward = here("optimizer", update), going_back
    engines.ModuleStep.__call__ = here("forward", call)


def left(folder: Path) -> tuple[list[float], dict[str, Any]]:
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file)]
    return losses, json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def run_one(settings: list[str], plant_it: Callable[[], None]) -> tuple[int, str]:
    shutil.rmtree("run", ignore_errors=True)
    Path("output.txt").unlink(missing_ok=True)

    def call() -> int:
        plant_it()
        return command_line([*settings, "hydra.run.dir=run"])

    code = os.waitstatus_to_exitcode(os.waitpid(forked(call, "output.txt"), 0)[1])
    return code, Path("output.txt").read_text(encoding="utf-8", errors="replace")


def problem_of(code: int, printed: str, expected: list[float], kernel: str, *, may_end: bool) -> str:
    """What is wrong with a run that had too little memory; "" where nothing is."""
    lines = [line for line in printed.splitlines() if "memory ran out" in line]
    if "Traceback" in printed or "terminate called" in printed:
        return "a traceback"
    if code == 1 and may_end:
        return "" if len(lines) >= 1 else "it does not say why it ended"
    if code:
        return f"exit code {code}"
    losses, summary = left(Path("run"))
    replans = summary.get("replans", [])
    if len(lines) != len(replans):
        return f"{len(replans)} replans, {len(lines)} lines"
    exact = kernel == "aten" and all("micro-batches" not in entry["what"] for entry in replans)
    near = (
        max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)) if len(losses) == len(expected) else 1
    )
    return "" if losses == expected or (not exact and near < 1e-4) else f"other losses, by {near:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", nargs="+", default=["aten", "cpp"])
    parser.add_argument("--engine", nargs="+", choices=("aot", "eager"), default=["aot", "eager"])
    parser.add_argument("--lasting", type=int, default=0, metavar="RUNS")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chance, seen, wrong = random.Random(given.seed), Counter(), 0
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        kinds = [
            (engine, kernel) for engine in given.engine for kernel in (given.kernels if engine == "aot" else ["auto"])
        ]
        expected = {}
        for engine, kernel in kinds:
            own = [*SETTINGS, f"engine={engine}", f"kernel={kernel}"]
            with open("output.txt", "w") as file, contextlib.redirect_stdout(file):
                code = command_line([*own, f"hydra.run.dir=whole-{engine}-{kernel}"])
            if code:
                print(Path("output.txt").read_text(encoding="utf-8"))
                return 1
            expected[engine, kernel] = left(Path(f"whole-{engine}-{kernel}"))[0]
        hit = tries = 0
        while hit < given.runs and tries < 6 * given.runs:
            engine, kernel = kinds[tries % len(kinds)]
            place, step = PLACES[tries // len(kinds) % 3], chance.choice([1, 1, 2, 4])
            shortage = Shortage(chance.choice([0, 1 << 16, 1 << 20, 1 << 22]))
            tries += 1
            code, printed = run_one(
                [*SETTINGS, f"engine={engine}", f"kernel={kernel}"],
                lambda: plant(place, step, shortage),  # noqa: B023
            )
            where = re.findall(r"memory ran out in the (\w+) \((.*?)\): (.*)", printed)
            if code == 0 and not where:
                continue
            problem = problem_of(
                code, printed, expected[engine, kernel], kernel if engine == "aot" else "aten", may_end=False
            )
            hit += 1
            told = f"{where[0][0]}: {where[0][1][:70]}: {where[0][2][:70]}" if where else "nothing"
            seen[where[0][0] if where else "nowhere"] += 1
            print(f"{engine} {kernel} {place} of step {step}: {told}: {problem or 'right'}", flush=True)
            if problem:
                wrong += 1
                print(printed[-1500:], flush=True)
        print(f"{hit} of {tries} runs hit: {dict(seen)}; {wrong} wrong")
        if given.lasting:
            wrong += lasting(kinds, expected, chance, given.lasting)
    return 1 if wrong else 0


def limit(start: str, rest: int, harsh: bool) -> None:
    """In this process, from then on: no more address space than that; harsh: nor anything that malloc has left."""

    def begin() -> None:
        if harsh:
            Shortage(rest).begin()
        else:
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (address_space() + rest, hard))  # as of `ulimit -v`

    def first(run: Callable[..., Any]) -> Callable[..., Any]:
        def beginning(*given: Any, **more: Any) -> Any:
            begin()
            return run(*given, **more)

        return beginning

    setattr(train, start, first(getattr(train, start)))


def lasting(kinds: list[tuple[str, str]], expected: dict[Any, list[float]], chance: random.Random, runs: int) -> int:
    """Runs under a limit that stays. How many went wrong."""
    wrong, ends = 0, Counter()
    for number in range(runs):
        engine, kernel = kinds[number % len(kinds)]
        harsh = number // len(kinds) % 2 == 1
        start, rest = chance.choice(STARTS), chance.randrange(1 << 16, (8 if harsh else 40) << 20)
        code, printed = run_one(
            [*SETTINGS, f"engine={engine}", f"kernel={kernel}"],
            lambda: limit(start, rest, harsh),  # noqa: B023
        )
        problem = problem_of(code, printed, expected[engine, kernel], "cpp", may_end=True)
        ends[code] += 1
        times, kind = printed.count("memory ran out"), "no reserve" if harsh else "reserves"
        print(
            f"{engine} {kernel}, from {start} on, {rest >> 10} KiB, {kind}: exit code {code}, "
            f"memory ran out {times} times: {problem or 'right'}",
            flush=True,
        )
        if problem:
            wrong += 1
            print(printed[-6000:], flush=True)
    print(f"{runs} runs under a lasting limit: exit codes {dict(ends)}; {wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
