"""Folders as runs leave them, without running any: summary.json, metrics.csv, the configuration, tables of tasks."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

from aottrain.metrics.sinks import COLUMNS, CsvSink, write_summary

SETTINGS = {
    "seed": 1,
    "compare": {"loss_tolerance": 1e-3},
    "trainer": {"steps": 100, "precision": "fp32"},
    "optimizer": {"name": "adamw", "lr": 2e-3},
    "engine": {"name": "aot"},
    "partition": {"strategy": "budget", "budget": 1.0},
    "recipe": {"name": "transformer", "model": {"dropout": 0.0}},
    "measure": {"warmup_steps": 2},
}
MODULES = {"blocks.*.mlp": 9_000_000, "blocks.*.attention": 5_000_000, "head": 1_000_000}


def nested(changes: dict[str, Any]) -> dict[str, Any]:
    """SETTINGS with {"section.key": value}."""
    settings = json.loads(json.dumps(SETTINGS))
    for key, value in changes.items():
        *sections, name = key.split(".")
        inner = settings
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return settings


def write_run(
    folder: Path,
    *,
    steps: int = 100,
    step_ms: float = 100.0,
    loss: float = 5.5,
    peak: int = 80 * 2**20,
    settings: dict[str, Any] | None = None,
    jitter: float = 0.03,
    seed: int = 0,
    **summary: Any,
) -> Path:
    """A run's files. settings: what differs from SETTINGS, flat. summary: further keys of summary.json."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, chosen = random.Random(seed), nested(settings or {})
    (folder / "run_config.json").write_text(json.dumps(chosen), encoding="utf-8")
    rows, times = [], []
    for step in range(1, steps + 1):
        time = step_ms * (1 + jitter * (draw.random() - 0.5)) * (1.6 if step == 1 else 1.0)
        times.append(time)
        now = 2 + (loss - 2) * math.exp(-3 * step / steps) + 0.02 * math.sin(step)
        row = {"step": step, "train/loss": now, "train/lr": 1e-3 * step / steps, "train/grad_norm": 1 + 8 / step}
        row |= {"perf/step_ms": time, "perf/tokens_per_s": 2048e3 / time, "perf/samples_per_s": 16e3 / time}
        if step % 10 == 0 or step == steps:
            row |= {"memory/peak_bytes": peak, "memory/peak_rss_bytes": 9 * peak, "val/loss": now - 0.1}
        rows.append({name: row.get(name) for name in COLUMNS})
    sink = CsvSink(folder / "metrics.csv")
    sink.write(rows)
    median = sorted(times)[len(times) // 2] if times else step_ms
    sink.close({}, 0)
    engine = chosen["engine"]["name"]
    values = {
        "status": "finished", "recipe": "transformer", "engine": engine, "steps": steps, "precision": "fp32",
        "kernel": "auto" if engine == "aot" else None, "device": "cpu", "num_parameters": 1_853_568, "fallbacks": 0,
        "last_loss": rows[-1]["train/loss"] if rows else None, "val_loss": rows[-1]["val/loss"] if rows else None,
        "step_ms_median": median, "step_ms_p90": median * 1.1, "tokens_per_s": 2048e3 / median, "compile_s": 3.5,
        "samples_per_s": 16e3 / median, "peak_bytes": peak, "saved_bytes": peak // 2,
        "machine": "a processor, 2 threads",
        "predicted_peak_bytes": int(peak * 1.01) if engine == "aot" else None,
        "saved_by_module": MODULES if engine == "aot" else None,
    }  # fmt: skip
    write_summary(folder / "summary.json", values | summary)
    return folder


def write_comparison(
    folder: Path, *, rounds: int = 3, failing: str = "", step_ms: dict[str, float] | None = None
) -> Path:
    """As task=compare leaves it."""
    times = step_ms or {"eager": 300.0, "torch_compile": 250.0, "aot": 150.0}
    table = []
    for number, (engine, time) in enumerate(times.items()):
        settings = {"engine.name": engine}
        if engine == failing:
            write_run(folder / engine / "timed-1", steps=0, settings=settings, status="failed", error="E: no compiler")
        else:
            for index in range(rounds):
                at = time * (1 + 0.05 * index)
                write_run(folder / engine / f"timed-{index + 1}", steps=30, step_ms=at, settings=settings,
                          peak=(3 - number) * 50 * 2**20, seed=index)  # fmt: skip
            write_run(folder / engine / "losses", steps=10, step_ms=time, settings=settings)
        verdict = "failed" if engine == failing else "reference" if engine == "eager" else "equal"
        reason = "no compiler" if engine == failing else ""
        error = 3e-7 if number else 0.0
        table.append({"engine": engine, "verdict": verdict, "reason": reason, "max_loss_error": error})
    write_table(folder / "compare.csv", table)
    write_overrides(folder, ["task=compare", "compare.rounds=3"])
    return folder


def write_sweep(folder: Path, jobs: list[dict[str, Any]], **common: Any) -> Path:
    """As a sweep leaves it: a job's {"section.key": value}, with step_ms, peak and so on in `common` or as functions of
    the job's number."""
    table, keys = [], dict.fromkeys(key for settings in jobs for key in settings)
    for number, settings in enumerate(jobs):
        own = {name: value(number) if callable(value) else value for name, value in common.items()}
        write_run(folder / str(number), settings=settings, seed=number, **own)
        row = {"job": number, "status": "finished", "exit_code": 0, **dict.fromkeys(keys, ""), **settings}
        table.append({**row, "last_loss": 2.0, "directory": folder / str(number)})
    write_table(folder / "sweep.csv", table)
    return folder


def write_overrides(folder: Path, overrides: list[str]) -> None:
    (folder / ".hydra").mkdir(exist_ok=True)
    text = "".join(f"- {json.dumps(override)}\n" for override in overrides)
    (folder / ".hydra" / "overrides.yaml").write_text(text, encoding="utf-8")


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
