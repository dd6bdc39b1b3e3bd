"""Every recipe's small variant by eager PyTorch, torch.compile and aottrain: losses, saved bytes, peaks and times.

    python scripts/learning.py                                   # all recipes, 100 steps by each engine
    python scripts/learning.py dlrm gcn vae --steps 20           # some of them
    python scripts/learning.py --engines eager aot               # without torch.compile, whose compiles take longest
    python scripts/learning.py --device cuda                     # on a GPU

Dropout is off, for torch.compile draws other random numbers; weights and batches are the same. Each recipe runs in a
process of its own. Equal means within `compare.loss_tolerance` at every step, or where that is not so, within three
times what rounding does to eager: how far it is from float64, and from itself with weights changed by a rounding.
Peaks are the allocator's, of one step after all others. Times are of forward and backward after that, the engines in
turns: they mean something on a quiet machine only. `--curves FILE` writes every step's loss by every engine as CSV.
Exit code 1 where losses are not equal or anything ran eagerly.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aottrain.config.choices import COMPARED  # noqa: E402
from scripts.figures import record  # noqa: E402

NAMES = {"eager": "eager", "torch_compile": "torch.compile", "aot": "aottrain"}
# What a recipe learns from in a step, where the default of 16 is too little.
BATCH_SIZES = {"dlrm": 256}
# How much farther from float64's losses than eager's own, or than eager's from its own with weights changed by a
# rounding, are those that differ by rounding alone.
_NOISE = 3.0
_ROUNDING = 2**-24  # of float32, of a number
_ROUNDED_RUNS = 3
_TIMED_ROUNDS = 15
_POINTS = 5  # of the curve
HEADER = (
    "recipe", "parameters", "loss by eager at step", "largest relative difference from it", "saved: eager, aottrain",
    "peak: eager, torch.compile, aottrain", "forward and backward: eager, torch.compile, aottrain",
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """What the steps of one engine gave."""

    losses: tuple[float, ...]
    """Of each step."""
    peak_bytes: int
    saved_bytes: int | None
    """None where nobody says."""
    reasons: tuple[str, ...] = ()
    """Of what ran eagerly, of aottrain."""
    step_s: float | None = None
    """Median seconds of forward and backward, in turns with the other engines."""


@dataclass(frozen=True)
class Ready:
    """What came of an engine's steps, and how to take another."""

    trained: Trained
    num_parameters: int
    seconds: Callable[[], float]
    """Of forward and backward of one more step."""


@dataclass(frozen=True)
class Result:
    """One recipe by some engines."""

    name: str
    num_parameters: int = 0
    by_engine: dict[str, Trained] = field(default_factory=dict)
    error: str = ""
    exact: tuple[float, ...] = ()
    """Losses of eager in float64, where an engine's differ from eager's: rounding alone can do that where an optimizer
    divides by small gradients, or through a batch norm."""
    noise: float = 0.0
    """How far eager's losses are then from those of eager with weights changed by a rounding, at most of a few runs."""

    def differences(self) -> dict[str, float]:
        """Of each engine the largest relative difference of a step's loss from the first one's."""
        (_, first), *rest = self.by_engine.items()
        return {name: _difference(other.losses, first.losses) for name, other in rest}

    def verdict(self, tolerance: float) -> str:
        """equal, or what is not."""
        if self.error:
            return self.error
        wrong = [f"{NAMES[name]} differs" for name in self.far(tolerance) if not self._is_rounding(name)]
        eager = [reason for trained in self.by_engine.values() for reason in trained.reasons]
        return "; ".join([*wrong, *(f"ran eagerly: {reason}" for reason in eager)]) or "equal"

    def far(self, tolerance: float) -> list[str]:
        """The engines whose losses differ from the first one's by more than that."""
        return [name for name, worst in self.differences().items() if not worst <= tolerance]

    def _is_rounding(self, name: str) -> bool:
        """Whether its losses are about as far from float64's as those of the first one are, or eager's from its own."""
        if not self.exact:
            return False
        first = next(iter(self.by_engine.values()))
        own, firsts = (_difference(one.losses, self.exact) for one in (self.by_engine[name], first))
        return own <= _NOISE * max(firsts, self.noise)


def _difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative one of a step; infinite where one is not a number, which would be larger than nothing."""
    errors = [abs(one - to) / max(abs(to), 1e-12) for one, to in zip(losses, reference, strict=True)]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def measure(name: str, engines: Sequence[str], steps: int, tolerance: float, device: str = "cpu") -> Result:
    """In this process."""
    ready = {engine: train(name, engine, steps, device=device) for engine in engines}
    times = medians_in_turns({engine: one.seconds for engine, one in ready.items()})
    by_engine = {engine: dataclasses.replace(one.trained, step_s=times[engine]) for engine, one in ready.items()}
    result = Result(name, next(iter(ready.values())).num_parameters, by_engine)
    del ready
    if not result.far(tolerance):
        return result
    exact, base = (
        train(name, "eager", steps, dtype, None, device).trained.losses for dtype in (torch.float64, torch.float32)
    )
    rounded = [train(name, "eager", steps, rounded=seed, device=device).trained.losses for seed in range(_ROUNDED_RUNS)]
    return dataclasses.replace(result, exact=exact, noise=max(_difference(losses, base) for losses in rounded))


def medians_in_turns(seconds: Mapping[str, Callable[[], float]], rounds: int = _TIMED_ROUNDS) -> dict[str, float]:
    """The median of what each gives, one call of each in every round, and one before all that does not count."""
    found = [{name: call() for name, call in seconds.items()} for _ in range(1 + rounds)][1:]
    return {name: statistics.median(times[name] for times in found) for name in seconds}


def train(
    name: str,
    engine: str,
    steps: int,
    dtype: torch.dtype = torch.float32,
    rounded: int | None = None,
    device: str = "cpu",
) -> Ready:
    """rounded: a seed, by which weights are changed by about a rounding."""
    from aottrain.config.reading import read_config, read_model
    from aottrain.measure.calls import synchronize
    from aottrain.metrics.memory import alive_tensors, eager_saved_bytes, watch_cpu_peak
    from aottrain.tasks.building.build import build_job

    values = {
        "recipe": {"name": name}, "engine": {"name": engine}, "device": device,
        "data": {"batch_size": BATCH_SIZES.get(name, 16)},
    }  # fmt: skip
    config, mistakes = read_model(read_config(values)[0])
    assert not mistakes, mistakes
    if hasattr(config.recipe.model, "dropout"):
        model = dataclasses.replace(config.recipe.model, dropout=0.0)
        config = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, model=model))
    beside = 0 if device == "cpu" else torch.cuda.memory_allocated()  # by engines before this one
    job = build_job(config)
    job.module.to(dtype)
    if rounded is not None:
        _round(job.module, torch.Generator().manual_seed(rounded))
    saved = eager_saved_bytes(job.module, _as(job.batches.at(1), dtype)[0]) if engine == "eager" else None
    # Torch's own for all: what is compared is the step's forward and backward.
    optimizer = torch.optim.AdamW(job.module.parameters(), lr=1e-3)
    losses = []
    for step in range(1, steps + 1):
        losses.append(float(job.step(_as(job.batches.at(step), dtype)).loss))
        optimizer.step()
        optimizer.zero_grad()
    batches = _as(job.batches.at(steps), dtype)
    if device == "cpu":
        with watch_cpu_peak(alive_tensors(job.module, optimizer, batches)) as peak:
            job.step(batches)
        peak_bytes = peak.num_bytes or 0
    else:
        torch.cuda.reset_peak_memory_stats()
        job.step(batches)
        peak_bytes = torch.cuda.max_memory_allocated() - beside
    reasons: tuple[str, ...] = ()
    if job.step.report is not None:
        saved = job.step.report.graphs[-1].saved_bytes if job.step.report.graphs else None
        reasons = tuple(dict.fromkeys(fallback.reason for fallback in job.step.report.fallbacks))

    def seconds() -> float:
        optimizer.zero_grad()
        synchronize(job.device)
        begin = time.perf_counter()
        job.step(batches)
        synchronize(job.device)
        return time.perf_counter() - begin

    count = sum(parameter.numel() for parameter in job.module.parameters())
    return Ready(Trained(tuple(losses), peak_bytes, saved, reasons), count, seconds)


@torch.no_grad()
def _round(module: torch.nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.mul_(1 + _ROUNDING * noise)


def _as(batches: Any, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(x.to(dtype) if x.is_floating_point() else x for x in batch) for batch in batches]


def _work(pipe: Any, *task: Any) -> None:
    warnings.simplefilter("ignore")
    try:
        pipe.send(measure(*task))
    except BaseException as error:  # which is the result
        pipe.send(Result(task[0], error=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"))


def measure_apart(name: str, engines: Sequence[str], steps: int, tolerance: float, device: str = "cpu") -> Result:
    """In a process of its own: what one model leaves behind is no other's matter."""
    import aottrain.compiler.pipeline
    import aottrain.tasks.building.build  # noqa: F401  once for all, where processes are forked

    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    parent, child = context.Pipe()
    process = context.Process(target=_work, args=(child, name, engines, steps, tolerance, device))
    process.start()
    child.close()
    try:
        return parent.recv()
    except EOFError:
        process.join()
        return Result(name, error=f"the process ended with {process.exitcode}")
    finally:
        process.join()


def cells(result: Result) -> tuple[str, ...]:
    """Its row of the table."""
    from aottrain.ir.units import format_bytes, format_count, format_seconds

    if result.error:
        return (result.name, "-", "-", result.error, "-", "-", "-")
    first = next(iter(result.by_engine.values())).losses
    differences = ", ".join(f"{NAMES[name]} {worst:.0e}" for name, worst in result.differences().items())
    if result.exact:
        differences += f"; eager with weights changed by a rounding {result.noise:.0e}"

    def of(engines: Sequence[str], what: str, told: Callable[[Any], str]) -> str:
        found = (getattr(result.by_engine.get(engine), what, None) for engine in engines)
        return ", ".join("-" if value is None else told(value) for value in found)

    saved = of(("eager", "aot"), "saved_bytes", format_bytes)
    peaks, times = of(COMPARED, "peak_bytes", format_bytes), of(COMPARED, "step_s", format_seconds)
    return (result.name, format_count(result.num_parameters), curve(first), differences, saved, peaks, times)


def curve(losses: Sequence[float]) -> str:
    """Some points of it: the first step, the last one, and between them."""
    last = len(losses)
    steps = sorted({max(1, round(last * point / (_POINTS - 1))) for point in range(_POINTS)})
    return ", ".join(f"{step}: {losses[step - 1]:.3f}" for step in steps)


def main() -> int:
    from aottrain.config.extensions.recipes import recipe_names
    from aottrain.config.run import CompareConfig

    known = [name for name in recipe_names() if name != "hf"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="recipe", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--engines", nargs="+", choices=COMPARED, default=list(COMPARED))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="write every step's loss by every engine as CSV")
    parser.add_argument("--record", action="store_true", help="keep the rows for scripts/README.md")
    options = parser.parse_args()
    if missing := [name for name in options.names if name not in known]:
        print(f"learning.py: {missing[0]}: unknown recipe ({', '.join(known)})", file=sys.stderr)
        return 2
    if options.steps < 1:
        print(f"learning.py: --steps {options.steps}: must be at least 1", file=sys.stderr)
        return 2
    code, curves = 0, [("recipe", "engine", "step", "loss")]
    for name in options.names or known:
        result = measure_apart(name, options.engines, options.steps, CompareConfig().loss_tolerance, options.device)
        verdict = result.verdict(CompareConfig().loss_tolerance)
        print(" | ".join([*cells(result), verdict]), flush=True)
        code |= verdict != "equal"
        if options.record and not result.error:
            record("learning", HEADER, [cells(result)])
        for engine, trained in result.by_engine.items():
            curves += [(name, NAMES[engine], step, loss) for step, loss in enumerate(trained.losses, 1)]
        if options.curves is not None:  # after each recipe, so that what was measured is kept
            with options.curves.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(curves)
    return code


if __name__ == "__main__":
    sys.exit(main())
