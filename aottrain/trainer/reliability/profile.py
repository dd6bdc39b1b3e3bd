"""`profile=step`: three steps after the warm-up under torch.profiler, as a trace for Perfetto or chrome://tracing, and
as a table of where the time went.

`profile=memory`: each allocation of these steps. On a CPU a trace, too, whose events named [memory] have the
allocator's own bytes; on CUDA the allocator's history and segments, as https://pytorch.org/memory_viz shows them, after
these steps and where memory runs out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from aottrain.explain.records import KernelRecord
from aottrain.explain.report import CompileReport
from aottrain.ir.settings.decisions import TRAFFIC
from aottrain.ir.settings.files import write_whole
from aottrain.runtime.labels import labelled_launches
from aottrain.trainer.meters import memory_step

if TYPE_CHECKING:
    from aottrain.config.run import RunConfig

FILES = {"step": "trace.json", "memory": "memory.json"}
TABLE = "profile.json"
SNAPSHOT = "memory.pickle"
_HISTORY = 100_000  # events that CUDA's allocator keeps
_NUM_STEPS = 3
_MOST_ROWS = 20
_NO_NAME = "Python, and what else has no name"
_STEP = re.compile(r"step \d+")


class StepProfile:
    """Each generated kernel has its name, its modules and its lines in the trace; each step its number.

    report: gives what was compiled, asked for at the end, for the bytes that kernels move.
    """

    def __init__(
        self,
        config: RunConfig,
        start: int,
        folder: Path,
        say: Callable[[str], None],
        device: str = "cpu",
        report: Callable[[], CompileReport | None] = lambda: None,
    ):
        self._steps = _steps_of(config, start, device) if config.profile else range(0)
        self._last = self._steps[-1] if self._steps else None
        if config.profile and not self._steps and start < config.trainer.steps:
            text = "there is but the one whose memory is measured; measure.memory=false, or more steps, leave one"
            say(f"warning: profile={config.profile} profiles no step: {text}")
        self._of_memory = config.profile == "memory"
        self._has_history = self._of_memory and device == "cuda"
        self._folder, self._say, self._report = folder, say, report
        self._profile: profile | None = None
        if self._has_history:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)

    def note_out_of_memory(self, step: int) -> None:
        """In this step; on a CPU the plan's memory over the step stands in compile_report.html."""
        if self._has_history:
            self._write(f"memory_at_{step}.pickle", torch.cuda.memory._dump_snapshot)

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Around a step."""
        if step not in self._steps or self._has_history:
            yield
            if step == self._last and self._has_history:
                self._write(SNAPSHOT, torch.cuda.memory._dump_snapshot)
            return
        if self._profile is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=activities, record_shapes=True, profile_memory=self._of_memory)
            self._profile.start()
        try:
            with labelled_launches(), torch.profiler.record_function(f"step {step}"):
                yield
        finally:
            if step == self._last:
                self._end()

    def _end(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        self._write(FILES["memory" if self._of_memory else "step"], self._profile.export_chrome_trace)
        if not self._of_memory:
            table = where_time_goes(self._profile.events() or (), self._report())
            text = json.dumps(table, indent=1) + "\n"
            self._write(TABLE, lambda path: Path(path).write_text(text, encoding="utf-8"))
        self._profile, self._steps = None, range(0)  # its events take hundreds of megabytes

    def _write(self, name: str, write: Callable[[str], object]) -> None:
        path = self._folder / name
        try:
            write_whole(path, lambda temporary: write(str(temporary)))
            self._say(f"profile: {path}")
        except (OSError, RuntimeError) as error:
            self._say(f"warning: {path}: cannot be written: {error}; going on")


def _steps_of(config: RunConfig, start: int, device: str) -> range:
    """Those that are profiled: the first after the warm-up, or where there are fewer, the last ones. Never the one
    whose memory is measured, which on a CPU is under a profiler of its own: torch has one at a time, and ends the
    process where the outer one is then asked for its events."""
    last = config.trainer.steps
    first = min(start + config.measure.warmup_steps + 2, max(last - _NUM_STEPS + 1, start + 1))
    measured = memory_step(config.measure, start + 1, last) if device == "cpu" else None
    if measured is None or first > measured:
        return range(first, min(first + _NUM_STEPS, last + 1))
    if measured < last:
        return range(measured + 1, last + 1)
    return range(max(start + 1, measured - _NUM_STEPS), measured)


def where_time_goes(events: Any, report: CompileReport | None) -> dict[str, Any]:
    """Seconds of a step by operator and generated kernel, without what each calls itself; the 20 longest. Kernels that
    are one function, as of repeated blocks, are one row.

    events: as torch.profiler gives them one by one. Those between steps, as checks, do not count. On a CPU what is in a
    step and has no name of its own, as Python, is one row; on CUDA the times are the device's, of its kernels alone.
    """
    spans = [event.time_range for event in events if _STEP.fullmatch(event.name) and not _is_of_device(event)]
    steps = max(len(spans), 1)
    on_device = any(map(_is_of_device, events))
    kernels = _kernels(report)
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    for event in events:
        if on_device != _is_of_device(event) or (on_device and event.is_user_annotation):
            continue
        at = event.time_range
        if not on_device and not any(span.start <= at.start and at.end <= span.end for span in spans):
            continue
        name = event.name.partition(" ")[0]  # of a kernel; its modules and lines follow
        name = kernels[name].names[0] if name in kernels else _NO_NAME if _STEP.fullmatch(event.name) else event.name
        micros = event.self_device_time_total if on_device else event.self_cpu_time_total
        seconds[name] = seconds.get(name, 0.0) + micros / 1e6 / steps
        calls[name] = calls.get(name, 0) + 1
    names = sorted((name for name in seconds if seconds[name] > 0), key=lambda name: -seconds[name])
    rows = []
    for name in names[:_MOST_ROWS]:
        row: dict[str, Any] = {"name": name, "calls": calls[name] / steps, "seconds": seconds[name]}
        if name in kernels:
            record = kernels[name]
            row |= {"computes": record.ops, "lines": list(record.lines), "bytes": record.moved_bytes}
        rows.append(row)
    return {
        "steps": steps,
        "seconds": sum(seconds.values()),
        "bytes_per_s": _measured_rate(report),
        "rows": rows,
        "left_out": max(len(names) - _MOST_ROWS, 0),
    }


def _is_of_device(event: Any) -> bool:
    return event.device_type == DeviceType.CUDA


def _kernels(report: CompileReport | None) -> Mapping[str, KernelRecord]:
    """By name. Where several programs have a kernel of a name, a time tells nothing of which: none of that name."""
    found: dict[str, list[KernelRecord]] = {}
    for graph in report.graphs if report is not None else ():
        for record in graph.kernel_records:
            for name in record.names:
                found.setdefault(name, []).append(record)
    return {name: records[0] for name, records in found.items() if len(records) == 1}


def _measured_rate(report: CompileReport | None) -> float | None:
    """Bytes a second that the machine's memory gives, where that was measured."""
    for decision in report.decisions.decisions if report is not None else ():
        if decision.kind == "rates" and decision.source in ("measured", "cache") and isinstance(decision.choice, dict):
            return decision.choice.get(TRAFFIC)
    return None
