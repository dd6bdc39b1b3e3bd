"""Forty models of many kinds, forward and backward: eager, torch.compile and aottrain in turns, `--model lstm`.

Every engine is in a process of its own, as in bench_kernels.py; a ratio is of one round. Without `--model` it takes an
hour or two on two cores, most of it torch.compile's compiling; `--results` keeps each model's figures, so that a table
that was interrupted goes on. At the end stand the geometric means and the models that were slower than eager or
torch.compile. `pip install transformers` for those whose names begin with hf; without it they are left out and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aottrain.config.choices import COMPARED  # noqa: E402
from aottrain.explain.tables import table  # noqa: E402
from aottrain.ir.units import format_bytes  # noqa: E402
from aottrain.tasks.measuring.pareto_points import Point, ratio  # noqa: E402
from aottrain.tasks.measuring.runs_in_turns import serve  # noqa: E402
from scripts.bench_kernels import begin, engines_parser, parsed, take_turns  # noqa: E402
from scripts.breadth_models import MODELS  # noqa: E402
from scripts.figures import record  # noqa: E402

PEERS = tuple(engine for engine in COMPARED if engine != "aot")
HEADER = (
    "model", "ms of a step: eager, torch.compile, aottrain", "eager over aottrain", "torch.compile over aottrain",
    "peak: eager, torch.compile, aottrain", "runs eagerly",
)  # fmt: skip


def main() -> int:
    parser = engines_parser(__doc__, MODELS, COMPARED, "bench_breadth", steps=3, rounds=5)
    parser.add_argument("--results", type=Path, help="a JSON file: what it has is not run again")
    options = parsed(parser, COMPARED)
    torch.set_num_threads(options.threads)
    if options.engine:
        return serve(lambda: begin(MODELS[options.model[0]], options.engine, options.autocast, "eager"))
    results: dict[str, dict[str, Any]] = {}
    if options.results and options.results.exists():
        results = json.loads(options.results.read_text(encoding="utf-8"))
    for name in options.model or tuple(MODELS):
        if name.startswith("hf ") and importlib.util.find_spec("transformers") is None:
            print(f"{name}: left out, there is no package transformers", flush=True)
        elif name not in results:
            results[name] = bench(name, options)
            if options.results:
                options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    _print_summary({name: result for name, result in results.items() if name in (options.model or MODELS)})
    return 0


def bench(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print and perhaps record one model. Returns its row, and its ratios by the engine compared with."""
    arguments = ["--model", name, "--threads", str(options.threads)] + ["--autocast"] * options.autocast
    points, figures = take_turns(Path(__file__), name, arguments, options)
    ratios = {engine: ratio(points[engine], points["aot"]) for engine in PEERS if {engine, "aot"} <= points.keys()}
    cells = _cells(name, points, figures, ratios)
    print(" | ".join(cells), flush=True)
    if options.record:
        record("breadth", HEADER, [cells])
    return {"cells": cells, "ratios": {engine: one.median for engine, one in ratios.items() if one is not None}}


def _cells(
    name: str, points: Mapping[str, Point], figures: Mapping[str, Mapping[str, Any]], ratios: Mapping[str, Any]
) -> list[str]:
    def each(texts: Mapping[str, str]) -> str:
        return ", ".join(texts.get(engine, "-") for engine in COMPARED)

    eagerly = figures.get("aot", {}).get("fallbacks", [])
    return [
        name,
        each({engine: f"{point.step_ms_median or 0:.1f}" for engine, point in points.items()}),
        *(str(ratios.get(engine) or "-") for engine in PEERS),
        each({engine: format_bytes(one["peak_bytes"]) for engine, one in figures.items()}),
        "; ".join(eagerly) if eagerly else "nothing",
    ]


def _print_summary(results: Mapping[str, Mapping[str, Any]]) -> None:
    print(table(HEADER, [tuple(result["cells"]) for result in results.values()]))
    for engine in PEERS:
        ratios = {name: result["ratios"][engine] for name, result in results.items() if engine in result["ratios"]}
        if ratios:
            mean = math.exp(statistics.mean(map(math.log, ratios.values())))
            behind = sorted((value, name) for name, value in ratios.items() if value < 1)
            slower = ", ".join(f"{name} {value:.2f}x" for value, name in behind) or "none"
            print(f"against {engine}: {mean:.2f}x in geometric mean of {len(ratios)}; slower: {slower}")


if __name__ == "__main__":
    sys.exit(main())
