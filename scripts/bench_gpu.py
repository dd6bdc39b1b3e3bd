"""Forward and backward on a CUDA device: time, peak memory and first call, ours beside eager's and torch.compile's.

    python scripts/bench_gpu.py                                   # all models, all engines
    python scripts/bench_gpu.py --model gpt2 --engines eager,aot --rounds 3

Engines compile side by side, each in a process of its own, and then take turns, so a ratio is of one round; a first
call is that of a cold cache while the others compile, too. Steps of a round follow one another, and the device is
waited for after the last: what the host does is hidden as far as it is in training. `products` are the matrix
products, convolutions and attention of eager's step alone, replayed on tensors that stay: what no fusion of the rest
can go below. It needs the compiler alone: no Hydra, no wandb.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aottrain  # noqa: E402
from aottrain.config.choices import COMPARED  # noqa: E402
from aottrain.explain.tables import table  # noqa: E402
from aottrain.ir.units import format_bytes  # noqa: E402
from aottrain.tasks.measuring.pareto_points import Point, ratio  # noqa: E402
from aottrain.tasks.measuring.runs_in_turns import RunError, TimedRun, serve  # noqa: E402
from recipes import llama, resnet  # noqa: E402
from scripts.bench_kernels import WithLoss, products  # noqa: E402
from scripts.bench_models import GPT, Gates  # noqa: E402
from scripts.figures import record  # noqa: E402

RECORDED_ENGINES = (*COMPARED, "aot_graphs")
ENGINES = (*RECORDED_ENGINES, "aot_budget", "products")
RECORDED = ("model", "eager", "torch.compile", "aottrain (predicted peak)", "with CUDA graphs")
_DEVICE = torch.device("cuda")
Made = tuple[nn.Module, Callable[..., Tensor], tuple[Any, ...]]


def _tokens(vocabulary: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randint(0, vocabulary, (batch, context)) for _ in range(2))  # type: ignore[return-value]


def _gpt2() -> Made:
    """GPT-2 124M: 12 layers of width 768, 8 x 1024 tokens, a tied head over 50,304 tokens."""
    model = GPT(num_layers=12, width=768, num_heads=12, vocabulary=50304, context=1024)
    return model, lambda call, *batch: call(*batch), _tokens(50304, 8, 1024)


def _llama() -> Made:
    """Half of a Llama of 1B: 8 layers of width 2048, 32 heads that share 8 of keys, 2 x 2048 tokens, 32,000 tokens."""
    options = llama.Options(
        num_layers=8, width=2048, num_heads=32, num_kv_heads=8, mlp_width=8192, context=2048, vocab_size=32000
    )
    return llama.build(options), llama.loss, (_tokens(32000, 2, 2048),)


def _resnet() -> Made:
    """A residual network of width 64 on 256 images of 32 x 32."""
    options = resnet.Options(width=64)
    return resnet.build(options), resnet.loss, (resnet.make_batch(options, 256, torch.Generator().manual_seed(0)),)


def _gates() -> Made:
    """Norms, gates and softmaxes over 16,384 rows of 4,096: no matrix product."""
    return Gates(4096), lambda call, x: call(x), (torch.randn(16384, 4096),)


def _small() -> Made:
    """A GPT so small that starting kernels takes longest: 4 layers of width 192, 16 x 128 tokens."""
    model = GPT(num_layers=4, width=192, num_heads=6, vocabulary=256, context=128)
    return model, lambda call, *batch: call(*batch), _tokens(256, 16, 128)


# Each with whether it runs under bfloat16 autocast.
MODELS: Mapping[str, tuple[Callable[[], Made], bool]] = {
    "gpt2": (_gpt2, True),
    "llama": (_llama, True),
    "resnet": (_resnet, False),
    "gates": (_gates, False),
    "small": (_small, False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=tuple(MODELS), help="may be given several times; all")
    parser.add_argument("--engines", default=",".join(ENGINES), help="with commas between")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each engine in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_gpu") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    parser.add_argument("--record", action="store_true", help="keep the figures for the tables of the texts")
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # one side, in its own process
    options = parser.parse_args()
    if unknown := set(options.engines.split(",")).difference(ENGINES):
        parser.error(f"--engines: unknown {', '.join(sorted(unknown))}; allowed: {', '.join(ENGINES)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    if options.engine:
        return serve(lambda: begin(options.model[0], options.engine))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {_copy_rate() / 1e12:.2f} TB/s")
    options.out.mkdir(parents=True, exist_ok=True)
    speedups: dict[str, list[float]] = {}
    for name in options.model or tuple(MODELS):
        make, autocast = MODELS[name]
        print(f"\n=== {name}, {'bfloat16 autocast' if autocast else 'float32'}: {make.__doc__}", flush=True)
        for engine, value in bench(name, options).items():
            speedups.setdefault(engine, []).append(value)
    for engine, values in speedups.items():
        print(f"aot against {engine}: {math.exp(statistics.mean(map(math.log, values))):.2f}x in geometric mean")
    return 0


def bench(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Print the table of one model. Returns how many times faster aot is than each other engine."""
    runs: dict[str, TimedRun] = {}
    figures: dict[str, Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory() as cache:  # cold caches: what compiling takes is that of a first run
        for engine in options.engines.split(","):
            os.environ.update({
                "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/{engine}",
                "AOTTRAIN_CACHE_DIR": f"{cache}/{engine}/aottrain",
            })  # fmt: skip
            command = [sys.executable, str(Path(__file__).resolve()), "--model", name, "--engine", engine]
            runs[engine] = TimedRun(command, options.out / f"{name}_{engine}.txt")
            runs[engine].open()
        try:
            with ThreadPoolExecutor(len(runs)) as pool:
                asked = {engine: pool.submit(run.answer) for engine, run in runs.items()}
            for engine, future in asked.items():
                try:
                    figures[engine] = future.result()
                except RunError as error:
                    print(f"{engine}: {error}", flush=True)
                    del runs[engine]
            times: dict[str, list[float]] = {engine: [] for engine in runs}
            for index in range(options.rounds if runs else 0):
                shift = index % len(runs)
                for engine in (*list(runs)[shift:], *list(runs)[:shift]):
                    times[engine].append(statistics.median(runs[engine].time(options.steps)))
        finally:
            for run in runs.values():
                run.close()
    points = {engine: Point(engine, engine).timed(times[engine]) for engine in runs}
    _print(points, figures)
    if options.record:
        record("gpu", RECORDED, [_recorded(name, points, figures)])
    written = {engine: {**figures[engine], "round_ms": points[engine].round_ms} for engine in points}
    (options.out / f"{name}.json").write_text(json.dumps(written, indent=1), encoding="utf-8")
    others = [engine for engine in points if engine not in ("aot", "products") and "aot" in points]
    ratios = {engine: ratio(points[engine], points["aot"]) for engine in others}
    return {engine: against.median for engine, against in ratios.items() if against is not None}


def _print(points: Mapping[str, Point], figures: Mapping[str, Mapping[str, Any]]) -> None:
    header = ("engine", "step ms", "lowest", "highest", "against eager", "beside weights", "predicted", "first call")
    rows = []
    for engine, point in points.items():
        measured = figures[engine]
        against = ratio(points["eager"], point) if "eager" in points else None
        spread = [f"{value:.2f}" for value in (point.step_ms_median or 0, min(point.round_ms), max(point.round_ms))]
        peaks = [
            "-" if measured[key] is None else format_bytes(measured[key]) for key in ("peak_bytes", "predicted_bytes")
        ]
        rows.append(
            (engine, *spread, "-" if against is None else str(against), *peaks, f"{measured['compile_s']:.1f} s")
        )
    print(table(header, rows, right=range(1, 8)), flush=True)


def _recorded(name: str, points: Mapping[str, Point], figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The row of the table in the texts: of each engine the median step, the peak and what was predicted."""
    make, autocast = MODELS[name]
    cells = [f"{make.__doc__} {'bf16 autocast' if autocast else 'fp32'}"]
    for engine in RECORDED_ENGINES:
        if engine not in points:
            cells.append("-")
            continue
        measured = figures[engine]
        predicted = "" if measured["predicted_bytes"] is None else f" ({format_bytes(measured['predicted_bytes'])})"
        cells.append(f"{points[engine].step_ms_median or 0:.1f} ms, {format_bytes(measured['peak_bytes'])}{predicted}")
    return cells


def _copy_rate() -> float:
    """Bytes read and written per second by a device-to-device copy of 1 GiB."""
    source = torch.randn(1 << 28, device=_DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 10 * 2 * source.nbytes / (start.elapsed_time(end) / 1e3)


def _on_device(value: Any) -> Any:
    return tuple(map(_on_device, value)) if isinstance(value, tuple) else value.to(_DEVICE)


def begin(name: str, engine: str) -> tuple[Mapping[str, Any], Callable[[int], list[float]]]:
    """Build, compile, warm up and measure one side. Peaks are beside parameters, buffers and the batch."""
    torch.manual_seed(0)
    make, autocast = MODELS[name]
    network, loss, batch = make()
    model = WithLoss(network, loss).to(_DEVICE)
    batch = _on_device(batch)
    held = torch.cuda.memory_allocated()
    call: Any = model
    if engine == "torch_compile":
        call = torch.compile(model)
    elif engine.startswith("aot"):
        more: dict[str, Any] = {"aot_graphs": {"cuda_graphs": True}, "aot_budget": {"budget": 0.3}}.get(engine, {})
        call = aottrain.compile(model, capture="trace", on_unsupported="error", workspaces=True, **more)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            value = call(*batch)
        value.backward()
        model.zero_grad(set_to_none=True)

    if engine == "products":
        step = products(step)

    def take(count: int) -> list[float]:
        """Of steps that follow one another, as in training: the device is waited for at the end."""
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        return [(time.perf_counter() - start_s) * 1e3 / count] * count

    first, later = take(1)[0] / 1e3, take(5)[-1] / 1e3
    torch.cuda.reset_peak_memory_stats()
    take(2)
    peak = None if engine == "products" else torch.cuda.max_memory_allocated() - held
    predicted = None
    if engine.startswith("aot"):
        report = call.report.graphs[0]
        predicted = None if report.predicted_peak_bytes is None else report.predicted_peak_bytes - held
        print(report.cuda_graphs, "kernels", len(report.kernels), "library calls", report.library_calls)
        print([(stage.name, round(stage.seconds, 3)) for stage in report.stages])
    return {"compile_s": first - later, "peak_bytes": peak, "predicted_bytes": predicted}, take


if __name__ == "__main__":
    sys.exit(main())
