"""The same training by each engine, and the memory of a step by budget: figures that hang on no clock.

    python scripts/bench_training.py                       # about a quarter of an hour on one core
    python scripts/bench_training.py --record              # keep the figures, for the plots in README.md
    python scripts/bench_training.py recipe.model.width=64 # any override of a run, to try it; then it records nothing

The first is `experiment=engines` with dropout off, whose losses must lie over each other; the second a sweep over
`partition.budget` of a few steps, for the peaks that were predicted and measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.figures import record  # noqa: E402
from scripts.plots import LINES  # noqa: E402

MODEL = "GPT of 1.85 M parameters, 16 x 128 tokens"
SETTINGS = (
    "recipe=transformer", "recipe.model.dropout=0", "logger=csv", "trainer.save_every=0", "trainer.eval_every=0",
)  # fmt: skip
BUDGETS = ("0.0", "0.1", "0.2", "0.3", "0.4", "0.6", "0.8", "1.0")
NAMES = {"torch_compile": "torch.compile", "aot": "aottrain"}
LOSSES_HEADER = (f"Loss, dropout off: {MODEL}", LINES, "step", "loss")
BUDGET_HEADER = (f"Memory of a step by budget, dropout off: {MODEL}", LINES, "budget", "MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of the training by each engine")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_training") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    parser.add_argument("--record", action="store_true", help="keep the figures for the plots")
    options, overrides = parser.parse_known_args()
    if options.record and overrides:
        parser.error(f"{' '.join(overrides)}: --record keeps the figures of the model above only")
    folder = options.out.absolute()
    common = [*SETTINGS, f"trainer.num_threads={options.threads}", *overrides]
    sweeps = {
        "engines": ["experiment=engines", f"trainer.steps={options.steps}"],
        "budgets": ["-m", f"partition.budget={','.join(BUDGETS)}", "trainer.steps=4", "trainer.sample_bytes=0"],
    }
    for name, own in sweeps.items():
        command = [sys.executable, "-m", "aottrain", *own, *common, f"hydra.sweep.dir={folder / name}"]
        if code := subprocess.run(command, cwd=ROOT).returncode:
            return code
    engines, budgets = jobs(folder / "engines", "engine"), jobs(folder / "budgets", "partition.budget")
    tables = {"losses": (LOSSES_HEADER, losses(engines)), "budget": (BUDGET_HEADER, memory(engines, budgets))}
    for name, (header, rows) in tables.items():
        print(header[0], *(f"{row[0]}: {row[1][:60]}" for row in rows), sep="\n")
        if options.record:
            import torch

            torch.set_num_threads(options.threads)  # the machine's description names them
            record(name, header, rows)
    return 0


def jobs(sweep: Path, key: str) -> dict[str, Path]:
    """The folder of each job of a sweep, by its value of `key`."""
    with (sweep / "sweep.csv").open(encoding="utf-8", newline="") as file:
        return {row[key]: sweep / row["job"] for row in csv.DictReader(file)}


def losses(engines: Mapping[str, Path]) -> list[list[str]]:
    rows = []
    for engine, folder in engines.items():
        with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
            points = [(row["step"], f"{float(row['train/loss']):.4f}") for row in csv.DictReader(file)]
        rows.append([NAMES.get(engine, engine), written(points)])
    return rows


def memory(engines: Mapping[str, Path], budgets: Mapping[str, Path]) -> list[list[str]]:
    """Peaks of each engine, as lines without a slope; of ours by budget what was predicted, measured and saved."""
    rows = []
    for engine in ("eager", "torch_compile"):
        peak = mib(summary(engines[engine])["peak_bytes"])
        rows.append([f"{NAMES.get(engine, engine)}'s peak", written([(BUDGETS[0], peak), (BUDGETS[-1], peak)])])
    columns = {"measured peak": "peak_bytes", "predicted peak": "predicted_peak_bytes", "saved": "saved_bytes"}
    for name, column in columns.items():
        rows.append([name, written([(each, mib(summary(budgets[each])[column])) for each in BUDGETS])])
    return rows


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}"


def written(points: Sequence[tuple[str, str]]) -> str:
    return " ".join(f"{x}:{y}" for x, y in points)


if __name__ == "__main__":
    sys.exit(main())
