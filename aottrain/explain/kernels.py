"""The generated kernels of a program, and what was not fused and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import fx

from aottrain.explain.diagrams import op_and_line, ops_text
from aottrain.explain.records import KernelRecord, Refusal
from aottrain.ir.graph import info, results, storage_root
from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.kernels.traffic import moved_by_parameter, moved_bytes
from aottrain.ir.ops import OpKind
from aottrain.ir.schedule import KernelCall, Schedule

_NUMBER = re.compile(r"(?<=[a-z])_?\d+\b|\b\d+ (?=bytes)")


def kernel_records(schedules: Sequence[Schedule], render: Callable[[KernelIR], str]) -> tuple[KernelRecord, ...]:
    """Those that move most bytes first. render: a kernel's code."""
    alike: dict[object, list[KernelIR]] = {}
    needed: dict[object, int] = {}
    for call, num_bytes in (pair for schedule in schedules for pair in _needed(schedule)):
        kernel = call.kernel
        parameters = tuple(replace(parameter, name="") for parameter in kernel.parameters)
        key = replace(kernel, name="", sources=(), parameters=parameters)
        alike.setdefault(key, []).append(kernel)
        needed[key] = needed.get(key, 0) + num_bytes
    records = [_record(kernels, needed[key], render) for key, kernels in alike.items()]
    return tuple(sorted(records, key=lambda record: -record.total_bytes))


def _needed(schedule: Schedule) -> Iterator[tuple[KernelCall, int]]:
    """Each kernel with the bytes that it would move if all generated kernels beside it were one with it: those of
    operands that no other one makes, and of results that something else reads, or nothing within this graph."""
    makers = {storage_root(node): call for call in schedule.kernels for node in call.writes}
    by_kernels = {storage_root(node) for call in schedule.kernels for node in call.reads}
    by_others = set[fx.Node]()
    for call in schedule.calls:
        if isinstance(call, fx.Node) and info(call).kind not in (OpKind.VIEW, OpKind.STRUCTURE, OpKind.SIZE):
            by_others.update(map(storage_root, call.all_input_nodes))
    graphs = {node.graph for call in schedule.kernels for node in call.buffers}
    by_others.update(storage_root(node) for graph in graphs for node in results(graph) if node is not None)
    for call in schedule.kernels:
        total = 0
        for node, read, written in zip(call.buffers, *moved_by_parameter(call.kernel), strict=True):
            root = storage_root(node)
            total += read if makers.get(root, call) is call else 0
            total += written if root in by_others or root not in by_kernels else 0
        yield call, total


def _record(kernels: Sequence[KernelIR], needed_bytes: int, render: Callable[[KernelIR], str]) -> KernelRecord:
    first = kernels[0]
    lines = dict.fromkeys(line for kernel in kernels for _, line in map(op_and_line, kernel.sources) if line)
    names = tuple(kernel.name for kernel in kernels)
    ops, moved = ops_text(first.sources), moved_bytes(first)
    return KernelRecord(names, ops, tuple(lines), str(first), render(first), moved, needed_bytes)


def refusals(schedules: Iterable[Schedule]) -> tuple[Refusal, ...]:
    """Why calls are not one kernel with what makes their operands: those alike, as of repeated blocks, together."""
    found: dict[tuple[str, str], Refusal] = {}
    for schedule in schedules:
        for name, reason in schedule.reasons.items():
            key = _NUMBER.sub("", name), _NUMBER.sub("", reason)
            known = found.get(key, Refusal(name, reason, 0))
            found[key] = replace(known, count=known.count + 1)
    return tuple(sorted(found.values(), key=lambda refusal: -refusal.count))
