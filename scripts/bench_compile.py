"""What compiling costs as a model grows: a small GPT of several depths, each compiled in fresh processes.

    python scripts/bench_compile.py                        # 4, 12, 24 and 48 layers, cold and warm
    python scripts/bench_compile.py --layers 4 --peers     # torch.compile beside it

Cold: the folder of kept kernels and measurements is empty. Warm: a new process, the folder as the cold one left it.
Times are of processor (of the compilers that run beside, too) and, in brackets, by the clock; below each depth's stand
the stages, and how many times the smallest depth's they take. What every training process imports counts on its own:
torch, and what torch.optim loads with the first optimizer (torch._dynamo and sympy). Modules have their bytecode, as
after an installation.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.figures import record  # noqa: E402

HEADS, VOCABULARY, BATCH, CONTEXT = 4, 8192, 8, 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 24, 48])
    parser.add_argument("--width", type=int, default=64, help=f"a multiple of {HEADS}; costs go by calls, not by size")
    parser.add_argument("--repeats", type=int, default=1, help="of which the cheapest counts")
    parser.add_argument("--peers", action="store_true", help="torch.compile of the smallest depth, too")
    parser.add_argument("--record", action="store_true", help="keep the figures for the tables of the texts")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the engine of one process
    options = parser.parse_args()
    if options.repeats < 1 or options.width < HEADS or options.width % HEADS or min(options.layers) < 1:
        parser.error(f"--layers and --repeats: allowed are 1 and above; --width: multiples of {HEADS}")
    if options.child:
        print(json.dumps(measure(options.child, options.layers[0], options.width)))
        return 0
    compileall.compile_dir(ROOT / "aottrain", quiet=1)
    depths = sorted(set(options.layers))
    runs = {depth: _best(options, "aot", depth) for depth in depths}
    print(_loading(next(iter(runs.values()))["warm"]))
    for state in ("cold", "warm"):
        print(f"\n{state}, processor seconds (by the clock)\n" + _table(state, runs))
    if options.record:
        record("compiling", ("", *(f"{depth} layers" for depth in depths)), recorded(runs))
    if options.peers:
        for state, run in _best(options, "torch_compile", depths[0]).items():
            ours = runs[depths[0]][state]["wall_s"]["all"]
            took, used = run["wall_s"]["all"], run["cpu_s"]["all"]
            beside = f"{used:.2f} s of processor ({took:.2f} s by the clock)"
            print(f"\ntorch.compile, {depths[0]} layers, {state}: {beside}")
            print(f"aottrain: {ours / took:.3f} of that by the clock")
    return 0


def _best(options: argparse.Namespace, engine: str, depth: int) -> dict[str, dict[str, Any]]:
    """The cheapest cold and the cheapest warm run of one depth."""
    by_state: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            places = {"AOTTRAIN_CACHE_DIR": f"{folder}/aottrain", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            for runs in by_state.values():
                command = [sys.executable, str(Path(__file__).resolve()), "--child", engine]
                command += ["--layers", str(depth), "--width", str(options.width)]
                done = subprocess.run(command, env={**os.environ, **places}, stdout=subprocess.PIPE, check=True)
                runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {state: min(runs, key=lambda run: run["cpu_s"]["all"]) for state, runs in by_state.items()}


def measure(engine: str, depth: int, width: int) -> dict[str, Any]:
    """In this process: load, compile, run twice. Seconds of processor and by the clock of each part."""
    cpu_s: dict[str, float] = {}
    wall_s: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start, start_cpu = time.perf_counter(), _processor_seconds()
        out = run()
        wall_s[name], cpu_s[name] = time.perf_counter() - start, _processor_seconds() - start_cpu
        return out

    torch = timed("torch", lambda: __import__("torch"))
    timed("torch.optim", lambda: torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1))
    from scripts.bench_models import GPT

    torch.manual_seed(0)
    model = GPT(depth, width, HEADS)
    batch = tuple(torch.randint(0, VOCABULARY, (BATCH, CONTEXT)) for _ in range(2))

    def load() -> Any:
        if engine == "torch_compile":
            return torch.compile(model)
        import aottrain

        return aottrain.compile(model, capture="trace", on_unsupported="error")

    compiled = timed("aottrain", load)
    graph = timed("prepare", lambda: compiled.prepare(*batch)) if engine == "aot" else None
    timed("first step", lambda: compiled(*batch).backward())
    timed("second step", lambda: compiled(*batch).backward())
    for seconds in (cpu_s, wall_s):
        first_step = seconds["first step"] - seconds["second step"]
        seconds["all"] = seconds["aottrain"] + seconds.get("prepare", 0.0) + first_step
    figures: dict[str, Any] = {"cpu_s": cpu_s, "wall_s": wall_s}
    if graph is not None:
        figures["stages"] = [(stage.name, stage.cpu_seconds, stage.seconds) for stage in graph.stages]
        figures |= {"kernels": len(graph.kernels), "functions": graph.num_kernel_functions}
        figures["nodes"] = graph.num_nodes["joint"]
    return figures


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _loading(run: dict[str, Any]) -> str:
    parts = [f"{name} {run['cpu_s'][name]:.2f} s ({run['wall_s'][name]:.2f} s)" for name in ("torch", "torch.optim")]
    return f"loaded before, counted nowhere below: {', '.join(parts)}"


def _table(state: str, runs: dict[int, dict[str, dict[str, Any]]]) -> str:
    from aottrain.explain.tables import table

    first = next(iter(runs))
    columns = {depth: _rows(run[state]) for depth, run in runs.items()}
    rows = []
    for name in columns[first]:
        row = [name]
        for depth, column in columns.items():
            cpu, wall = column.get(name, (0.0, 0.0))
            base = columns[first][name][0]
            row += [f"{cpu:.2f} ({wall:.2f})", "" if depth == first or base < 0.02 else f"{cpu / base:.1f}x"]
        rows.append(tuple(row))
    for name in ("nodes", "kernels", "functions"):
        rows.append((name, *(cell for run in runs.values() for cell in (f"{run[state][name]:,}", ""))))
    header = ["", *(cell for depth in runs for cell in (f"{depth} layers", ""))]
    return table(header, rows, right=range(1, len(header)))


def recorded(runs: dict[int, dict[str, dict[str, Any]]]) -> list[list[str]]:
    """The rows of the table in the texts: seconds by the clock."""
    rows = []
    for state in ("cold", "warm"):
        for name, title in (("all", "all of it"), ("kernels", "of that scheduling, generating and compiling kernels")):
            seconds = [f"{_rows(run[state])[name][1]:.2f} s" for run in runs.values()]
            rows.append([f"{state}, {title}", *seconds])
    counts = [f"{run['warm']['kernels']}, {run['warm']['functions']}" for run in runs.values()]
    return [*rows, ["kernels launched, distinct functions", *counts]]


def _rows(run: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """For each row of the table its processor seconds and seconds by the clock; kernels are a part of all."""
    both = {name: (run["cpu_s"][name], run["wall_s"][name]) for name in run["cpu_s"]}
    stages: dict[str, tuple[float, float]] = {}
    for name, cpu, wall in run["stages"]:
        total = stages.get(name, (0.0, 0.0))
        stages[name] = total[0] + cpu, total[1] + wall
    rest = [both["prepare"][i] - sum(part[i] for part in stages.values()) for i in (0, 1)]
    kernels = [sum(stages.get(name, (0.0, 0.0))[i] for name in ("schedule", "make_kernels", "link")) for i in (0, 1)]
    first_step = [both["first step"][i] - both["second step"][i] for i in (0, 1)]
    return {
        "load aottrain": both["aottrain"],
        **stages,
        "other": (rest[0], rest[1]),
        "first step": (first_step[0], first_step[1]),
        "kernels": (kernels[0], kernels[1]),
        "all": both["all"],
    }


if __name__ == "__main__":
    sys.exit(main())
