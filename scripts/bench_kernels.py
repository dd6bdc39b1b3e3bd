"""Speed, peak and compile time of forward and backward, ours beside eager's and torch.compile's: `--model gpt`.

Every engine is in a process of its own; they take turns, round by round, with the same weights and data, so a ratio is
of one round. Beside each model stands the time of its matrix products, convolutions and attention alone, replayed in
the same rounds: what no fusion of the rest can go below. `--preload` gives all processes another allocator. `--load`
keeps some processors busy with other work from before the first compilation to the end of the last round; where ours
then chose another library, layout or kernel than on the machine as it was before, that is said. Our cache is empty for
each engine's first call.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aottrain  # noqa: E402
from aottrain.compat import TorchDispatchMode  # noqa: E402
from aottrain.config.choices import COMPARED  # noqa: E402
from aottrain.explain.tables import table  # noqa: E402
from aottrain.ir.ops import OpKind, op_info  # noqa: E402
from aottrain.ir.units import format_bytes  # noqa: E402
from aottrain.metrics.memory import watch_cpu_peak  # noqa: E402
from aottrain.tasks.measuring.pareto_points import Point, ratio  # noqa: E402
from aottrain.tasks.measuring.runs_in_turns import RunError, TimedRun, serve  # noqa: E402
from scripts.bench_models import MODELS, TITLES, VARIANTS, Made  # noqa: E402
from scripts.figures import record  # noqa: E402

ENGINES = (*COMPARED, "products")
ALL: Mapping[str, Callable[[], Made]] = {**MODELS, **VARIANTS}
_LEAST_MS = 0.1  # of a time that another is compared with
RECORDED = (
    "model", "ms of a step: eager, torch.compile, aottrain", "torch.compile over aottrain", "eager over aottrain",
    "aottrain over products and attention alone", "peak: eager, torch.compile, aottrain",
    "first call: torch.compile, aottrain",
)  # fmt: skip


def main() -> int:
    parser = engines_parser(__doc__, ALL, ENGINES, "bench_kernels", steps=5, rounds=10)
    parser.add_argument("--preload", default="", help="a library for LD_PRELOAD, such as tcmalloc's")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside all that is measured; 0")
    options = parsed(parser, ENGINES)
    torch.set_num_threads(options.threads)
    if options.engine:
        return serve(lambda: begin(ALL[options.model[0]], options.engine, options.autocast))
    if options.preload:
        os.environ["LD_PRELOAD"] = options.preload
    speedups: dict[str, list[float]] = {}
    for name in options.model or tuple(MODELS):
        print(f"\n=== {name}, torch {torch.__version__}, {options.threads} threads", flush=True)
        for engine, value in bench(name, options).items():
            speedups.setdefault(engine, []).append(value)
    for engine, values in speedups.items():
        print(f"aot against {engine}: {math.exp(statistics.mean(map(math.log, values))):.2f}x in geometric mean")
    return 0


def engines_parser(
    doc: str | None, models: Iterable[str], engines: Sequence[str], folder: str, *, steps: int, rounds: int
) -> argparse.ArgumentParser:
    """Of a benchmark in which engines take turns; each side runs the same script again, with `--engine`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=tuple(models), help="may be given several times")
    parser.add_argument("--engines", default=",".join(engines), help="with commas between")
    parser.add_argument("--steps", type=int, default=steps, help="timed steps of each engine in each round")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--autocast", action="store_true", help="forward under bfloat16 autocast")
    parser.add_argument("--out", type=Path, default=Path("outputs") / folder / time.strftime("%Y-%m-%d_%H-%M-%S"))
    parser.add_argument("--record", action="store_true", help="keep the figures for the tables of the texts")
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # one side, in its own process
    return parser


def parsed(parser: argparse.ArgumentParser, engines: Sequence[str]) -> argparse.Namespace:
    options = parser.parse_args()
    if unknown := set(options.engines.split(",")).difference(engines):
        parser.error(f"--engines: unknown {', '.join(sorted(unknown))}; allowed: {', '.join(engines)}")
    return options


def bench(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Print the table of one model. Returns how many times faster aot is than each other engine."""
    arguments = ["--model", name, "--threads", str(options.threads)] + ["--autocast"] * options.autocast
    alone = _choices(name, arguments, options) if options.load else None
    with busy(options.load):
        points, figures = take_turns(Path(__file__), name, arguments, options)
    _print(points, figures)
    if alone is not None and "aot" in figures:
        changed = differences(alone, figures["aot"]["choices"])
        print(
            f"choices of {len(alone)} questions: " + ("the same as without load" if not changed else "; ".join(changed))
        )
    if options.record:
        record("kernels" if name in MODELS else "variants", RECORDED, [_recorded(name, points, figures)])
    others = [engine for engine in points if engine not in ("aot", "products") and "aot" in points]
    ratios = {engine: ratio(points[engine], points["aot"]) for engine in others}
    return {engine: against.median for engine, against in ratios.items() if against is not None}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that each keep one processor busy, until the block ends."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _choices(name: str, arguments: Sequence[str], options: argparse.Namespace) -> Mapping[str, str]:
    """What ours chooses with an empty cache on the machine as it is."""
    alone = argparse.Namespace(**{**vars(options), "engines": "aot", "rounds": 0})
    _, figures = take_turns(Path(__file__), name, arguments, alone)
    return figures["aot"]["choices"] if "aot" in figures else {}


def differences(alone: Mapping[str, str], loaded: Mapping[str, str]) -> list[str]:
    """Each question that was answered otherwise under load, or asked in one of the two alone."""
    return [
        f"{question}: {alone.get(question, 'not asked')}, under load {loaded.get(question, 'not asked')}"
        for question in sorted({*alone, *loaded})
        if alone.get(question) != loaded.get(question)
    ]


def take_turns(
    script: Path, name: str, arguments: Sequence[str], options: argparse.Namespace
) -> tuple[dict[str, Point], dict[str, Mapping[str, Any]]]:
    """The engines of options.engines, each in a process of its own (`script` with these arguments and `--engine`), in
    turns, options.rounds rounds of options.steps steps. By engine the times, and what `begin` tells. One that fails is
    printed and left out; what it wrote is in options.out."""
    runs: dict[str, TimedRun] = {}
    figures: dict[str, Mapping[str, Any]] = {}
    # Cold caches, so that compile time is the time of a first run; one folder for each table.
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "AOTTRAIN_CACHE_DIR": f"{cache}/aottrain"}
        try:
            for engine in options.engines.split(","):
                command = [sys.executable, str(script.resolve()), *arguments, "--engine", engine]
                run = TimedRun(command, options.out / f"{name.replace(' ', '_')}_{engine}.txt")
                try:
                    figures[engine] = run.start()
                    runs[engine] = run
                except RunError as error:
                    print(f"{engine}: {error}", flush=True)
            times: dict[str, list[float]] = {engine: [] for engine in runs}
            for index in range(options.rounds):
                shift = index % max(len(runs), 1)
                for engine in (*list(runs)[shift:], *list(runs)[:shift]):
                    times[engine].append(statistics.median(runs[engine].time(options.steps)))
        finally:
            for run in runs.values():
                run.close()
    return {engine: Point(engine, engine).timed(times[engine]) for engine in runs if times[engine]}, figures


def _print(points: Mapping[str, Point], figures: Mapping[str, Mapping[str, Any]]) -> None:
    header = ("engine", "step ms", "lowest", "highest", "against eager", "peak", "page faults", "first call", "kernels")
    rows = []
    for engine, point in points.items():
        measured = figures[engine]
        against = ratio(points["eager"], point) if "eager" in points else None
        peak = "-" if measured["peak_bytes"] is None else format_bytes(measured["peak_bytes"])
        spread = [f"{value:.1f}" for value in (point.step_ms_median or 0, min(point.round_ms), max(point.round_ms))]
        counts = [f"{measured['page_faults']:,}", f"{measured['compile_s']:.2f} s", str(measured["kernels"])]
        rows.append((engine, *spread, "-" if against is None else str(against), peak, *counts))
    print(table(header, rows, right=range(1, 9)), flush=True)


def _recorded(name: str, points: Mapping[str, Point], figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The row of the table in the texts; a dash for what was not measured."""

    def over(engine: str, other: str) -> str:
        # One model multiplies nothing.
        there = {engine, other} <= points.keys() and (points[other].step_ms_median or 0) > _LEAST_MS
        return str(ratio(points[engine], points[other])) if there else "-"

    def each(engines: Sequence[str], text: Callable[[str], str]) -> str:
        return ", ".join(text(engine) if engine in points else "-" for engine in engines)

    return [
        TITLES[name],
        each(COMPARED, lambda engine: f"{points[engine].step_ms_median or 0:.1f}"),
        over("torch_compile", "aot"),
        over("eager", "aot"),
        over("aot", "products"),
        each(COMPARED, lambda engine: format_bytes(figures[engine]["peak_bytes"])),
        each(COMPARED[1:], lambda engine: f"{figures[engine]['compile_s']:.1f} s"),
    ]


class WithLoss(nn.Module):
    """What is compiled, as the trainer compiles it: the loss belongs to the program."""

    def __init__(self, network: nn.Module, loss: Callable[..., torch.Tensor]):
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, *batch: Any) -> torch.Tensor:
        return self.loss(self.network, *batch)


def begin(
    make: Callable[[], Made], engine: str, autocast: bool, on_unsupported: str = "error"
) -> tuple[Mapping[str, Any], Callable[[int], list[float]]]:
    """Build, compile, warm up and measure one side."""
    torch.manual_seed(0)
    network, loss, batch = make()
    model = WithLoss(network, loss)
    call: Any = model
    if engine == "torch_compile":
        call = torch.compile(model)
    elif engine == "aot":
        call = aottrain.compile(model, capture="trace", on_unsupported=on_unsupported)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = call(*batch)
        value.backward()
        model.zero_grad(set_to_none=True)

    if engine == "products":
        step = products(step)

    def take(count: int) -> list[float]:
        times = []
        for _ in range(count):
            start_s = time.perf_counter()
            step()
            times.append((time.perf_counter() - start_s) * 1e3)
        return times

    first = take(1)[0] / 1e3
    later = take(3)[-1] / 1e3
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    take(2)
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // 2
    peak_bytes = None
    if engine != "products":
        with watch_cpu_peak([*model.parameters(), *model.buffers()]) as peak:
            take(1)
        peak_bytes = peak.num_bytes
    kernels = sum(len(graph.kernels) for graph in call.report.graphs) if engine == "aot" else 0
    figures = {"compile_s": first - later, "peak_bytes": peak_bytes, "page_faults": faults, "kernels": kernels}
    # Names alone: rates and times differ from run to run.
    decisions = call.report.decisions.decisions if engine == "aot" else ()
    figures["choices"] = {f"{d.kind} of {d.key}": d.choice for d in decisions if isinstance(d.choice, str)}
    figures["fallbacks"] = sorted({one.reason for one in call.report.fallbacks}) if engine == "aot" else []
    return figures, take


class _Record(TorchDispatchMode):
    """The calls that are bound by arithmetic, with tensors of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op_info(func).kind is OpKind.COMPUTE or "scaled_dot_product" in str(func):
            self.calls.append(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)


def products(step: Callable[[], None]) -> Callable[[], None]:
    """The products, convolutions and attention of one step, again and again on the same tensors."""
    with _Record() as record:
        step()

    def replay() -> None:
        with torch.no_grad():
            for call in record.calls:
                call()

    return replay


if __name__ == "__main__":
    sys.exit(main())
