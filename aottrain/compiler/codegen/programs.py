"""Both graphs of a program to functions that run them by generated kernels, and libraries between them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from aottrain.compiler.codegen.cpp import render_cpp
from aottrain.compiler.codegen.cpp_library import LIBRARY
from aottrain.compiler.codegen.triton_programs import link_triton
from aottrain.compiler.scheduling.memory import plan_memory
from aottrain.compiler.scheduling.order import schedule
from aottrain.errors import UnsupportedError
from aottrain.ir.graph import PartitionedGraph, results
from aottrain.ir.kernel import scratch_bytes
from aottrain.ir.schedule import KernelCall, MemoryPlan, Schedule
from aottrain.runtime.executor import Runner
from aottrain.runtime.launch import Launch, cpp_launch, scheduled_runner
from aottrain.runtime.native import load

FLAGS = ("-fopenmp", "-fno-trapping-math", "-fwrapv")


@dataclass(frozen=True)
class FusedGraph:
    """One graph, planned: what runs, where its values live, and its kernels, ready to be called."""

    graph: fx.Graph
    schedule: Schedule
    memory: MemoryPlan | None
    launches: dict[str, Launch]
    backend: str

    def runner(self) -> Runner:
        return scheduled_runner(self.graph, self.schedule, self.launches, self.memory)


Planned = tuple[fx.Graph, int, Schedule]  # the graph, how many of its results are no residuals, what runs


def plan_program(parts: PartitionedGraph, local: bool = False) -> list[Planned]:
    """The schedules of the forward and, where there is one, the backward. local: as `scheduling.order.schedule`."""
    planned = [(parts.forward, parts.num_forward_outputs, schedule(parts.forward, "forward_", local))]
    if parts.backward is not None:
        count = len(results(parts.backward))
        planned.append((parts.backward, count, schedule(parts.backward, "backward_", local)))
    return planned


def fuse_graph(graph: fx.Graph, reuse_memory: bool = True, backend: str = "cpp") -> FusedGraph:
    """A backward on its own, as for calls in which some tangents are undefined. Where memory is not reused, as under a
    budget, its kernels are small ones, which keep nothing alive for longer than op by op."""
    planned = schedule(graph, "backward_", local=not reuse_memory)
    return fuse_program([(graph, len(results(graph)), planned)], reuse_memory, backend)[0]


def fuse_program(planned: Sequence[Planned], reuse_memory: bool = True, backend: str = "cpp") -> list[FusedGraph]:
    """Make the kernels; those in C++ are compiled together, into one shared object.

    reuse_memory: temporaries share an arena, and residuals get blocks that are used again. Without it all buffers are
    fresh and die at their last use, as a memory budget counts them.
    """
    # On a device calls may be in flight on several streams, which arenas know nothing of; torch's allocator does.
    reuse_memory = reuse_memory and backend == "cpp"
    link = _link if backend == "cpp" else link_triton
    launches = link([call for _, _, plan in planned for call in plan.kernels])
    return [
        FusedGraph(graph, plan, plan_memory(graph, plan, count) if reuse_memory else None, launches, backend)
        for graph, count, plan in planned
    ]


def _link(kernels: Sequence[KernelCall]) -> dict[str, Launch]:
    """Equal kernels, as those of repeated blocks, are one function."""
    source, functions = cpp_source(kernels)
    if not functions:
        return {}
    library = load(source, FLAGS)
    if library is None:
        raise UnsupportedError("no C++ compiler works on this machine")
    return {
        call.kernel.name: cpp_launch(getattr(library, functions[call.kernel.name]), scratch_bytes(call.kernel))
        for call in kernels
    }


def cpp_source(kernels: Sequence[KernelCall]) -> tuple[str, dict[str, str]]:
    """One self-contained C++ text, and the function of each kernel."""
    parts, known, functions = [LIBRARY], {}, {}  # type: tuple[list[str], dict[str, str], dict[str, str]]
    for call in kernels:
        kernel = call.kernel
        text = re.sub(rf"\b{kernel.name}\b", "KERNEL", render_cpp(kernel))
        if text not in known:
            known[text] = f"kernel_{len(known)}"
            header = [f"// {line}" for line in str(kernel).splitlines() if line.strip()]
            parts.append("\n".join(header) + "\n" + text.replace("static int KERNEL", f'extern "C" int {known[text]}'))
        functions[kernel.name] = known[text]
    return "\n".join(parts), functions
