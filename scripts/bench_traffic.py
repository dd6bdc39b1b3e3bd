"""Memory traffic without a clock: what programs of common patterns move, against the least that they could.

    python scripts/bench_traffic.py                                # every pattern, the worst first; half a minute
    python scripts/bench_traffic.py rms_norm rotary --backends cpp # some of them
    python scripts/bench_traffic.py --limit 1.3                    # exit code 1 where one is above
    python scripts/bench_traffic.py --renew                        # write down what moves less than recorded
    python scripts/bench_traffic.py --renew --accept               # and what moves more

Kernels are scheduled, forward and backward, and their bytes counted; nothing is compiled by another compiler, run or
measured, and no device is needed. aottrain/compiler/traffic.py says what is counted, and what the least is;
tests/traffic/patterns.py has the patterns. Exit code 1: one moves more than tests/traffic/recorded.json says, or is
above the limit.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["AOTTRAIN_RATES"] = "default"  # no clock decides
os.environ["AOTTRAIN_FAULTS"] = "raise"

from aottrain.explain.tables import table  # noqa: E402
from aottrain.ir.units import format_bytes  # noqa: E402
from scripts import figures  # noqa: E402
from tests.traffic import record  # noqa: E402
from tests.traffic.measuring import BACKENDS, DTYPES, NAMES, Traffic, traffic_of  # noqa: E402

HEAD = ("pattern", "kernels", "type", "moved", "at least", "ratio", "launches", "library calls")
RECORDED = ("kernels, type", "patterns", "within 1.1x", "within 1.3x", "geometric mean", "the worst")
_TITLES = {"cpp": "C++", "triton": "Triton"}
_SHOWN = 5
Case = tuple[str, str, str]  # pattern, back end, type


def rows_of(measured: Mapping[Case, Traffic]) -> list[list[str]]:
    """A line for each, the worst first."""
    rows = []
    for (name, backend, dtype), traffic in sorted(measured.items(), key=lambda pair: -pair[1].ratio):
        libraries = ", ".join(call.removeprefix("aten.") for call in traffic.library_calls)
        moved = format_bytes(traffic.moved), format_bytes(traffic.least), f"{traffic.ratio:.2f}"
        rows.append([name, backend, dtype, *moved, str(traffic.num_kernels), libraries])
    return rows


def summary_of(measured: Mapping[Case, Traffic]) -> list[list[str]]:
    """A line for each back end and type."""
    rows = []
    for backend in BACKENDS:
        for dtype in DTYPES:
            ratios = {name: each.ratio for (name, *rest), each in measured.items() if rest == [backend, dtype]}
            if ratios:
                worst = sorted(ratios, key=lambda name: -ratios[name])[:_SHOWN]
                mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
                within = [str(sum(ratio <= limit for ratio in ratios.values())) for limit in (1.1, 1.3)]
                names = ", ".join(f"{name} {ratios[name]:.2f}" for name in worst)
                rows.append([f"{_TITLES[backend]}, {dtype}", str(len(ratios)), *within, f"{mean:.2f}", names])
    return rows


def renew(measured: Mapping[Case, Traffic], accept: bool) -> None:
    """Write down what moves less than recorded, or is new; accept: and what moves more."""
    renewed = {name: dict(record.load().get(name, {})) for name in NAMES}
    for (name, backend, dtype), traffic in measured.items():
        key = record.key_of(backend, dtype)
        if record.change(name, key, traffic.ratio) and (accept or not record.is_worse(name, key, traffic.ratio)):
            renewed[name][key] = round(traffic.ratio, 3)
    record.PATH.write_text(record.text_of(renewed), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="pattern", help="of tests/traffic/patterns.py; all")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--limit", type=float, help="exit code 1 where a ratio is above")
    parser.add_argument("--renew", action="store_true", help="write down what moves less than recorded")
    parser.add_argument("--accept", action="store_true", help="with --renew: and what moves more")
    parser.add_argument("--record", action="store_true", help="keep the summary for the tables of the texts")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        print(f"bench_traffic.py: there is no pattern {unknown[0]}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    measured: dict[Case, Traffic] = {}
    for name in options.names or NAMES:
        for backend in options.backends:
            for dtype in options.dtypes:
                measured[name, backend, dtype] = traffic_of(name, dtype, backend)
    print(table(HEAD, rows_of(measured), right=range(3, 7)))
    summary = summary_of(measured)
    print(f"\n{table(RECORDED, summary, right=range(1, 5))}")
    worse = [case for case, each in measured.items() if record.is_worse(case[0], record.key_of(*case[1:]), each.ratio)]
    for name, backend, dtype in worse:
        ratio = measured[name, backend, dtype].ratio
        print(record.change(name, record.key_of(backend, dtype), ratio), file=sys.stderr)
    if options.renew:
        renew(measured, options.accept)
    if options.record:
        figures.record("traffic", RECORDED, summary)
    above = options.limit is not None and any(each.ratio > options.limit for each in measured.values())
    return int(above or (bool(worse) and not (options.renew and options.accept)))


if __name__ == "__main__":
    sys.exit(main())
