"""The generated kernels of a program, and what was not fused and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from aottrain.explain.diagrams import op_and_line, ops_text
from aottrain.explain.records import KernelRecord, Refusal
from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.kernels.traffic import moved_bytes
from aottrain.ir.schedule import Schedule

_NUMBER = re.compile(r"(?<=[a-z])_?\d+\b|\b\d+ (?=bytes)")


def kernel_records(schedules: Sequence[Schedule], render: Callable[[KernelIR], str]) -> tuple[KernelRecord, ...]:
    """Those that move most bytes first. render: a kernel's code."""
    alike: dict[object, list[KernelIR]] = {}
    for call in (call for schedule in schedules for call in schedule.kernels):
        kernel = call.kernel
        parameters = tuple(replace(parameter, name="") for parameter in kernel.parameters)
        alike.setdefault(replace(kernel, name="", sources=(), parameters=parameters), []).append(kernel)
    records = [_record(kernels, render) for kernels in alike.values()]
    return tuple(sorted(records, key=lambda record: -record.total_bytes))


def _record(kernels: Sequence[KernelIR], render: Callable[[KernelIR], str]) -> KernelRecord:
    first = kernels[0]
    lines = dict.fromkeys(line for kernel in kernels for _, line in map(op_and_line, kernel.sources) if line)
    names = tuple(kernel.name for kernel in kernels)
    return KernelRecord(names, ops_text(first.sources), tuple(lines), str(first), render(first), moved_bytes(first))


def refusals(schedules: Iterable[Schedule]) -> tuple[Refusal, ...]:
    """Why calls are not one kernel with what makes their operands: those alike, as of repeated blocks, together."""
    found: dict[tuple[str, str], Refusal] = {}
    for schedule in schedules:
        for name, reason in schedule.reasons.items():
            key = _NUMBER.sub("", name), _NUMBER.sub("", reason)
            known = found.get(key, Refusal(name, reason, 0))
            found[key] = replace(known, count=known.count + 1)
    return tuple(sorted(found.values(), key=lambda refusal: -refusal.count))
