"""Memory against speed, ours and what people use instead: `python scripts/bench_budget.py --recipe llama`.

A recipe is `task=pareto` with sizes and budgets for a claim: its table says of every run the predicted and the measured
peak, the step time with its spread, the ratio to eager and whether another one dominates; below it, who is faster at
an equal peak. `--recipe trunk` is a bare stack of 12 pre-norm blocks (width 128, 4 x 256 tokens, forward and backward
alone), `--recipe gpt` the same with embeddings and a chunked loss over 8,192 words: the time that it takes to bring
activations down, against eager's and against those of budget 1.0. All run by eager's kernels, or `--kernel auto`.

Every run is in a process of its own; all take turns. Wants about 0.5 GB for each run, and a quiet machine.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aottrain  # noqa: E402
from aottrain.config.choices import PEERS, TORCH_BACKENDS  # noqa: E402
from aottrain.explain.tables import table  # noqa: E402
from aottrain.ir.units import format_bytes, format_seconds  # noqa: E402
from aottrain.metrics.memory import watch_cpu_peak  # noqa: E402
from aottrain.tasks.measuring.pareto_points import Point, Ratio, judged, ratio  # noqa: E402
from aottrain.tasks.measuring.runs_in_turns import RunError, TimedRun, serve  # noqa: E402
from aottrain.trainer.blocks import checkpointed, repeated_modules  # noqa: E402
from scripts.bench_models import GPT, VOCABULARY, Block  # noqa: E402
from scripts.figures import record  # noqa: E402

BUDGETS = "1.0,0.8,0.6,0.4,0.2,0.1,0.0"
TORCH_BUDGETS = "1.0,0.5,0.2,0.1,0.0"
# Small enough for a CPU; a context that makes activations matter.
MODELS = {
    "transformer": ["recipe.model.dropout=0.0", "data.batch_size=8"],
    "llama": ["recipe.model.context=256", "data.batch_size=8"],
    "resnet": ["data.batch_size=32"],
}
RECORDED = (
    "recipe", "eager", "per-block checkpointing", "torch.compile's own budgets, their lowest peak", "ours, lowest peak",
)  # fmt: skip
NUM_LAYERS, WIDTH, NUM_HEADS, SHAPE = 12, 128, 4, (4, 256)
# MB (10^6 bytes) over what is alive before the step: a known prototype's points on this trunk.
TRUNK_TARGETS_MB = (60, 43, 34, 25.5, 22.9, 19.5, 16.9)


class Trunk(nn.Module):
    """x of (4, 256, 128) -> the mean square of 12 blocks' output: no embedding, no head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, NUM_HEADS) for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def trunk() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Trunk(), (torch.randn(*SHAPE, WIDTH),)


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    words, following = (torch.randint(0, VOCABULARY, SHAPE) for _ in range(2))
    return GPT(NUM_LAYERS, WIDTH, NUM_HEADS), (words, following)


STACKS = {"trunk": trunk, "gpt": gpt}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", action="append", choices=(*MODELS, *STACKS), help="may be given several times")
    parser.add_argument("--steps", type=whole, default=5, help="timed steps of each run in each round")
    parser.add_argument("--rounds", type=whole, default=10)
    parser.add_argument("--budgets", default=BUDGETS, help="fractions and bytes, with commas between")
    parser.add_argument("--torch-budgets", default=TORCH_BUDGETS, help="torch's own ratio, as a list")
    parser.add_argument("--torch-backends", default=",".join(TORCH_BACKENDS), help="aot_eager: eager's kernels")
    parser.add_argument("--kernel", default="aten", choices=("aten", "auto"), help="of ours; auto: generated kernels")
    parser.add_argument("--threads", type=whole, default=torch.get_num_threads(), help="of each run")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_budget") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    parser.add_argument("--record", action="store_true", help="keep the figures for the tables of the texts")
    parser.add_argument("--point", help=argparse.SUPPRESS)  # a stack's run, in its own process
    options, overrides = parser.parse_known_args()
    torch.set_num_threads(options.threads)
    if options.point:
        return serve(lambda: begin_stack(options.recipe[0], options.point, options.kernel))
    codes = []
    for name in options.recipe or ("transformer", "llama", "trunk", "gpt"):
        print(f"\n=== {name}, torch {torch.__version__}, {options.threads} threads", flush=True)
        if name in STACKS:
            codes.append(bench_stack(name, options, options.out / name))
        else:
            codes.append(bench_recipe(name, options, overrides))
    return max(codes)


def whole(text: str) -> int:
    """A number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number from 1")
    return int(text)


def bench_recipe(name: str, options: argparse.Namespace, overrides: list[str]) -> int:
    """task=pareto; `overrides` are the command line's own."""
    settings = [
        "task=pareto",
        f"recipe={name}",
        *MODELS[name],
        "logger=csv",
        f"kernel={options.kernel}",
        f"trainer.num_threads={options.threads}",
        f"pareto.budgets=[{options.budgets}]",
        f"pareto.torch_budgets=[{options.torch_budgets}]",
        f"pareto.torch_backends=[{options.torch_backends}]",
        f"pareto.steps={options.steps}",
        f"pareto.rounds={options.rounds}",
        f"hydra.run.dir={(options.out / name).absolute()}",
    ]
    code = subprocess.run([sys.executable, "-m", "aottrain", *settings, *overrides], cwd=ROOT).returncode
    if options.record and code == 0:
        with (options.out / name / "pareto.csv").absolute().open(encoding="utf-8") as file:
            record("budgets", RECORDED, [recorded(name, list(csv.DictReader(file)))])
    return code


def recorded(recipe: str, runs: Sequence[Mapping[str, str]]) -> list[str]:
    """The row of the table in the texts: the lowest peak of each side, and our fastest run within it."""

    def peak(run: Mapping[str, str]) -> int:
        return int(run["peak_bytes"])

    def rounds(run: Mapping[str, str]) -> list[float]:
        return list(map(float, run["round_ms"].split()))

    def beside(engine: str) -> str:
        side = [run for run in runs if run["engine"] == engine and run["peak_bytes"]]
        if not side:
            return "-"
        lowest = min(side, key=peak)
        within = [run for run in ours if peak(run) <= peak(lowest)]
        if engine == "eager" or not within:
            return format_bytes(peak(lowest))
        fastest = min(within, key=lambda run: statistics.median(rounds(run)))
        ratios = [a / b for a, b in zip(rounds(fastest), rounds(lowest), strict=True)]
        spread = f"{statistics.median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]"
        return f"{format_bytes(peak(lowest))}; ours in {format_bytes(peak(fastest))} takes {spread} of that time"

    ours = [run for run in runs if run["engine"] == "aot" and run["peak_bytes"]]
    sides = [beside(engine) for engine in PEERS]
    return [recipe, *sides, format_bytes(min(map(peak, ours)))]


def begin_stack(name: str, point: str, kernel: str) -> tuple[Mapping[str, Any], Callable[[int], list[float]]]:
    """point: eager, eager_checkpoint, or a budget: a fraction, or bytes over what is alive before a step."""
    torch.manual_seed(0)
    model, batch = STACKS[name]()
    alive = sum(value.nbytes for value in (*model.parameters(), *batch))
    call: Callable[..., torch.Tensor] = model
    saved = predicted = None
    if point == "eager_checkpoint":
        call = checkpointed(model, repeated_modules(model))
    elif point != "eager":
        budget = f"{alive + int(point[:-1])}B" if point.endswith("B") else float(point)
        compiled = aottrain.compile(model, capture="trace", kernel=kernel, budget=budget, loss_head="chunked")
        compiled.prepare(*batch)
        graph, call = compiled.report.graphs[-1], compiled
        saved, predicted = graph.saved_bytes, graph.predicted_peak_bytes - alive

    def take(count: int) -> list[float]:
        times = []
        for _ in range(count):
            start_s = time.perf_counter()
            call(*batch).backward()
            times.append((time.perf_counter() - start_s) * 1e3)
            model.zero_grad(set_to_none=True)
        return times

    take(3)
    with watch_cpu_peak() as peak:
        take(1)
    return {"peak_bytes": peak.num_bytes, "predicted_peak_bytes": predicted, "saved_bytes": saved}, take


def bench_stack(stack: str, options: argparse.Namespace, folder: Path) -> int:
    """Activations are all bytes over those alive before the step: saved values, temporaries and gradients."""
    runs: dict[str, TimedRun] = {}
    points: dict[str, Point] = {}

    def add(name: str, point: str) -> None:
        settings = ["--recipe", stack, "--point", point, "--kernel", options.kernel, "--threads", str(options.threads)]
        command = [sys.executable, str(Path(__file__).resolve()), *settings]
        run = TimedRun(command, folder / f"{name.replace(' ', '_').replace('/', 'by')}.txt")
        try:
            figures = run.start()
        except RunError as error:
            print(f"{name}: {error}", flush=True)
            return
        runs[name], points[name] = run, Point(name, "eager" if point == "eager" else "aot", **figures)

    try:
        for name in ("eager", "eager_checkpoint", "1.0"):
            add(name, name)
        for name in ("eager", "1.0"):
            add(f"1/4 of {name}", f"{(points[name].peak_bytes or 0) // 4}B")
        for target in TRUNK_TARGETS_MB if stack == "trunk" else ():
            add(f"{target} MB", f"{int(target * 1e6)}B")
        add("0.0", "0.0")
        times: dict[str, list[float]] = {name: [] for name in runs}
        for index in range(options.rounds):
            shift = index % len(runs)
            for name in (*list(runs)[shift:], *list(runs)[:shift]):
                times[name].append(statistics.median(runs[name].time(options.steps)))
    finally:
        for run in runs.values():
            run.close()
    _print_stack(judged([points[name].timed(times[name]) for name in points]))
    return 0


def _print_stack(points: list[Point]) -> None:
    header = ("point", "predicted MB", "activations MB", "saved MB", "step (median)", "vs eager", "vs 1.0", "dominated")
    by_name = {point.name: point for point in points}

    def megabytes(size: int | None) -> str:
        return "-" if size is None else f"{size / 1e6:.2f}"

    def step(point: Point) -> str:
        low, high = (format_seconds(value / 1e3) for value in (min(point.round_ms), max(point.round_ms)))
        return f"{format_seconds((point.step_ms_median or 0) / 1e3)} [{low}, {high}]"

    rows = []
    for point in points:
        sizes = (point.predicted_peak_bytes, point.peak_bytes, point.saved_bytes)
        ratios = [str(ratio(point, by_name[name])) for name in ("eager", "1.0")]
        rows.append((point.name, *map(megabytes, sizes), step(point), *ratios, "dominated" * point.dominated))
    print(table(header, rows, right=range(1, 7)), flush=True)
    for name in ("eager", "1.0"):
        quarter = by_name.get(f"1/4 of {name}")
        if quarter is None:
            print(f"activations down 4x from {name}'s: no plan is as low")
            continue
        against: Ratio | None = ratio(quarter, by_name[name])
        print(
            f"activations down 4x from {name}'s ({megabytes(by_name[name].peak_bytes)} MB): step time {against} of it"
        )


if __name__ == "__main__":
    sys.exit(main())
