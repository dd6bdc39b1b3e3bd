"""Every combination of how several processes train: gradients and losses against one process on the whole batch.

    python scripts/parallel_matrix.py                   # two processes: some minutes of one processor
    python scripts/parallel_matrix.py --processes 3
    python scripts/parallel_matrix.py --processes 4     # two replicas of parts, too
    python scripts/parallel_matrix.py --only shard/cpp --only dropout

A line for each case, the worst first, with its relative error. Exits 1 if one is above the tolerance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.parallel.groups import run_together  # noqa: E402

MODES, KERNELS, PARTITIONS = ("ddp", "shard"), ("aten", "cpp"), ("save_all", "min_cut", "budget")
MODELS = ("plain", "tied", "odd", "unused", "accumulated", "weighted", "dropout")
TOLERANCES = {"fp32": 2e-6, "bf16": 2**-7}  # of a sum in another order, of numbers of so many bits


def tolerance(case: str) -> float:
    return TOLERANCES["bf16" if case.endswith("bf16") else "fp32"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds, of all cases together")
    parser.add_argument("--only", action="append", default=[], help="cases whose name has this")
    options = parser.parse_args()
    modes = MODES if options.processes % 2 or options.processes < 4 else (*MODES, "replicas")
    models = [model + precision for precision in ("", "-bf16") for model in MODELS]
    cases = ["/".join(case) for case in itertools.product(modes, KERNELS, PARTITIONS, models)]
    cases = [case for case in cases if not options.only or any(part in case for part in options.only)]
    with tempfile.TemporaryDirectory() as folder:
        script = str(ROOT / "tests" / "parallel" / "sums.py")
        ended = run_together([script, *cases], Path(folder), options.processes, options.timeout)
    for number, each in enumerate(ended):
        if each.code:
            print(f"process {number} ended with code {each.code}:\n{each.err}", file=sys.stderr)
    found: dict[str, float] = {}
    for case, error, _ in (json.loads(line) for each in ended for line in each.out.splitlines()):
        found[case] = max(math.inf if math.isnan(error) else error, found.get(case, 0.0))
    for case, error in sorted(found.items(), key=lambda pair: -pair[1]):
        print(f"{error:.1e}  {case}" + ("" if error <= tolerance(case) else "  above the tolerance"))
    wrong = [case for case, error in found.items() if error > tolerance(case)]
    within = ", ".join(f"{value:.1e} ({name})" for name, value in TOLERANCES.items())
    print(f"{len(found) - len(wrong)} of {len(cases)} cases within {within}, {options.processes} processes")
    return int(bool(wrong) or len(found) < len(cases))


if __name__ == "__main__":
    sys.exit(main())
