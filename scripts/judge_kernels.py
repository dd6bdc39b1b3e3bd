"""Triton kernels of whole training steps, judged without a device: what each takes of a GPU, from its machine code.

    python scripts/judge_kernels.py                                  # all models, sm_90: one line each
    python scripts/judge_kernels.py --model gpt2 --budget 0.4 --arch 80 --arch 90 --arch 100 --kernels

A forward and backward of each model runs on a simulated device that computes nothing (tests/simulated): its launches
are those of a real one. Each distinct kernel is compiled by Triton for each architecture, as it is launched. The
columns of --kernels: launches in a step; programs and warps of one launch; registers of a thread; bytes that registers
spill; bytes of shared memory; bytes that one load and one store moves (narrowest to widest; 16 is the most up to
sm_90); programs that fit into a multiprocessor at once; and waves: how often a launch fills all multiprocessors.

Exit code 1: a kernel spills, or takes more shared memory than there is.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("AOTTRAIN_RATES", "default")

import triton  # noqa: E402

from aottrain.explain.tables import table  # noqa: E402
from recipes import llama, resnet, transformer  # noqa: E402
from scripts.bench_gpu import MODELS  # noqa: E402
from tests.simulated.device import ONLY_OF_A_CPU, install  # noqa: E402
from tests.simulated.driver import Launch, Log, install_driver  # noqa: E402
from tests.simulated.judging import CHIPS, Judged, judge  # noqa: E402
from tests.simulated.steps import Made, made_of, run_step  # noqa: E402

# Each with whether it runs under bfloat16 autocast: those of bench_gpu.py at full size, and the recipes as they come.
CASES: Mapping[str, tuple[Callable[[], Made], bool]] = {
    **MODELS,
    "resnet": (made_of(resnet, resnet.Options(width=64), 256), False),  # its batch is drawn on the host
    "recipe transformer": (made_of(transformer, transformer.Options(), 8), True),
    "recipe llama": (made_of(llama, llama.Options(), 8), True),
    "recipe resnet": (made_of(resnet, resnet.Options(), 128), True),
}
KERNEL = ("kernel", "launches", "programs", "warps", "registers", "spilled", "shared", "load", "store", "fit", "waves")
MODEL = (
    "model", "sm", "library calls", "launches", "kernels", "spilling", "registers at most",
    "loads under 16 bytes", "stores under 16 bytes", "launches under a wave",
)  # fmt: skip


@dataclass
class Verdicts:
    """Of each kernel by its key, for each architecture. log: what was launched and compiled."""

    log: Log = field(default_factory=lambda: install_driver(install()))
    judged: dict[tuple[str, int], Judged] = field(default_factory=dict)

    def of(self, key: str, arch: int) -> Judged:
        if (key, arch) not in self.judged:
            compiled = self.log.compiled[key]
            self.judged[key, arch] = judge(compiled.source, compiled.metadata, arch)
        return self.judged[key, arch]


def kernel_rows(launches: Sequence[Launch], arch: int, verdicts: Verdicts) -> list[tuple[str, ...]]:
    """One line for each kernel and size of launch, those with most waves in the step first."""
    lines = []
    for (key, programs, warps), count in Counter((k.kernel, k.programs, k.warps) for k in launches).items():
        verdict = verdicts.of(key, arch)
        waves = verdict.waves(programs, CHIPS[arch])
        numbers = verdict.registers, verdict.spilled, verdict.shared
        moved = _range(verdict.loads), _range(verdict.stores), str(verdict.resident), f"{waves:.2f}"
        name = verdicts.log.compiled[key].source.fn.__name__
        line = (name, str(count), f"{programs:,}", str(warps), *map(str, numbers), *moved)
        lines.append((waves * count, line))
    return [line for _, line in sorted(lines, key=lambda pair: -pair[0])]


def model_row(title: str, library_calls: int, launches: Sequence[Launch], arch: int, verdicts: Verdicts) -> list[str]:
    """A line for the model. Loads and stores under 16 bytes: launches whose widest are narrower."""
    judged = [verdicts.of(launch.kernel, arch) for launch in launches]
    kernels = {launch.kernel for launch in launches}
    small = sum(j.waves(k.programs, CHIPS[arch]) < 1 for j, k in zip(judged, launches, strict=True))
    numbers = [
        library_calls, len(launches), len(kernels), sum(verdicts.of(key, arch).spilled > 0 for key in kernels),
        max(j.registers for j in judged), sum(j.loads[1] < 16 for j in judged), sum(j.stores[1] < 16 for j in judged),
        small,
    ]  # fmt: skip
    return [title, str(arch), *map(str, numbers)]


def _range(widths: tuple[int, int]) -> str:
    low, high = widths
    return "-" if not high else str(high) if low == high else f"{low}-{high}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=tuple(CASES), help="may be given several times; all")
    parser.add_argument("--budget", action="append", type=float, help="may be given several times; none")
    parser.add_argument("--arch", action="append", type=int, choices=tuple(CHIPS), help="as often as wanted; 90")
    parser.add_argument("--kernels", action="store_true", help="a line for each kernel, too")
    options = parser.parse_args()
    if torch.version.cuda is not None:
        sys.exit(f"judge_kernels.py: {ONLY_OF_A_CPU}")
    device = install()
    print(f"Triton {triton.__version__}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; no device", flush=True)
    verdicts = Verdicts()
    rows = []
    for name in options.model or tuple(CASES):
        make, autocast = CASES[name]
        for budget in options.budget or (None,):
            more = {} if budget is None else {"budget": budget}
            launches, report = run_step(device, verdicts.log, make, autocast, **more)
            title = name if budget is None else f"{name} at {budget}"
            for arch in options.arch or (90,):
                rows.append(model_row(title, sum(report.library_calls.values()), launches, arch, verdicts))
                if options.kernels:
                    lines = kernel_rows(launches, arch, verdicts)
                    print(f"\n{title}, sm_{arch}\n{table(KERNEL, lines, right=range(1, len(KERNEL)))}", flush=True)
                print(f"{title}, sm_{arch}: {len(verdicts.judged)} kernels judged", file=sys.stderr, flush=True)
    print(f"\n{table(MODEL, rows, right=range(1, len(MODEL)))}")
    bad = [v for (_, arch), v in verdicts.judged.items() if v.spilled or v.shared > CHIPS[arch].most_shared]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
