"""Random programs, compiled and compared with eager: `python scripts/fuzz.py --count 10000 --seed 0 --frontend trace`.

Exits 1 if any program is wrong; each is printed, cut down, as a script that checks it. Triton's kernels are interpreted
on the CPU: `TRITON_INTERPRET=1 python scripts/fuzz.py --kernel triton --count 100`. With `--device cuda` programs run
on a GPU, but for those that raise on a CPU, for what an operator refuses ends a process's use of a device. With
`--dynamic` they are compiled with symbolic sizes and called with others: `--dynamic --kernel cpp`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aottrain.errors import ConfigError  # noqa: E402
from aottrain.ir.settings.choices import CAPTURES, GENERATED  # noqa: E402
from aottrain.runtime.cuda.triton_launch import check_device  # noqa: E402
from tests.numerics import dynamic_fuzzing  # noqa: E402
from tests.numerics.fuzz_checking import WRONG, check, legal, minimised, raises  # noqa: E402
from tests.numerics.fuzzing import generate  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first; the others follow")
    parser.add_argument("--frontend", choices=CAPTURES, default="trace")
    kernels = ("aten", *GENERATED)
    parser.add_argument("--kernel", choices=kernels, default="aten", help="but for aten, results may round otherwise")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dynamic", action="store_true", help="programs that are compiled once for inputs of any size")
    no_repeats = "of each statement and slice one alone, as in most programs of the test suite"
    parser.add_argument("--no-repeats", dest="repeats", action="store_false", help=no_repeats)
    parser.add_argument("--verbose", action="store_true", help="print every program that is not bitwise equal")
    options = parser.parse_args()
    try:
        if options.kernel == "triton":
            check_device(torch.device(options.device))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    return fuzz_sizes(options) if options.dynamic else fuzz(options)


def fuzz_sizes(options: argparse.Namespace) -> int:
    num_wrong = num_graphs = num_kernels = 0
    warnings.simplefilter("ignore")
    for seed in range(options.seed, options.seed + options.count):
        program = dynamic_fuzzing.generate(seed, options.repeats)
        graphs, kernels, wrong = dynamic_fuzzing.check(program, options.frontend, options.kernel)
        num_graphs, num_kernels, num_wrong = num_graphs + graphs, num_kernels + kernels, num_wrong + bool(wrong)
        if wrong:
            print(f"\nseed {seed}: {wrong}\n{program.source}", flush=True)
        elif options.verbose:
            print(f"seed {seed}: {graphs} compiled, {kernels} kernels", flush=True)
    print(f"{options.count} programs, {num_graphs} compiled, {num_kernels} kernels in the first, {num_wrong} wrong")
    return 1 if num_wrong else 0


def fuzz(options: argparse.Namespace) -> int:
    counts: Counter[str] = Counter()
    start = time.perf_counter()
    for seed in range(options.seed, options.seed + options.count):
        program = legal(generate(seed, options.repeats))
        if options.device != "cpu":
            if raises(program):
                counts["raising on a CPU"] += 1
                continue
            program = replace(program, device=options.device)
        verdict = check(program, options.frontend, options.kernel)
        counts[verdict.kind] += 1
        if verdict.kind == WRONG:
            print(
                f"\nseed {seed}: {verdict.detail}\n{minimised(program, options.frontend, options.kernel)}", flush=True
            )
        elif options.verbose and verdict.detail:
            print(f"seed {seed} {verdict.kind}: {verdict.detail[:200]}", flush=True)
        done = seed + 1 - options.seed
        if done % 100 == 0 or done == options.count:
            text = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            print(
                f"{done}/{options.count} after {time.perf_counter() - start:.0f} s, next seed {seed + 1}: {text}",
                flush=True,
            )
    return 1 if counts[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
