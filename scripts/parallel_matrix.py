"""Every combination of how several processes train: gradients and losses against one process on the whole batch.

    python scripts/parallel_matrix.py                   # two processes: some minutes of one processor
    python scripts/parallel_matrix.py --processes 3

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
MODELS = ("plain", "tied", "odd", "unused", "accumulated", "weighted")
TOLERANCE = 2e-6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds, of all cases together")
    options = parser.parse_args()
    cases = ["/".join(case) for case in itertools.product(MODES, KERNELS, PARTITIONS, MODELS)]
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
        print(f"{error:.1e}  {case}" + ("" if error <= TOLERANCE else "  above the tolerance"))
    wrong = [case for case, error in found.items() if error > TOLERANCE]
    print(f"{len(found) - len(wrong)} of {len(cases)} cases within {TOLERANCE:g}, {options.processes} processes")
    return int(bool(wrong) or len(found) < len(cases))


if __name__ == "__main__":
    sys.exit(main())
