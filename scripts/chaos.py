"""A run that faults end at random, restarted with resume=auto until it has finished: bitwise equal to an unbroken one?

    python scripts/chaos.py                         # five minutes of rounds
    python scripts/chaos.py --minutes 120 --seed 7  # others, in the order that the seed says
    python scripts/chaos.py --faults kill save      # some kinds alone
    python scripts/chaos.py --engine eager          # many more starts in the time; without oom, which needs plans
    python scripts/chaos.py --rounds 500 --faults kill points --engine eager --save both --steps 20   # one in each
    python scripts/chaos.py --rounds 50 --faults term int usr1 twice --save both --steps 20   # signals, a table

A round is one training from its first step to its last, whatever happens on the way: kill (SIGKILL at a random time),
save (SIGKILL within the writing of a checkpoint), points (the same at twenty points of it in turn), term, int, usr1,
twice (SIGTERM, SIGINT, SIGUSR1, and the first two), disk (no file may grow beyond some bytes), damage (the newest
checkpoint is cut or has a bit flipped), oom (an allocator's error in a forward, a backward or an update), nan (the loss
or a gradient of a step is not a number, by which trainer.on_nonfinite=raise ends a run). After each round weights,
optimizer state and random numbers must be those of the run that nothing happened to. Exit code 1 where they are not,
or where a restart refuses to go on. PyTorch's operators compute (kernel=aten), by which plans differ in no bit. With
--rounds each of the faults is planted until it has hit so many runs, once in each; it is then looked whether every
checkpoint that is left can be loaded, and the run goes on from it; from the one that SIGUSR1 asked for, too, in another
folder. A table says how those that were hit ended. --save background has checkpoints written so, both takes turns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aottrain.cli import command  # noqa: E402
from aottrain.cli import main as command_line  # noqa: E402
from aottrain.config.choices import SAVES  # noqa: E402
from aottrain.config.run import RunConfig  # noqa: E402
from aottrain.tasks import train  # noqa: E402
from aottrain.trainer.checkpoint import load  # noqa: E402
from scripts.chaos_faults import damage, planter  # noqa: E402
from scripts.chaos_points import POINTS, what_is_left  # noqa: E402
from scripts.forking import forked  # noqa: E402

SIGNALS = {
    "kill": [signal.SIGKILL],
    "term": [signal.SIGTERM],
    "int": [signal.SIGINT],
    "usr1": [signal.SIGUSR1],
    "twice": [signal.SIGTERM, signal.SIGINT],
}
# As subprocess has exit codes. 1 is right where no file can be written: the last checkpoint must be. Negative: before
# anything listens to signals.
RIGHT_CODES = {
    "kill": (-9,),
    "save": (-9,),
    "points": (-9,),
    "disk": (1,),
    "nan": (1,),
    "term": (143, -15),
    "int": (130, -2),
    "usr1": (-10,),
    "twice": (143, 130, -15, -2),
}
SAID = {"usr1": "SIGUSR1: a checkpoint", "oom": "memory ran out in the"}  # where a run that was hit ends by itself
FAULTS = (*SIGNALS, "save", "points", "disk", "damage", "oom", "nan")
SETTINGS = (
    "recipe.model.num_layers=2", "recipe.model.width=16", "recipe.model.num_heads=2", "recipe.model.context=16",
    "data.batch_size=4", "kernel=aten", "decisions=default", "logger=csv", "trainer.num_threads=1",
    "trainer.log_every=5", "trainer.eval_every=20", "trainer.eval_batches=1", "trainer.save_every=2",
    "trainer.keep_last=3", "trainer.sample_bytes=0", "measure.memory=false", "lr_schedule.warmup_steps=5",
)  # fmt: skip
_MOST_REPLANS = 3  # as many plans of lower peak there are at least; smaller micro-batches round otherwise
_MOST_STARTS = 60


def run_forked(arguments: list[str] | RunConfig, plant: Callable[[], None]) -> int:
    """The command line, or what one has come to, in a fork of this process, which has imported all; its pid."""

    def call() -> int:
        plant()
        if isinstance(arguments, RunConfig):
            command.run = lambda _: train.run(arguments)
        return command_line([] if isinstance(arguments, RunConfig) else arguments)

    return forked(call, "output.txt")


def configured(arguments: list[str]) -> RunConfig:
    """What the command line comes to; composing that takes as long as all of a small run."""
    configs, run = [], train.run
    train.run = lambda config: configs.append(config) or 0
    try:
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            command_line(arguments)
    finally:
        train.run = run
    return configs[0]


def nothing() -> None:
    """No fault."""


def state_of(folder: Path, steps: int) -> dict[str, Any]:
    state = load(folder / "checkpoints" / f"step_{steps:08d}.pt").state
    return {key: state[key] for key in ("model", "optimizer", "random")}


def same(left: Any, right: Any) -> bool:
    """Bitwise, of nested containers of tensors and plain values."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def wait(pid: int) -> int:
    """As subprocess has it: negative where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def signalled(pid: int, signums: list[int], chance: random.Random, longest_s: float) -> None:
    for signum in signums:
        time.sleep(chance.uniform(0, longest_s))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def printed() -> str:
    return Path("output.txt").read_text(encoding="utf-8", errors="replace")


def from_what_was_asked_for(config: RunConfig, expected: Any) -> str:
    """What is wrong with a run that goes on, elsewhere, from the checkpoint that SIGUSR1 asked for, where it is there
    still."""
    path = re.findall(r"SIGUSR1: a checkpoint was written after step \d+: (.*)", printed())[-1]
    if not Path(path).is_file():
        return ""
    other = dataclasses.replace(config, resume=path, output_dir=f"{config.output_dir}-asked")
    shutil.rmtree(other.output_dir, ignore_errors=True)
    if code := wait(run_forked(other, nothing)):
        return f"from the checkpoint that was asked for it ended with {code}"
    is_same = same(state_of(Path(other.output_dir), config.trainer.steps), expected)
    return "" if is_same else "from the checkpoint that was asked for it comes to other numbers"


def one_fault(
    folder: Path,
    config: RunConfig,
    fault: str,
    plant: Callable[[], None],
    chance: random.Random,
    whole_s: float,
    expected: Any = None,
) -> tuple[str, str]:
    """A training that one fault ends, and its restart. How it ended, "" where it was not hit, and what went wrong or
    ""."""
    pid = run_forked(config, plant)
    signalled(pid, SIGNALS.get(fault, []), chance, whole_s)
    code = wait(pid)
    if fault in SAID and code == 0:
        if SAID[fault] not in printed():
            return "", ""
        return "went on", from_what_was_asked_for(config, expected) if fault == "usr1" and expected else ""
    if code == 0 and not (fault == "damage" and damage(folder, chance)):
        return "", ""
    problem = "" if code in RIGHT_CODES.get(fault, (0,)) else f"fault {fault}: exit code {code}"
    problem = problem or ("" if fault == "damage" else what_is_left(folder))
    if not problem and (again := wait(run_forked(config, nothing))):
        problem = f"after fault {fault} the restart ended with {again}"
    return f"exit code {code}", problem and f"{problem}: {printed()[-2000:]}"


def rounds_of(
    fault: str, number: int, configs: dict[str, RunConfig], chance: random.Random, expected: Any
) -> tuple[str, int]:
    """So many runs that the fault has hit, once each, in turn as each of the configurations says; a row of counts,
    and how many went wrong."""
    hit, missed, wrong, per_kind, ends, whole_s = 0, 0, 0, Counter(), Counter(), 0.0
    while hit < number:
        point = list(POINTS)[hit % len(POINTS)]
        turn = hit // len(POINTS) if fault == "points" else hit + missed
        kind, config = list(configs.items())[turn % len(configs)]
        folder, steps = Path(config.output_dir), config.trainer.steps
        shutil.rmtree(folder, ignore_errors=True)
        Path("output.txt").unlink(missing_ok=True)
        if (hit + missed) % 20 == 0:  # how long it takes hangs on what else the machine does
            began_s = time.monotonic()
            wait(run_forked(config, nothing))
            whole_s = time.monotonic() - began_s
            shutil.rmtree(folder)
        plant = planter(fault, chance, steps // 2, point)
        end, problem = one_fault(folder, config, fault, plant, chance, whole_s, expected)
        was_hit = bool(end)
        chance.random()
        hit, missed = hit + was_hit, missed + (not was_hit)
        ends[end] += was_hit
        if not problem and not same(state_of(folder, steps), expected):
            problem = "weights, optimizer state or random numbers differ from the unbroken run's"
        if was_hit:
            per_kind[f"{point}, {kind}" if fault == "points" else kind] += 1
        if problem:
            wrong += 1
            print(f"{fault}, round {hit} ({point if fault == 'points' else kind}): {problem}", flush=True)
    told = [
        ", ".join(f"{name} {count}" for name, count in sorted(which.items()) if count) for which in (per_kind, ends)
    ]
    return f"| {fault} | {hit} ({told[0]}) | {missed} | {told[1]} | {wrong} |", wrong


def one_round(
    folder: Path,
    steps: int,
    settings: list[str],
    faults: list[str],
    chance: random.Random,
    whole_s: float,
    seen: Counter[str],
) -> str:
    """Train to the end, whatever happens; "" or what went wrong."""
    arguments = [*settings, f"trainer.steps={steps}", f"hydra.run.dir={folder}", "resume=auto"]
    replans = 0
    for start in range(_MOST_STARTS):
        fault = chance.choice(faults) if start < _MOST_STARTS // 2 else "none"
        if fault == "oom" and replans == _MOST_REPLANS:
            fault = "none"
        if fault == "damage":
            is_damaged = damage(folder, chance)
            seen["damage"] += is_damaged
            fault = fault if is_damaged or len(faults) == 1 else "kill"
        pid = run_forked(arguments, planter(fault, chance, steps // 2))
        signalled(pid, SIGNALS.get(fault, []), chance, 0.9 * whole_s)
        code = wait(pid)
        chance.random()
        seen["starts"] += 1
        if fault != "damage":
            seen[fault] += code != 0 or fault in ("oom", "disk")
        replans += fault == "oom"
        if code == 0:
            return ""
        if code not in RIGHT_CODES.get(fault, ()):
            return f"fault {fault}: exit code {code}: {(folder.parent / 'output.txt').read_text()[-2000:]}"
    return f"not finished after {_MOST_STARTS} starts"


def left_alone(settings: list[str], steps: int) -> tuple[dict[str, Any], float]:
    """What a run comes to that nothing happens to, and the seconds that one takes whose caches are warm. SystemExit."""
    arguments = [*settings, f"trainer.steps={steps}"]
    with open("output.txt", "w") as file, contextlib.redirect_stdout(file):  # here: then forks have all modules
        code = command_line([*arguments, "hydra.run.dir=unbroken"])
    started_s = time.monotonic()
    if code := code or wait(run_forked([*arguments, "hydra.run.dir=timed"], nothing)):
        print(Path("output.txt").read_text(encoding="utf-8"), file=sys.stderr)
        sys.exit(code)
    return state_of(Path("unbroken"), steps), time.monotonic() - started_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--engine", choices=("aot", "eager"), default="aot")
    parser.add_argument("--rounds", type=int, help="so many runs hit by each fault, in place of --minutes")
    parser.add_argument("--save", choices=(*SAVES, "both"), default="now")
    given = parser.parse_args()
    settings = [*SETTINGS, f"engine={given.engine}"]
    ways = list(SAVES) if given.save == "both" else [given.save]
    if given.engine == "eager":  # smaller micro-batches round otherwise
        given.faults = [fault for fault in given.faults if fault != "oom"]
    torch.set_num_threads(1)
    chance, seen, rounds, wrong = random.Random(given.seed), Counter(), 0, 0
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        began_s, folder = time.monotonic(), Path(name, "run")
        expected, whole_s = left_alone(settings, given.steps)
        if given.rounds:
            own = [*settings, f"trainer.steps={given.steps}", "resume=auto", f"hydra.run.dir={folder}"]
            configs = {way: configured([*own, f"trainer.save={way}"]) for way in ways}
            print("| fault | runs hit | not hit | how they ended | wrong |\n|---|---|---|---|---|", flush=True)
            for fault in given.faults:
                line, num_wrong = rounds_of(fault, given.rounds, configs, chance, expected)
                print(line, flush=True)
                wrong += num_wrong
            return 1 if wrong else 0
        while time.monotonic() - began_s < 60 * given.minutes:
            shutil.rmtree(folder, ignore_errors=True)
            own = [*settings, f"trainer.save={ways[rounds % len(ways)]}"]
            problem = one_round(folder, given.steps, own, given.faults, chance, whole_s, seen)
            rounds += 1
            if not problem and not same(state_of(folder, given.steps), expected):
                problem = "weights, optimizer state or random numbers differ from the unbroken run's"
            if problem:
                wrong += 1
                print(f"round {rounds}: {problem}", flush=True)
    counts = ", ".join(f"{name} {seen[name]}" for name in ("starts", *given.faults))
    print(f"{rounds} rounds of {given.steps} steps, {wrong} wrong; {counts}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
