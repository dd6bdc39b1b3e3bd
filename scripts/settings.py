"""Run the tests whose bounds are about rounding as on other processors: python scripts/settings.py [pytest arguments]

Each line of the matrix is an instruction set that ATen may use (ATEN_CPU_CAPABILITY: default, avx2, avx512) with oneDNN
or without. What this processor has not is said and left out; generated kernels always use what it has. Exit code 1 if
a test fails under any setting. Unless arguments name others these tests are run, about ten minutes for each setting:
{tests}
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/numerics",
    "tests/recipes",
    "tests/compiler/schedule/test_attention.py",
    "tests/compiler/capture/test_fakes.py",
    "tests/compiler/passes/test_chunk_loss_heads.py",
    "tests/compiler/optimizers/test_optimizers.py",
    "tests/compiler/codegen/cpp/test_rounding.py",
    "tests/compiler/codegen/triton",
    "tests/compiler/lowering",
    "tests/compiler/passes/test_join_sums.py",
    "tests/ops/test_attention.py",
    "tests/ops/losses/test_loss_head.py",
    "tests/ops/products",
    "tests/trainer/test_verification.py",
)
SETS, ONEDNN = ("default", "avx2", "avx512"), ("on", "off")
# What each needs, by the names that Linux gives a processor's features. (ATen does not look, and would crash.)
NEEDED = {"default": set(), "avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").format(tests="  " + "\n  ".join(TESTS)),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS, help="instruction sets, instead of all")
    parser.add_argument("--onednn", nargs="+", choices=ONEDNN, default=ONEDNN)
    options, arguments = parser.parse_known_args()
    is_told = any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)
    failed, tests = [], () if is_told else TESTS
    for name, environment in settings(options.sets, options.onednn, processor_features()):
        print(f"=== {name}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *tests, *arguments]
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(name)
    print("\n".join(f"failed: {name}" for name in failed) or "passed under every setting that this processor has")
    return int(bool(failed))


def settings(sets: Sequence[str], onednn: Sequence[str], features: set[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """(name, environment) of each line of the matrix that this processor has."""
    for instructions in sets:
        if missing := NEEDED[instructions] - features:
            print(f"=== {instructions}: this processor has no {', '.join(sorted(missing))}; left out", flush=True)
            continue
        for state in onednn:
            yield f"{instructions}, oneDNN {state}", {
                **os.environ, "ATEN_CPU_CAPABILITY": instructions, "AOTTRAIN_TEST_ONEDNN": state
            }  # fmt: skip


def processor_features() -> set[str]:
    """As Linux names them; none elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return {name for line in text.splitlines() if line.startswith("flags") for name in line.partition(":")[2].split()}


if __name__ == "__main__":
    sys.exit(main())
