"""Eager, torch.compile and aottrain at two budgets: time of a training step against the peak memory of the step.

    python scripts/bench_compare.py                          # about a quarter of an hour on two cores
    python scripts/bench_compare.py --record                 # keep the figures, for the plot in README.md
    python scripts/bench_compare.py recipe.model.width=64    # any override of a run, to try it; then it records nothing

`task=pareto` measures: each run in a process of its own, with the same seed, batches and initial weights, all of them
taking turns in rounds.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aottrain.config.choices import COMPARED  # noqa: E402
from scripts.figures import record  # noqa: E402

MODEL = "GPT of 85.6 M parameters, 4 x 512 tokens"
SETTINGS = (
    "recipe=transformer", "recipe.model.num_layers=12", "recipe.model.width=768", "recipe.model.num_heads=12",
    "recipe.model.context=512", "data.batch_size=4", "logger=csv", "pareto.torch_backends=[inductor]",
    "pareto.torch_budgets=[1.0]", "pareto.match_peaks=false",
)  # fmt: skip
PEERS = [engine for engine in COMPARED if engine != "aot"]
HEADER = (MODEL, "step, ms: median [fastest, slowest round]", "peak, MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each run in each round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budgets", default="1.0,0.4")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_compare") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    parser.add_argument("--record", action="store_true", help="keep the figures for the plot")
    options, overrides = parser.parse_known_args()
    if options.record and overrides:
        parser.error(f"{' '.join(overrides)}: --record keeps the figures of the model above only")
    folder = options.out.absolute()
    own = [
        f"pareto.budgets=[{options.budgets}]", f"pareto.engines=[{','.join(PEERS)}]",
        f"pareto.rounds={options.rounds}", f"pareto.steps={options.steps}", f"trainer.num_threads={options.threads}",
        f"hydra.run.dir={folder}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "aottrain", "task=pareto", *SETTINGS, *own, *overrides]
    code = subprocess.run(command, cwd=ROOT).returncode
    if options.record and code == 0:
        import torch

        torch.set_num_threads(options.threads)  # the machine's description names them
        with (folder / "pareto.csv").open(encoding="utf-8") as file:
            record("compare", HEADER, recorded(list(csv.DictReader(file))))
    return code


def recorded(runs: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """A row for each run: its name, its time, its peak."""
    rows = []
    for run in runs:
        times = list(map(float, run["round_ms"].split()))
        ours = f"aottrain, budget {run['budget']}"
        name = {"aot": ours, "torch_compile": "torch.compile"}.get(run["engine"], run["engine"])
        spread = f"{statistics.median(times):.0f} [{min(times):.0f}, {max(times):.0f}]"
        rows.append([name, spread, f"{int(run['peak_bytes']) / 2**20:.0f}"])
    return rows


if __name__ == "__main__":
    sys.exit(main())
