"""One of two processes of a training is killed at a random time, torchrun restarts them: as if nothing had happened?

    python scripts/chaos_ranks.py                     # 20 rounds
    python scripts/chaos_ranks.py --mode shard --engine aot --seed 7
    python scripts/chaos_ranks.py --mode shard --checkpoints parts

A round is `torchrun --max-restarts` with resume=auto and a fixed hydra.run.dir, of which one process gets SIGKILL once:
while it starts, trains, writes a checkpoint or ends. The other must end by itself or by torchrun's SIGTERM, with a line
and without a traceback of ours. After the restart every loss that metrics.csv has, and weights, optimizer state and
random numbers at the end, must be those of a run that nothing happened to. Prints a line for each round. Exit code 1
where one goes wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aottrain.config.choices import CHECKPOINTS  # noqa: E402
from scripts.chaos import SETTINGS, same, state_of  # noqa: E402

_MOST_S = 300.0  # of one round
_LINE = re.compile(r"ParallelError: .*|stopping after this step.*|.*\b(interrupted|Interrupted)\b.*|.*Error: .*")


@dataclass
class Round:
    """What became of one training."""

    code: int
    killed_at: str
    """The last line of the run when the process was killed; "" where none was."""
    ended_s: float
    """From the kill to the end of the last process of its group."""
    line: str
    """What the survivor said."""
    text: str


def command(folder: Path, given: argparse.Namespace, restarts: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    own = [f"parallel={given.mode}", "parallel.timeout=20", f"engine={given.engine}", f"trainer.steps={given.steps}"]
    own += [f"parallel.checkpoints={given.checkpoints}"] if given.mode == "shard" else []
    run = [f"hydra.run.dir={folder}", "resume=auto"]
    return [*torchrun, f"--max-restarts={restarts}", "-m", "aottrain", *SETTINGS, *own, *run]


def children(pid: int) -> list[int]:
    """Processes that this one has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def one_round(arguments: list[str], output: Path, kill_after_s: float | None, victim: int) -> Round:
    """kill_after_s: since both processes are there; None: nothing happens. All processes are dead after it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with output.open("w") as file:
        process = subprocess.Popen(
            arguments, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=output.parent
        )
    group: list[int] = []
    try:
        until_s = time.monotonic() + _MOST_S
        while len(group) < 2 and process.poll() is None and time.monotonic() < until_s:
            time.sleep(0.05)
            group = children(process.pid)
        killed_at, ended_s, said = "", 0.0, 0
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            said = output.stat().st_size
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            if len(group) == 2 and is_alive(group[victim]):
                killed_at = lines[-1] if lines else "nothing was said yet"
                os.kill(group[victim], signal.SIGKILL)
                killed_s = time.monotonic()
                while any(map(is_alive, group)) and time.monotonic() < until_s:
                    time.sleep(0.02)
                ended_s = time.monotonic() - killed_s
        code = process.wait(max(until_s - time.monotonic(), 1.0))
    except subprocess.TimeoutExpired:
        code = -1
    finally:
        for pid in [*children(process.pid), *group, process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    text = output.read_text(encoding="utf-8", errors="replace")
    later = [line.strip() for line in text.encode()[said:].decode(errors="replace").splitlines()]
    told = [line for line in later if _LINE.fullmatch(line) and "torch/distributed/elastic" not in line]
    return Round(code, killed_at, ended_s, told[0] if told and killed_at else "", text)


def losses(folder: Path) -> dict[str, str]:
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return {row["step"]: row["train/loss"] for row in csv.DictReader(file)}


def problem_of(found: Round, folder: Path, unbroken: Path, steps: int) -> str:
    """What went wrong, or ""."""
    if found.code:
        return f"torchrun ended with {found.code}: {found.text[:6000]}"
    if re.search(r'File ".*/aottrain/', found.text):
        return f"a traceback of ours: {found.text[-3000:]}"
    found_losses, wanted = losses(folder), losses(unbroken)  # the first step after a restart is written, too
    if {step: found_losses.get(step) for step in wanted} != wanted:
        return f"losses {found_losses} differ from the unbroken run's {wanted}"
    if not same(state_of(folder, steps), state_of(unbroken, steps)):
        return "weights, optimizer state or random numbers differ from the unbroken run's"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="so many in which a process was killed")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=("ddp", "shard"), default="ddp")
    parser.add_argument("--engine", choices=("aot", "eager"), default="eager")
    parser.add_argument("--checkpoints", choices=CHECKPOINTS, default="whole", help="of --mode shard")
    given = parser.parse_args()
    if given.mode == "ddp" and given.checkpoints == "parts":
        parser.error("--checkpoints parts: needs --mode shard, where processes hold parts")
    chance, wrong, hit, missed, longest_s = random.Random(given.seed), 0, 0, 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        unbroken, output = Path(name, "unbroken"), Path(name, "output.txt")
        lasts_s = []
        for again in range(2):  # the second one has warm caches
            folder = unbroken if not again else Path(name, "timed")
            began_s = time.monotonic()
            found = one_round(command(folder, given, 0), output, None, 0)
            lasts_s.append(time.monotonic() - began_s)
            if found.code:
                print(found.text, file=sys.stderr)
                return 1
        while hit < given.rounds:
            folder = Path(name, f"round{hit + missed}")
            arguments = command(folder, given, 3)
            victim = chance.randrange(2)
            found = one_round(arguments, output, chance.uniform(0, lasts_s[-1]), victim)
            problem = problem_of(found, folder, unbroken, given.steps)
            hit, missed = hit + bool(found.killed_at), missed + (not found.killed_at)
            longest_s, wrong = max(longest_s, found.ended_s), wrong + bool(problem)
            if found.killed_at:
                when = f"process {victim} killed at `{found.killed_at[:60]}`"
                print(
                    f"{hit}: {when}; all ended {found.ended_s:.1f} s later: {found.line or 'nothing said'}", flush=True
                )
            if problem:
                print(f"wrong: {problem}", flush=True)
    print(f"{given.mode}, {given.engine}: {hit} rounds hit, {missed} not; longest end {longest_s:.1f} s; {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
