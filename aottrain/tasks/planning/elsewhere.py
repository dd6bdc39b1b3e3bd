"""task=plan device=h100-sxm: whether a step would fit on a device that is not at hand, and how fast it would be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aottrain.compiler.partition.stored import KEY
from aottrain.config.devices import find_target
from aottrain.config.run import RunConfig
from aottrain.errors import UnsupportedError
from aottrain.explain.report import CompileReport
from aottrain.explain.tables import table
from aottrain.ir.settings.devices import Target
from aottrain.ir.units import format_bytes, format_count, format_flops, format_percent, format_seconds
from aottrain.metrics.sinks import write_result
from aottrain.report import html
from aottrain.tasks.planning.rows import RESERVED, UNCERTAINTY, Row, Subject, rows_of, subject

_HEADER = ("batch", "devices", "plan", "peak", "fits", "step", "tokens/s", "MFU", "limit")


def run(config: RunConfig) -> int:
    """Print the plan of a step on the device that `device` names, or a table of such plans; write plan.json and
    compile_report.html, of the cheapest one."""
    target = find_target(config.device)
    rows: list[Row] = []
    subjects: list[Subject] = []
    for batch_size in config.plan.batches or (config.data.batch_size,):
        try:
            subjects.append(subject(config, target, batch_size))
        except UnsupportedError as error:
            raise UnsupportedError(f"task=plan of a device that is not here: {error.reason}", error.source) from error
        rows += rows_of(subjects[-1], config, target)
    rows.sort(key=lambda row: row.rank)
    directory = Path(config.output_dir)
    plan = describe(config, target, subjects[0], rows)
    write_result(directory / "plan.json", json.dumps(plan, indent=2) + "\n")
    report = CompileReport([rows[0].report], target=config.recipe.title)
    write_result(directory / "compile_report.html", html.render(report, {"recipe": config.recipe.title}))
    print(render(plan))
    if len(rows) == 1:
        print()
        print(report.explain())
    print(f"\nNothing was run. Every value, and the graphs: {directory / 'compile_report.html'}")
    return 0


def describe(config: RunConfig, target: Target, subject: Subject, rows: Sequence[Row]) -> dict[str, Any]:
    """What plan.json holds: the rows as they are ranked, the cheapest per example of those that fit first."""
    return {
        "recipe": config.recipe.title,
        "device": target.name,
        "device_source": target.source,
        "device_memory_bytes": target.memory_bytes,
        "precision": config.trainer.precision,
        "num_micro_batches": config.trainer.accumulate,
        "num_parameters": subject.num_parameters,
        "num_trained": subject.num_trained,
        "reserve_factor": RESERVED,
        "time_uncertainty": UNCERTAINTY,
        "rows": [_plain(row) for row in rows],
        KEY: rows[0].partition,
    }


def _plain(row: Row) -> dict[str, Any]:
    graph = row.report
    return {
        "batch_size": row.batch_size,
        "world": row.world,
        "plan": row.asked,
        "budget_is_met": row.met,
        "kernel": graph.kernel,
        "verdict": row.verdict,
        "allocated_peak_bytes": row.peak_bytes,
        "memory": row.memory,
        "saved_bytes": row.saved_bytes,
        "flops_per_step": {
            "forward": graph.forward_flops,
            "backward": graph.backward_flops,
            "recompute": graph.recompute_flops,
        },
        "step_s": row.step_s,
        "step_s_range": [row.step_s * (1 - UNCERTAINTY), row.step_s * (1 + UNCERTAINTY)],
        "compute_s": row.time.compute_s,
        "traffic_s": row.time.traffic_s,
        "gaps_s": row.time.gaps_s,
        "launch_s": row.time.launch_s,
        "exchange_s": row.exchange_s,
        "num_calls": row.time.num_calls,
        "tokens_per_s": row.tokens_per_s,
        "samples_per_s": row.samples_per_s,
        "mfu": row.mfu,
        "limit": row.limit,
    }


def render(plan: dict[str, Any]) -> str:
    """As text: the first row in full, all rows where there are several."""
    rows = plan["rows"]
    best, memory = rows[0], plan["device_memory_bytes"]
    times = "" if plan["num_micro_batches"] == 1 else f", {plan['num_micro_batches']} micro-batches a step"
    lines = [
        f"Plan of {plan['recipe']} for {plan['device']} ({plan['device_source']}), {plan['precision']}{times}",
        f"parameters  {format_count(plan['num_parameters'])}",
    ]
    if len(rows) > 1:
        lines += ["", table(_HEADER, [_cells(row) for row in rows], right=(0, 1, 3, 5, 6, 7)), ""]
        lines.append(f"The first one, batches of {best['batch_size']}:")
    lines += [
        f"memory      {_verdict(best)}: {format_bytes(best['allocated_peak_bytes'])} allocated at the peak, "
        f"{format_bytes(memory)} there; allocators hold up to {RESERVED:g} times what is allocated",
        f"            {', '.join(f'{name} {format_bytes(size)}' for name, size in _largest(best['memory']))}",
        f"kernel      {best['kernel']}, saves {format_bytes(best['saved_bytes'])}, recomputes "
        f"{format_flops(best['flops_per_step']['recompute'])} of {format_flops(best['flops_per_step']['forward'])}",
        f"step        {format_seconds(best['step_s'])} ({_range(best)}), {_speed(best)}, "
        f"MFU {format_percent(best['mfu'])}, limited by {best['limit']}",
        f"            {_parts(best)}",
    ]
    return "\n".join(lines)


def _largest(memory: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(((name, size) for name, size in memory.items() if size >> 10), key=lambda item: -item[1])


def _verdict(row: dict[str, Any]) -> str:
    return row["verdict"] if row["budget_is_met"] else f"{row['verdict']}, and the budget cannot be met"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    verdict = row["verdict"] if row["budget_is_met"] else f"{row['verdict']} (above {row['plan']})"
    tokens = row["tokens_per_s"]
    return (
        str(row["batch_size"]),
        str(row["world"]),
        row["plan"],
        format_bytes(row["allocated_peak_bytes"]),
        verdict,
        format_seconds(row["step_s"]),
        f"{tokens:,.0f}" if tokens else f"{row['samples_per_s']:,.1f} examples",
        format_percent(row["mfu"]),
        row["limit"],
    )


def _range(row: dict[str, Any]) -> str:
    low, high = map(format_seconds, row["step_s_range"])
    return f"{low} to {high}"


def _speed(row: dict[str, Any]) -> str:
    of = "" if row["world"] == 1 else f" of {row['world']} devices"
    tokens, samples = row["tokens_per_s"], row["samples_per_s"]
    return f"{tokens:,.0f} tokens/s{of}" if tokens else f"{format_count(round(samples, 1))} examples/s{of}"


def _parts(row: dict[str, Any]) -> str:
    parts = [("compute", "compute_s"), ("memory traffic", "traffic_s"), ("gaps", "gaps_s"), ("launches", "launch_s")]
    text = ", ".join(f"{name} {format_seconds(row[key])}" for name, key in parts)
    exchange = f", exchanges {format_seconds(row['exchange_s'])} beside them" if row["exchange_s"] else ""
    return f"{text} on the host, {row['num_calls']:,} calls{exchange}"
