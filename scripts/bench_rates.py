"""Which generated kernels of a model are far from memory's speed: those that lose the most time to it come first.

    python scripts/bench_rates.py --model vae
    python scripts/bench_rates.py --autocast         # all models of bench_breadth.py; ten minutes

Each kernel's best run of several steps stands beside the time in which memory of 4 MiB is copied at that rate. One that
moves few bytes a second computes much, or is one of which the compiler made no vectors: its text is in the report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aottrain  # noqa: E402
from aottrain.explain.records import KernelRecord  # noqa: E402
from aottrain.explain.tables import table  # noqa: E402
from aottrain.runtime.labels import labelled_launches  # noqa: E402
from scripts.bench_kernels import WithLoss  # noqa: E402
from scripts.bench_limit import copy_rates  # noqa: E402
from scripts.breadth_models import MODELS  # noqa: E402

_NUM_STEPS, _COPIED_BYTES, _MOST_SHOWN = 6, 1 << 22, 6


@dataclass(frozen=True)
class Rate:
    """One kernel's best run."""

    name: str
    seconds: float
    record: KernelRecord

    @property
    def bytes_per_s(self) -> float:
        return self.record.moved_bytes / self.seconds

    def lost_s(self, copied_per_s: float) -> float:
        """What a run takes beyond a copy of as many bytes."""
        return self.seconds - self.record.moved_bytes / copied_per_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="may be given several times")
    parser.add_argument("--autocast", action="store_true", help="forward under bfloat16 autocast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes lines of its own
    copied_per_s = copy_rates([_COPIED_BYTES])[_COPIED_BYTES]
    for name in options.model or MODELS:
        rates = measured(name, options.autocast)
        total_s = sum(rate.seconds for rate in rates)
        lost_s = sum(rate.lost_s(copied_per_s) for rate in rates)
        print(f"{name}: {len(rates)} kernels take {total_s * 1e3:.2f} ms, {lost_s * 1e3:.2f} ms more than copies")
        print(table(("kernel", "ms", "more than a copy", "GB/s", "what it computes"), shown(rates, copied_per_s)))
    return 0


def measured(name: str, autocast: bool) -> list[Rate]:
    """Of the model with this name, forward and backward."""
    torch.manual_seed(0)
    network, loss, batch = MODELS[name]()
    model = WithLoss(network, loss)
    call = aottrain.compile(model, capture="trace", on_unsupported="eager")

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = call(*batch)
        value.backward()
        model.zero_grad(set_to_none=True)

    seconds = best_runs(step)
    ran = call.report.graphs[-1:]  # the last: names of kernels are a graph's own
    records = {kernel: each for graph in ran for each in graph.kernel_records for kernel in each.names}
    return [Rate(kernel, seconds[kernel], record) for kernel, record in records.items() if kernel in seconds]


def best_runs(step: Callable[[], None]) -> Mapping[str, float]:
    """Seconds of each kernel's best run, by its name."""
    for _ in range(3):
        step()
    with labelled_launches(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(_NUM_STEPS):
            step()
    best: dict[str, float] = {}
    for event in profiled.events() or ():
        kernel = event.name.split(" ")[0]
        best[kernel] = min(best.get(kernel, float("inf")), event.self_cpu_time_total / 1e6)
    return best


def shown(rates: Sequence[Rate], copied_per_s: float) -> list[tuple[str, ...]]:
    """The rows of those that lose the most."""
    worst = sorted(rates, key=lambda rate: -rate.lost_s(copied_per_s))[:_MOST_SHOWN]
    return [
        (
            rate.name,
            f"{rate.seconds * 1e3:.3f}",
            f"{rate.lost_s(copied_per_s) * 1e3:.3f}",
            f"{rate.bytes_per_s / 1e9:.1f}",
            rate.record.ops,
        )
        for rate in worst
    ]


if __name__ == "__main__":
    sys.exit(main())
