"""The models of bench_breadth.py on a CUDA device: right beside eager, then its time, the device's alone, and peak.

    python scripts/bench_gpu_breadth.py                          # all; compiling takes longest, eight at once
    python scripts/bench_gpu_breadth.py --model unet --model gru --no-torch-compile

Dropout is off. A model's loss and gradients in float32 (without TF32) are held against eager's in float64: what is
further than eager's own float32 by three times and a rounding is WRONG, unless the same program compiled for float64
agrees: then a rounding has decided, as of a relu about zero. So are, under bfloat16 autocast, those further than
eager's autocast by twice. Then, under that autocast, with batches as much larger as `_TIMES` says, engines take
turns: a step by the clock, where steps follow one another; what the device works in it, by its own records of kernels;
and the peak beside weights and batch.
Several models compile side by side, and all wait until the last is ready; then each is timed alone.
Exit code 1 where anything is WRONG.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aottrain  # noqa: E402
from aottrain.config.choices import COMPARED  # noqa: E402
from aottrain.explain.tables import table  # noqa: E402
from aottrain.ir.units import format_bytes  # noqa: E402
from scripts.bench_kernels import WithLoss  # noqa: E402
from scripts.breadth_models import MODELS  # noqa: E402
from scripts.figures import record  # noqa: E402

ENGINES = (*COMPARED, "aot_graphs")
RECORDED = (
    "model", "ms of a step: eager, torch.compile, aottrain, with CUDA graphs", "of it the device works",
    "peak: eager, torch.compile, aottrain", "further from float64 than eager's float32", "runs eagerly",
)  # fmt: skip
# How often a batch is repeated along its first dimension.
_TIMES = {"graph convolution": 1, "dlrm": 4, "contrast": 4, "waves": 4}
_STEPS, _ROUNDS = 10, 3


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=tuple(MODELS), help="may be given several times; all")
    parser.add_argument("--together", type=int, default=8, help="models that compile at once, a process each")
    parser.add_argument("--wait", type=float, default=120, help="seconds after which torch.compile is given up")
    parser.add_argument("--no-torch-compile", action="store_true", help="its compiling takes longest")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_breadth") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    parser.add_argument("--record", action="store_true", help="keep the figures for the tables of the texts")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # one model, in its own process
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    if options.worker:
        return _work(options)
    options.out.mkdir(parents=True, exist_ok=True)
    names, rows, wrong = list(options.model or MODELS), [], 0
    while names:
        wave, names = names[: options.together], names[options.together :]
        workers = {name: _started(name, options) for name in wave}
        for worker in workers.values():  # until each has said that it is ready, or has ended
            worker.stdout.readline()
        for name, worker in workers.items():
            text, _ = worker.communicate("time\n")
            path = options.out / f"{_file(name)}.json"
            if worker.returncode or not path.exists():
                print(f"{name}: no result, exit code {worker.returncode}: {text[-300:]}", flush=True)
                wrong += 1
                continue
            figures = json.loads(path.read_text(encoding="utf-8"))
            rows.append(_cells(name, figures))
            wrong += bool(figures["wrong"])
            print(" | ".join(rows[-1]), flush=True)
            if options.record:
                record("gpu_breadth", RECORDED, [rows[-1]])
    print(table(RECORDED, rows))
    _print_means(options.out)
    return 1 if wrong else 0


def _started(name: str, options: argparse.Namespace) -> Any:
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--model", name, "--out", str(options.out)]
    command += ["--wait", str(options.wait)] + ["--no-torch-compile"] * options.no_torch_compile
    log = (options.out / f"{_file(name)}.txt").open("w", encoding="utf-8")
    own = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env={**os.environ, **own})


def _file(name: str) -> str:
    return name.replace(" ", "_")


def _cells(name: str, figures: Mapping[str, Any]) -> list[str]:
    def each(key: str, engines: tuple[str, ...], form: Callable[[Any], str]) -> str:
        return ", ".join(form(figures[key][one]) if one in figures[key] else "-" for one in engines)

    return [
        name,
        each("wall_ms", ENGINES, lambda value: f"{value:.2f}"),
        each("device_ms", ENGINES, lambda value: f"{value:.2f}"),
        each("peak_bytes", ENGINES[:3], format_bytes),
        figures["wrong"] or f"{figures['error'][0]:.1f}x; in bf16 {figures['error'][1]:.1f}x",
        "; ".join(figures["fallbacks"]) or "nothing",
    ]


def _print_means(out: Path) -> None:
    for key in ("wall_ms", "device_ms"):
        for mine, other in (*(("aot", each) for each in COMPARED if each != "aot"), ("aot_graphs", "torch_compile")):
            ratios = {}
            for path in sorted(out.glob("*.json")):
                times = json.loads(path.read_text(encoding="utf-8"))[key]
                if {mine, other} <= times.keys():
                    ratios[path.stem] = times[other] / times[mine]
            if ratios:
                mean = math.exp(statistics.mean(map(math.log, ratios.values())))
                behind = ", ".join(f"{name} {value:.2f}" for name, value in sorted(ratios.items()) if value < 0.99)
                print(f"{key}: {other} over {mine}: {mean:.2f}x of {len(ratios)}; behind: {behind or 'none'}")


# One model, in a process of its own.
def _work(options: argparse.Namespace) -> int:
    name = options.model[0]
    model, batch = _made(name)
    figures: dict[str, Any] = {"wrong": "", "error": [0.0, 0.0], "fallbacks": []}
    for place, autocast in enumerate((False, True)):
        try:
            figures["error"][place], why = _distance(model, batch, autocast)
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if why:
            figures["wrong"] += f"WRONG in {'bf16' if autocast else 'float32'}: {why}; "
    gc.collect()
    torch.compiler.reset()
    batch = _larger(batch, _TIMES.get(name, 8))
    held = torch.cuda.memory_allocated()
    calls: dict[str, Any] = {"eager": model}
    for engine in ("aot", "aot_graphs"):
        calls[engine] = aottrain.compile(model, capture="trace", cuda_graphs=engine == "aot_graphs")
    if not options.no_torch_compile:
        calls["torch_compile"] = torch.compile(model)
    steps = {engine: _step(model, call, batch) for engine, call in calls.items()}
    for engine, step in list(steps.items()):
        start_s = time.perf_counter()
        try:
            if engine == "torch_compile":
                _limited(step, options.wait)
            for _ in range(3):
                step()
        except Exception as error:
            traceback.print_exc()
            print(engine, "gave up:", type(error).__name__, file=sys.stderr)
            if engine != "torch_compile":
                figures["wrong"] += f"WRONG: {engine} raises {type(error).__name__}; "
            del steps[engine]
            model.zero_grad(set_to_none=True)
        print(engine, f"ready after {time.perf_counter() - start_s:.1f} s", file=sys.stderr, flush=True)
    report = calls["aot"].report
    figures["fallbacks"] = sorted({one.reason for one in report.fallbacks})
    print("ready", flush=True)
    sys.stdin.readline()
    walls: dict[str, list[float]] = {engine: [] for engine in steps}
    for _ in range(_ROUNDS):
        for engine, step in steps.items():
            walls[engine].append(_wall(step))
    figures["wall_ms"] = {engine: min(times) for engine, times in walls.items()}
    figures["device_ms"], figures["kernels"] = {}, {}
    for engine, step in steps.items():
        figures["device_ms"][engine], figures["kernels"][engine] = _on_the_device(step)
    figures["peak_bytes"] = {}
    for engine, step in steps.items():
        if engine != "aot_graphs":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() - held
            step()
            figures["peak_bytes"][engine] = torch.cuda.max_memory_allocated() - held - before
    (options.out / f"{_file(name)}.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


def _made(name: str) -> tuple[nn.Module, Any]:
    """The model without dropout and its batch, on the device."""
    torch.manual_seed(0)
    network, loss, batch = MODELS[name]()
    for module in network.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in key or (key == "p" and "Drop" in type(module).__name__)):
                setattr(module, key, 0.0)
    return WithLoss(network, loss).cuda(), _changed(batch, Tensor.cuda)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return tuple(_changed(one, change) for one in value) if isinstance(value, tuple) else change(value)


def _larger(batch: Any, times: int) -> Any:
    return _changed(batch, lambda tensor: tensor.repeat(times, *[1] * (tensor.dim() - 1)))


def _step(model: nn.Module, call: Any, batch: Any, autocast: bool = True) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            value = call(*batch)
        value.backward()
        model.zero_grad(set_to_none=True)
        return value.detach()

    return step


def _results(model: nn.Module, call: Any, batch: Any, autocast: bool) -> list[Tensor | None]:
    """The loss and each parameter's gradient, buffers as they were before."""
    kept = [buffer.clone() for buffer in model.buffers()]
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        loss = call(*batch)
    loss.backward()
    found = [loss.detach(), *(None if one.grad is None else one.grad.clone() for one in model.parameters())]
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)
    return found


def _distance(model: nn.Module, batch: Any, autocast: bool) -> tuple[float, str]:
    """How much further than eager from float64, the worst of all results, and what is wrong."""
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = autocast
    try:
        compiled = aottrain.compile(model, capture="trace", kernel="triton")
        mine = _results(model, compiled, batch, autocast)
        again = _results(model, compiled, batch, autocast)
        eager = _results(model, model, batch, autocast)
        model.double()
        double = _changed(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        exact = _results(model, model, double, autocast=False)
        worst, why = _compared(model, mine, again, eager, exact, autocast)
        if why and not autocast:
            precise = aottrain.compile(model, capture="trace", kernel="triton")
            found = _results(model, precise, double, autocast=False)
            if _compared(model, found, found, exact, exact, autocast, floor=1e-9)[1] == "":
                print("by a rounding:", why, file=sys.stderr)
                why = ""
        return worst, why
    finally:
        model.float()
        torch.backends.cudnn.allow_tf32 = tf32


def _compared(
    model: nn.Module, mine: Any, again: Any, eager: Any, exact: Any, autocast: bool, floor: float | None = None
) -> tuple[float, str]:
    names = ["loss", *(name for name, _ in model.named_parameters())]
    worst, why = 0.0, []
    floor = floor or (1e-2 if autocast else 3e-6)
    for name, one, other, theirs, wanted in zip(names, mine, again, eager, exact, strict=True):
        if (one is None) != (theirs is None):
            why.append(f"{name}: None beside a gradient")
        if one is None or theirs is None:
            continue
        norm = wanted.norm().item() + 1e-30
        ours, its = (
            max((value.double() - wanted).norm().item() / norm for value in (one, other)),
            ((theirs.double() - wanted).norm().item() / norm),
        )
        worst = max(worst, ours / max(its, floor))
        if not ours <= max((2 if autocast else 3) * its, floor) and norm > 1e-9:
            why.append(f"{name}: {ours:.1e} beside {its:.1e}")
    return worst, ", ".join(why[:4]) + (f" and {len(why) - 4} more" if len(why) > 4 else "")


def _limited(step: Callable[[], Any], seconds: float) -> None:
    """Ends a step that takes longer by an error."""

    def end(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(int(seconds))
    try:
        step()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _wall(step: Callable[[], Any]) -> float:
    """Milliseconds of a step, of several that follow one another."""
    step()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(_STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) * 1e3 / _STEPS


def _on_the_device(step: Callable[[], Any], steps: int = 3) -> tuple[float, list[tuple[str, int, float]]]:
    """Milliseconds that kernels and copies of a step take, and each one's name, launches and milliseconds."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in _of_the_device(profiler):
        counts[event.name] += 1
        times[event.name] += event.time_range.elapsed_us()
    kernels = [(name, counts[name] // steps, us / steps / 1e3) for name, us in times.most_common()]
    return sum(ms for _, _, ms in kernels), [(name[:120], count, round(ms, 4)) for name, count, ms in kernels[:60]]


def _of_the_device(profiler: Any) -> Iterator[Any]:
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not event.name.startswith("## Call"):  # which spans kernels
            yield event


if __name__ == "__main__":
    sys.exit(main())
