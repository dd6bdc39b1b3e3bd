"""What a program is compiled to, as text: decisions, joint graph, plan, both schedules, memory, generated source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

import aottrain
from aottrain.compiler import pipeline
from aottrain.compiler.codegen.cpp.library import LIBRARY
from aottrain.compiler.codegen.cpp.multi_tensor import render_multi_tensor
from aottrain.compiler.codegen.triton.multi_tensor import render_triton_multi_tensor
from aottrain.compiler.codegen.triton.render import render_code, render_triton
from aottrain.compiler.link import backends, programs
from aottrain.compiler.optimizers.formulas import ADAMW, LION, SGD, Segment, optimizer_step
from aottrain.ir.schedule import KernelCall, MemoryPlan, Schedule
from aottrain.ir.text import graph_text, node_text
from tests.golden.programs import PROGRAMS, Golden

OPTIMIZERS = {
    "adamw": (ADAMW, ("exp_avg", "exp_avg_sq")),
    "sgd": (SGD, ("momentum_buffer",)),
    "lion": (LION, ("exp_avg",)),
}
FOLDER = Path(__file__).parent / "texts"
NAMES = (*PROGRAMS, *(f"optimizer_{name}_{backend}" for name in OPTIMIZERS for backend in ("cpp", "triton")), "library")


def text_of(name: str) -> str:
    """The text of NAMES' entry, as it is made now, for two threads: plans count what each of them computes in."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return _text_of(name)
    finally:
        torch.set_num_threads(threads)


def _text_of(name: str) -> str:
    if name == "library":
        return LIBRARY
    if name in PROGRAMS:
        text = "".join(f"== {title}\n{text}\n\n" for title, text in _sections(PROGRAMS[name]))
        return re.sub(r"(\w\.py):\d+", r"\1", text)  # where a line stands in its file may change
    _, optimizer, backend = name.split("_")
    formula, states = OPTIMIZERS[optimizer]
    program = optimizer_step(formula, tuple(Segment(dtype, states) for dtype in (torch.float32, torch.bfloat16)))
    return _without_library((render_multi_tensor if backend == "cpp" else render_triton_multi_tensor)(program))


def _sections(golden: Golden) -> Iterator[tuple[str, str]]:
    known = compiled(golden)
    report, built, decided = known["report"], known["built"], known["decided"]
    yield "stages", "\n".join(dict.fromkeys(stage.name for stage in report.stages))
    yield "decisions", "\n".join(_decisions(report))
    yield "joint graph", graph_text(built["joint"].graph)
    yield "plan", str(built["plan"])
    for title, graph in (("forward", built["parts"].forward), ("backward", built["parts"].backward)):
        if graph is not None:
            yield f"{title} graph", graph_text(graph)
    kernels: list[KernelCall] = []
    for fused, title in zip(decided.fused, ("forward", "backward"), strict=False):
        yield f"{title} schedule", "\n".join(_schedule(fused.schedule))
        if fused.memory is not None:
            yield f"{title} memory", "\n".join(_memory(fused.memory))
        kernels += fused.schedule.kernels
    yield "kernels", "\n".join(_sources(kernels, str(report.kernel)))


def compiled(golden: Golden) -> dict[str, Any]:
    """The values that the report is made of. Nothing is compiled by another compiler, and no device is asked for."""
    seen: dict[str, Any] = {}
    describe = aottrain.compiler.pipeline.describe

    def tap(joint: Any, plan: Any, parts: Any, decided: Any) -> Any:
        seen.update(built={"joint": joint, "plan": plan, "parts": parts}, decided=decided)
        return describe(joint, plan, parts, decided)

    def unlinked(kernels: Any, *_: Any) -> Any:
        return {call.kernel.name: None for call in kernels}, 0, ""

    target, arguments = golden.make()
    call = aottrain.compile(target, capture="trace", on_unsupported="error", **golden.options)
    with (
        mock.patch.object(pipeline, "describe", tap),
        mock.patch.object(programs, "_link", unlinked),
        mock.patch.object(programs, "_link_triton", unlinked),
        mock.patch.object(backends, "check_device", lambda device: None),
        mock.patch.object(backends, "compiler_obstacle", lambda: ""),
    ):
        seen["report"] = call.prepare(*arguments)
    return seen


def _decisions(report: Any) -> Iterator[str]:
    yield f"{report.mode}, {report.partition}, budget {report.budget}, kernel {report.kernel} {report.kernel_reason}"
    yield f"saved {report.saved_bytes} of at least {report.min_cut_saved_bytes} and at most {report.save_all_bytes} B"
    yield f"predicted peak {report.predicted_peak_bytes} B: {report.memory}"
    yield f"FLOPs {report.forward_flops}, {report.backward_flops}, recomputed {report.recompute_flops}"
    yield f"library calls {report.library_calls}"
    yield from (*report.loss_heads, *filter(None, [report.layouts]), *map(str, report.curve))


def _schedule(schedule: Schedule) -> Iterator[str]:
    for call in schedule.calls:
        if isinstance(call, fx.Node):
            library, reason = schedule.libraries.get(call, ("", ""))
            yield f"{node_text(call)}{f' by {library}: {reason}' if library else ''}"
        else:
            yield f"{call.kernel.name}({', '.join(node.name for node in call.buffers)})"
    yield from (f"{name} apart: {reason}" for name, reason in schedule.reasons.items())
    yield from (f"{node.name} in place of {operand.name}" for node, operand in schedule.in_place.items())


def _memory(memory: MemoryPlan) -> Iterator[str]:
    yield f"arena of {memory.arena_bytes} B, at least {memory.max_live_bytes} B"
    yield from (f"{node.name} at {offset}" for node, offset in memory.offsets.items())
    yield f"until the backward: {', '.join(sorted(node.name for node in memory.residuals))}"
    yield from (f"call {number} computes in {place}" for number, place in memory.scratch.items())


def _sources(kernels: list[KernelCall], backend: str) -> Iterator[str]:
    if backend == "cpp":
        yield from map(_without_library, programs.cpp_units(kernels)[0])
    else:
        modules = {render_code(call.kernel): call.kernel for call in reversed(kernels)}
        yield from (render_triton(kernel) for kernel in reversed(modules.values()))


def _without_library(text: str) -> str:
    """What all C++ texts begin with is a text of its own."""
    return re.sub(r"[ \t]+$", "", text.replace(LIBRARY, "// the library\n"), flags=re.MULTILINE)
