"""Time and memory of a linear layer with cross-entropy, forward and backward: eager, compiled whole, and in chunks.

    python scripts/bench_loss_head.py                                # fp32, 2048 rows, 8192 classes, width 256
    python scripts/bench_loss_head.py --classes 32000 --precision bf16 --rounds 7

Each side has a process of its own with the same data; the sides take turns, one step each, and every figure is the
median over the rounds. "of eager" is the median of each round's ratio, its range in brackets. "peak" is what the step
allocates above the inputs, "saved" what the compiled forward keeps for the backward. "error": of the weight's gradient
against float64, relative.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aottrain  # noqa: E402
from aottrain.config.choices import PRECISIONS  # noqa: E402
from aottrain.ir.units import format_bytes  # noqa: E402
from aottrain.metrics.memory import watch_cpu_peak  # noqa: E402
from scripts.figures import record  # noqa: E402

SIDES: dict[str, dict[str, Any]] = {
    "eager": {},
    "aten whole": {"kernel": "aten", "loss_head": "whole"},
    "cpp whole": {"kernel": "cpp", "loss_head": "whole"},
    "cpp chunked": {"kernel": "cpp", "loss_head": "chunked"},
}
RECORDED = ("", "ms", "of eager's time", "peak", "saved", "error against float64")


class Head(nn.Module):
    def __init__(self, width: int, classes: int, precision: str):
        super().__init__()
        self.head, self.precision = nn.Linear(width, classes, bias=False), precision

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            return F.cross_entropy(self.head(hidden), target)


def main() -> None:
    options = parse()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # whose turn it is not should not spin
    context = multiprocessing.get_context("forkserver")  # whose one process imports what all of them import
    context.set_forkserver_preload(["torch", "aottrain"])
    workers = {}
    for side in SIDES:
        parent, child = context.Pipe()
        context.Process(target=work, args=(child, side, options), daemon=True).start()
        workers[side] = parent
    figures = {side: worker.recv() for side, worker in workers.items()}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(options.rounds):
        for side, worker in workers.items():
            worker.send("step")
            times[side].append(worker.recv())
    for worker in workers.values():
        worker.send("end")
    show(options, figures, times)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 2048), ("classes", 8192), ("width", 256), ("rounds", 9), ("threads", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--record", action="store_true", help="keep the figures for the tables of the texts")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    return parser.parse_args()


def work(parent: Connection, side: str, options: argparse.Namespace) -> None:
    """Answers with the side's figures, then each "step" with its seconds."""
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    module = Head(options.width, options.classes, options.precision)
    hidden = torch.randn(options.rows, options.width, requires_grad=True)
    target = torch.randint(0, options.classes, (options.rows,))
    call: Any = module
    if SIDES[side]:
        call = aottrain.compile(module, capture="trace", on_unsupported="error", **SIDES[side])

    def step() -> None:
        module.zero_grad()
        hidden.grad = None
        call(hidden, target).backward()

    for _ in range(2):
        step()
    error = _error(module, hidden, target)
    module.zero_grad()
    hidden.grad = None
    with watch_cpu_peak() as peak:
        step()
    report = call.report.graphs[0] if SIDES[side] else None
    parent.send((peak.num_bytes, report and report.saved_bytes, error, report and report.loss_heads))
    while parent.recv() == "step":
        start = time.perf_counter()
        step()
        parent.send(time.perf_counter() - start)


def _error(module: Head, hidden: Tensor, target: Tensor) -> float:
    """Of the gradient that the weight has now."""
    weight = module.head.weight
    leaf = weight.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(F.linear(hidden.detach().double(), leaf), target), leaf)
    assert weight.grad is not None
    return ((weight.grad.double() - exact).norm() / exact.norm()).item()


def show(options: argparse.Namespace, figures: dict[str, Any], times: dict[str, list[float]]) -> None:
    threads = options.threads or torch.get_num_threads()
    print(f"{options.rows} rows, {options.classes} classes, width {options.width}, {options.precision}, ", end="")
    print(f"{threads} threads, torch {torch.__version__}")
    print(f"{'':12}  {'ms':>7}  {'of eager':>18}  {'peak':>9}  {'saved':>9}  error")
    for side, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["eager"], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        peak, saved, error, _ = figures[side]
        kept = "" if saved is None else format_bytes(saved)
        milliseconds = statistics.median(seconds) * 1e3
        print(f"{side:12}  {milliseconds:7.1f}  {ratio:>18}  {format_bytes(peak):>9}  {kept:>9}  {error:.1e}")
    if options.record:
        record("loss_head", RECORDED, recorded(options, figures, times))
    for line in figures["cpp chunked"][3]:
        print(line)


def recorded(options: argparse.Namespace, figures: dict[str, Any], times: dict[str, list[float]]) -> list[list[str]]:
    """The rows of the table in the texts."""
    sizes = f"{options.rows} rows, {options.classes} classes, width {options.width}, {options.precision}"
    rows = []
    for side, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["eager"], strict=True)]
        peak, saved, error, _ = figures[side]
        rows.append([
            f"{sizes}: {side}", f"{statistics.median(seconds) * 1e3:.1f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})", format_bytes(peak),
            "" if saved is None else format_bytes(saved), f"{error:.1e}",
        ])  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
